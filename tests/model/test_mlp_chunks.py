"""The feed-forward network in chunks: the same gradients, less memory, one repetition. tests/layouts/ has layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_llama.model import mlp_chunks
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.layouts.table import DROPPING, EVERY_2ND, FULL, QWEN3, SELECTIVE
from tests.oracle import make_plan, oracle, rank_groups, rank_model, run_layout, worst
from tests.ranks import run_ranks

BATCH, LENGTH, HIDDEN, INTERMEDIATE = 2, 16, 32, 64


@pytest.mark.parametrize(
    ("recompute", "model"),
    [([FULL], []), ([SELECTIVE, EVERY_2ND], []), ([], [DROPPING]), ([], [QWEN3])],
    ids=["full recompute", "selective recompute of every 2nd block", "random-LTD", "qwen3"],
)
def test_gradients_are_equal(recompute: list[str], model: list[str]) -> None:
    chunked = run_layout(1, *recompute, *model, "trainer.mlp_chunks=3")
    assert max(worst(chunked, oracle(*model)).values()) < 1e-5


def test_a_lost_chunk_changes_gradients() -> None:
    def lose(_: ParallelModel) -> None:
        added = mlp_chunks._added
        mlp_chunks._added = lambda sums, grads: sums or added(sums, grads)  # type: ignore[assignment]

    assert worst(run_layout(1, "trainer.mlp_chunks=2", tamper=lose), oracle())["first_grads"] > 0.1


class _Matmuls(TorchDispatchMode):
    """Recorder of the tokens in each product with gate_up_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[-1] == 2 * INTERMEDIATE and out.shape[0] != HIDDEN:
            self.rows.append(out.shape[0])
        return out


def test_each_chunk_runs_twice() -> None:
    """In the forward and in the backward pass, also in blocks that are recomputed."""
    kinds = ("none", "elementwise", "full")
    plans = [make_plan(1, f"trainer.recompute={kind}", "trainer.mlp_chunks=4") for kind in kinds]
    assert run_ranks(_rows_of_matmuls, 1, plans)[0] == [[BATCH * LENGTH // 4] * 8] * 3


def _rows_of_matmuls(rank: int, plans: list[Plan]) -> list[list[int]]:
    results = []
    with rank_groups(plans[0], rank):
        for plan in plans:
            chunk = rank_model(plan, rank).chunks[0]
            inputs = chunk.build_inputs(torch.zeros(BATCH, LENGTH, dtype=torch.int64))
            x = torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)
            with _Matmuls() as matmuls:
                chunk.layers["1"](x, *inputs.of(1)).sum().backward()
            results.append(matmuls.rows)
    return results


def test_gradients_of_bf16_are_summed_in_fp32() -> None:
    grads = [torch.full((1,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    sums: list[torch.Tensor] = []
    for grad in grads:
        sums = mlp_chunks._added(sums, [grad])
    assert sums[0].item() == 258.0  # bf16 has 8 bits: 256 + 1 is 256
