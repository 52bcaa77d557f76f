"""The oracle can fail: each test breaks one invariant on purpose and sees the comparison go red."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import megatron_llama.model.llama as llama
from megatron_llama.parallel import ParallelModel, Shard
from tests.layouts.table import TIED
from tests.oracle import TOLERANCE, oracle, run_layout, worst
from tests.ranks import RankFailed

# All of this runs inside forked ranks: patching modules there leaves the test process alone.


def no_sequence_parallel_sum(model: ParallelModel) -> None:
    model.replicated.sums_over_sequence = False


def no_kv_copy_sum(model: ParallelModel) -> None:
    model.replicated.kv_group = None


def no_tied_sum(model: ParallelModel) -> None:
    model.replicated.tied = False


def replicated_gradients_twice(model: ParallelModel) -> None:
    once = model.replicated.reduce

    def twice(shards: list[Shard]) -> None:
        once(shards)
        once(shards)

    model.replicated.reduce = twice  # type: ignore[method-assign, assignment]


def local_token_count(model: ParallelModel) -> None:
    ranks = dist.get_world_size()
    model._total_tokens = lambda batches: ranks * sum(b.loss_mask.sum() for b in batches)  # type: ignore[method-assign, assignment, return-value]


def mean_over_data_parallel_ranks(model: ParallelModel) -> None:
    for module in model.chunks[0].modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2.0)


def padding_in_the_loss(model: ParallelModel) -> None:
    llama.hide_padding = lambda logits, vocab_size: logits


def norms_count_copies(model: ParallelModel) -> None:
    def all_of_it(shard: Shard, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from (tensor[piece.local_slices] for piece in shard.pieces)

    Shard.owned = all_of_it  # type: ignore[method-assign]


def no_causal_mask(model: ParallelModel) -> None:
    attention = llama.F.scaled_dot_product_attention
    llama.F.scaled_dot_product_attention = lambda q, k, v, is_causal, enable_gqa: attention(
        q, k, v, enable_gqa=enable_gqa
    )


BROKEN = [
    (no_sequence_parallel_sum, 2, ["trainer.tp=2"], []),
    (no_kv_copy_sum, 4, ["trainer.tp=4"], []),
    (no_tied_sum, 2, ["trainer.pp=2"], [TIED]),
    (replicated_gradients_twice, 2, ["trainer.tp=2"], []),
    (replicated_gradients_twice, 4, ["trainer.tp=4", "trainer.sp=false"], []),
    (local_token_count, 2, ["trainer.zero=1"], []),
    (mean_over_data_parallel_ranks, 2, ["trainer.zero=1"], []),
    (padding_in_the_loss, 2, ["trainer.tp=2"], ["model.vocab_size=61"]),
    (norms_count_copies, 2, ["trainer.tp=2"], []),
    (norms_count_copies, 2, ["trainer.zero=0"], []),
    (no_causal_mask, 1, [], []),
]


@pytest.mark.parametrize(
    ("tamper", "ranks", "layout", "model"), BROKEN, ids=[f"{case[0].__name__}-{case[1]}" for case in BROKEN]
)
def test_oracle_goes_red(
    tamper: Callable[[ParallelModel], None], ranks: int, layout: list[str], model: list[str]
) -> None:
    expected = oracle(*model)
    try:
        result = run_layout(ranks, *layout, *model, tamper=tamper)
    except RankFailed as failure:
        assert "differ" in str(failure)
        return
    except AssertionError as failure:  # copies that drifted apart
        assert "differ" in str(failure) or "disagree" in str(failure)
        return
    assert max(worst(result, expected).values()) > 5 * TOLERANCE


def test_same_shard_on_all_ranks_is_seen() -> None:
    """The defect of the best-known small 3D trainer: each rank initialises its shard as if it were alone."""

    def same_everywhere(model: ParallelModel) -> None:
        with torch.no_grad():
            for shard in model.shards:
                if shard.local.dim() == 2:
                    shard.local.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))

    result, expected = run_layout(2, "trainer.tp=2", tamper=same_everywhere), oracle()
    name = "model.layers.0.mlp.down_proj.weight"
    left, right = result.initial[name].chunk(2, dim=1)
    assert torch.equal(left, right)
    assert not torch.equal(result.initial[name], expected.initial[name])
