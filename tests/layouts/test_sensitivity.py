"""The oracle can fail: each test breaks one invariant on purpose and sees the comparison go red."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_llama.parallel import ParallelModel
from tests.compiled import skip_without_compiler
from tests.layouts import tampers
from tests.layouts.table import (
    ASYNC_TP,
    BIAS_EPS,
    BIASES,
    BLOCKS,
    COMPILED,
    CP,
    DOCUMENTS,
    MICRO_4,
    MUON,
    OLMO2,
    QK_CLIP,
    QWEN2,
    QWEN3,
    TIED,
    ULYSSES,
    WIDE,
    WINDOW,
)
from tests.layouts.tampers import (
    bias_of_each_rank,
    blocks_without_global_ones,
    chunks_in_plain_order,
    compiled_gradients_of_one_token_more,
    documents_in_zigzag_order,
    documents_joined_at_a_chunk_boundary,
    gathered_pieces_of_the_wrong_rank,
    gradients_of_mean_squares_of_each_rank_alone,
    head_gradient_not_summed,
    key_gradients_of_each_rank_alone,
    keys_of_each_rank_alone,
    last_chunk_of_the_head_lost,
    local_token_count,
    logits_of_each_rank_alone,
    loss_weights_only_in_the_loss,
    matrices_of_each_rank_alone,
    mean_over_data_parallel_ranks,
    mean_squares_of_each_rank_alone,
    no_causal_mask,
    no_kv_copy_sum,
    no_kv_copy_sum_of_the_norm,
    no_sequence_parallel_sum,
    no_sequence_parallel_sum_of_biases,
    no_tied_sum,
    norms_before_the_branches,
    norms_count_copies,
    padding_in_the_loss,
    positions_of_the_rank,
    replicated_gradients_twice,
    scattered_pieces_of_the_wrong_rank,
    softmax_of_each_rank_alone,
    window_of_one_token_more,
)
from tests.oracle import TOLERANCE, Tamper, oracle, run_layout, worst
from tests.ranks import RankFailed
from tests.rows import rows

BROKEN: list[tuple[Tamper, int, list[str], list[str]]] = [
    (matrices_of_each_rank_alone, 2, ["trainer.tp=2"], [MUON]),
    (logits_of_each_rank_alone, 2, ["trainer.zero=1"], [QK_CLIP]),
    (logits_of_each_rank_alone, 4, ["trainer.tp=4", MICRO_4], [QK_CLIP]),
    (keys_of_each_rank_alone, 2, [CP], [QK_CLIP]),
    (no_sequence_parallel_sum, 2, ["trainer.tp=2"], []),
    (no_sequence_parallel_sum, 2, ["trainer.tp=2", "trainer.sp=false"], [QWEN3]),
    (no_kv_copy_sum, 4, ["trainer.tp=4", MICRO_4], []),
    (no_kv_copy_sum, 4, ["trainer.tp=4", MICRO_4], [QWEN2, BIAS_EPS]),
    (no_kv_copy_sum_of_the_norm, 4, ["trainer.tp=4", MICRO_4], [OLMO2]),
    (mean_squares_of_each_rank_alone, 2, ["trainer.tp=2"], [OLMO2]),
    (gradients_of_mean_squares_of_each_rank_alone, 2, ["trainer.tp=2"], [OLMO2]),
    (norms_before_the_branches, 2, ["trainer.tp=2"], [OLMO2]),
    (bias_of_each_rank, 2, ["trainer.tp=2"], [*BIASES, BIAS_EPS]),
    (no_sequence_parallel_sum_of_biases, 2, ["trainer.tp=2"], [*BIASES, BIAS_EPS]),
    (no_tied_sum, 2, ["trainer.pp=2"], [TIED]),
    (replicated_gradients_twice, 2, ["trainer.tp=2"], []),
    (replicated_gradients_twice, 4, ["trainer.tp=4", "trainer.sp=false", MICRO_4], []),
    (local_token_count, 2, ["trainer.zero=1"], []),
    (mean_over_data_parallel_ranks, 2, ["trainer.zero=1"], []),
    (padding_in_the_loss, 2, ["trainer.tp=2"], ["model.vocab_size=61"]),
    (last_chunk_of_the_head_lost, 1, [], []),
    (loss_weights_only_in_the_loss, 1, [], []),
    (softmax_of_each_rank_alone, 2, ["trainer.tp=2"], []),
    (head_gradient_not_summed, 2, ["trainer.tp=2"], []),
    (head_gradient_not_summed, 2, ["trainer.tp=2", "trainer.sp=false"], []),
    (norms_count_copies, 2, ["trainer.tp=2"], []),
    (norms_count_copies, 2, ["trainer.zero=0"], []),
    (no_causal_mask, 1, [], []),
    (window_of_one_token_more, 1, [], [WINDOW]),
    (blocks_without_global_ones, 1, [], [BLOCKS]),
    (compiled_gradients_of_one_token_more, 1, COMPILED, [*WIDE, WINDOW]),
    (chunks_in_plain_order, 2, [CP], []),
    (key_gradients_of_each_rank_alone, 2, [CP], []),
    (documents_joined_at_a_chunk_boundary, 2, [CP], [DOCUMENTS]),
    (documents_in_zigzag_order, 2, [CP], [DOCUMENTS]),
    (positions_of_the_rank, 2, [CP, ULYSSES], []),
    (local_token_count, 2, [CP], []),
    (mean_over_data_parallel_ranks, 2, [CP], []),
    (gathered_pieces_of_the_wrong_rank, 2, ASYNC_TP, []),
    (scattered_pieces_of_the_wrong_rank, 2, ASYNC_TP, []),
]
NAMED = {f"{case[0].__name__}, {' '.join([*case[2], *case[3]])}": case for case in BROKEN}
QUICK = {
    "no_sequence_parallel_sum, trainer.tp=2",
    "no_kv_copy_sum, trainer.tp=4 trainer.micro_batch_size=4",
    "no_tied_sum, trainer.pp=2 model.tie_word_embeddings=true",
    "mean_over_data_parallel_ranks, trainer.zero=1",
    "norms_count_copies, trainer.zero=0",
    "no_causal_mask, ",
    "last_chunk_of_the_head_lost, ",
    "key_gradients_of_each_rank_alone, trainer.cp=2",
}


@pytest.mark.parametrize(
    ("tamper", "ranks", "layout", "model"),
    rows(NAMED.items(), QUICK),
)
@pytest.mark.usefixtures("compiled_here")
def test_oracle_goes_red(tamper: Tamper, ranks: int, layout: list[str], model: list[str]) -> None:
    skip_without_compiler(layout)
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

    result, expected = run_layout(2, "trainer.tp=2", MICRO_4, tamper=same_everywhere), oracle()
    name = "model.layers.0.mlp.down_proj.weight"
    left, right = result.initial[name].chunk(2, dim=1)
    assert torch.equal(left, right)
    assert not torch.equal(result.initial[name], expected.initial[name])


def test_every_fault_is_used() -> None:
    # A fault that no test uses is an error.
    used = "".join(file.read_text() for file in Path(__file__).parent.parent.rglob("test_*.py"))
    defined = [name for name, value in vars(tampers).items() if getattr(value, "__module__", "") == tampers.__name__]
    assert [name for name in defined if not re.search(rf"\b{name}\b", used)] == []
