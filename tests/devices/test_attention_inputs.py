"""Packed examples don't attend to each other, on every path through attention."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.devices.kernels import Kernels
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.oracle import make_plan, on_ranks, rank_groups, rank_model
from tests.ranks import run_ranks

LENGTH = 16
# Two sequences of examples, the second with padding at its end.
PACKED = ((5, 1, 7, 3), (9, 4))
# Names, ranks, overrides. Two sequences make one micro batch, so the mask is one of several rows.
PATHS = {
    "plain": (1, []),
    "recompute selective": (1, ["trainer.recompute=selective"]),
    "recompute full": (1, ["trainer.recompute=full"]),
    "tp2+sp": (2, ["trainer.tp=2"]),
    "window, pp2": (2, ["trainer.pp=2", "model.sliding_window=3"]),
    "blocks, tp2+sp": (2, ["trainer.tp=2", "model.sparse_attention={block: 1, num_local_blocks: 2}"]),
    "tp4, copied kv heads": (4, ["trainer.tp=4", "trainer.sp=false"]),
    "pp2": (2, ["trainer.pp=2"]),
    "pp2 vpp2": (2, ["trainer.pp=2", "trainer.vpp=2"]),
    "tp2+sp pp2 recompute full": (4, ["trainer.tp=2", "trainer.pp=2", "trainer.recompute=full"]),
    "zero 3, dp2": (2, ["trainer.zero=3"]),
}


def packed() -> tuple[torch.Tensor, Documents]:
    """(ids [2, 16], their documents)."""
    tokens = torch.randint(0, 64, (len(PACKED), LENGTH), generator=torch.Generator().manual_seed(7))
    ids = torch.full((len(PACKED), LENGTH), -1)
    for row, lengths in zip(ids, PACKED, strict=True):
        row[: sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return tokens, Documents.of(ids)


def examples() -> list[tuple[int, slice]]:
    """(sequence, its positions) of each example."""
    ends = [
        (row, sum(lengths[: n + 1]), length) for row, lengths in enumerate(PACKED) for n, length in enumerate(lengths)
    ]
    return [(row, slice(end - length, end)) for row, end, length in ends]


def test_positions_and_borders_by_hand() -> None:
    documents = Documents.of(torch.tensor([[0, 0, 1, 2, 2, -1]]))
    assert documents.positions().tolist() == [[0, 1, 0, 0, 1, 0]]
    assert documents.lengths == ((2, 1, 2, 1),)
    assert documents.cu_seqlens.tolist() == [0, 2, 3, 5, 6, 6, 6]


@pytest.mark.parametrize("kernel", ["tiles", "mask"])
@pytest.mark.parametrize(("ranks", "layout"), PATHS.values(), ids=PATHS)
def test_logits_of_each_example_are_those_of_it_alone(ranks: int, layout: list[str], kernel: str) -> None:
    plan = make_plan(ranks, "trainer.micro_batch_size=2", *layout)
    together, alone = on_ranks(_logits, plan, kernel)[-1]
    for (row, places), expected in zip(examples(), alone, strict=True):
        torch.testing.assert_close(together[row, places], expected, atol=1e-5, rtol=0)


def _logits(plan: Plan, model: ParallelModel, kernel: str) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    for chunk in model.chunks:
        chunk.build_inputs.build_visible = Kernels(attention=kernel).visible
    tokens, documents = packed()
    together = _whole(model.logits(tokens, documents))
    alone = []
    for row, places in examples():
        # By itself, and as every layout wants it: padded to the sequence's length, plain causal attention.
        only = torch.zeros_like(tokens)
        only[:, : places.stop - places.start] = tokens[row, places]
        actual = _whole(model.logits(only))
        alone.append(None if actual is None else actual[0, : places.stop - places.start])
    return together, alone


def _whole(logits: torch.Tensor | None) -> torch.Tensor | None:
    return None if logits is None else gather_from_tensor_model_parallel_region(logits).transpose(0, 1)


def test_documents_cost_what_they_cost_alone() -> None:
    """Each document is a separate call on the diagonal. Without documents attention is plain causal."""
    causal, call = "F.scaled_dot_product_attention", "_call"
    assert run_ranks(_asked, 1, make_plan(1), False)[0] == [(causal, LENGTH)] * 4
    a_layer = [(call, length) for row in ((5, 1, 7, 3), (9, 4, 3)) for length in row]
    assert run_ranks(_asked, 1, make_plan(1), True)[0] == a_layer * 4


def _asked(rank: int, plan: Plan, with_documents: bool) -> list[tuple[str, int]]:
    """(function, queries) of each product."""
    requested: list[tuple[str, int]] = []

    def note(owner: object, name: str, shown: str) -> None:
        function = getattr(owner, name)

        def noted(q: torch.Tensor, *more: object, **options: object) -> object:
            requested.append((shown, q.shape[2]))
            return function(q, *more, **options)

        setattr(owner, name, noted)

    note(torch_attention.F, "scaled_dot_product_attention", "F.scaled_dot_product_attention")
    note(torch_attention, "_call", "_call")
    with rank_groups(plan, rank):
        tokens, documents = packed()
        rank_model(plan, rank).logits(tokens, documents if with_documents else None)
    return requested
