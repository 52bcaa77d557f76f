"""The loss of a split vocabulary, the parallel linear layers and the division of context parallelism, each alone.

The oracle is plain torch on whole tensors, in fp64. tests/layouts compares whole models in all layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megatron_llama.arch.attention_pattern import Lengths, Pattern
from megatron_llama.devices.attention_inputs import Documents, dense_mask
from megatron_llama.devices.torch_attention import tiles_backward, tiles_forward
from megatron_llama.model import loss
from megatron_llama.model.llama import _apply, parallel_linear
from megatron_llama.model.loss import IN_PLACE, LossSpec, fused_softmax
from megatron_llama.parallel.compiling import traceable_matmul
from megatron_llama.parallel.context_division import chunk_work, divide
from megatron_llama.parallel.groups import Groups
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.plan import Plan, resolve
from megatron_llama.topology import Topology
from tests.config.helpers import make
from tests.oracle import rank_groups
from tests.ranks import run_ranks

FACTOR = 4
"""Largest error of a result, as a multiple of the error of the same formula in fp32 torch (at least one rounding)."""


def _plan(world_size: int, **settings: Any) -> Plan:
    return resolve(make(**{"trainer.tp": world_size, "trainer.sp": False} | settings), world_size)


def _in_groups(rank: int, check: Callable[..., None], plan: Plan, cases: Iterable[tuple]) -> None:
    with rank_groups(plan, rank) as groups:
        for case in cases:
            torch.manual_seed(0)  # all ranks draw the same whole tensors
            check(plan, plan.topology(rank), groups, *case)


def _assert_as_exact_as_fp32(actual: Tensor, fp32: Tensor, exact: Tensor) -> None:
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    error, allowed = (actual - exact).abs().max(), FACTOR * max((fp32 - exact).abs().max(), rounding)
    assert error <= allowed, f"error {error:.2g}, allowed {allowed:.2g}"


def _softmax_of_parts(rank: int) -> None:
    for kernels in (IN_PLACE, fused_softmax(lambda function, name: function)):
        for z_loss in (0.0, 0.01):
            _check_softmax(rank, LossSpec(10, dist.group.WORLD, False, kernels, z_loss=z_loss))


def _check_softmax(rank: int, spec: LossSpec) -> None:
    """Logits of 10 columns per rank. Some labels have a probability near 1, some rows a maximum on one rank only."""
    torch.manual_seed(0)
    columns = slice(10 * rank, 10 * rank + 10)
    labels, weights = torch.randint(10 * dist.get_world_size(), (24,)), torch.rand(24)
    logits = torch.randn(24, 10 * dist.get_world_size())
    logits[torch.arange(8), labels[:8]] += 12
    logits[8:12, :10] += 100
    results = []
    for dtype in (torch.float32, torch.float64):
        whole = logits.to(dtype, copy=True).requires_grad_()
        losses = cross_entropy(whole, labels, reduction="none") + spec.z_loss * whole.logsumexp(1).square()
        (losses * weights).sum().backward()
        assert whole.grad is not None
        results.append((losses.detach(), whole.grad[:, columns]))
    local = logits[:, columns].contiguous()
    losses = loss._losses_and_gradients(local, labels - columns.start, weights, spec)
    for actual, fp32, exact in zip((losses, local), *results, strict=True):
        _assert_as_exact_as_fp32(actual, fp32, exact)


@pytest.mark.parametrize("tp", [2, 4])
def test_softmax_of_a_split_vocabulary(tp: int) -> None:
    """In place and fused, with a z-loss and without."""
    run_ranks(_softmax_of_parts, tp)


def _layer(plan: Plan, topology: Topology, groups: Groups, is_column: bool, frozen: bool) -> None:
    rank, tp = topology.place["tp"], topology.sizes["tp"]
    name = "gate_up_proj" if is_column else "down_proj"
    layer = parallel_linear(name, plan.model, mcore_config(plan), matmul=traceable_matmul).double()
    whole = nn.Linear(layer.input_size, layer.output_size, dtype=torch.float64)
    x = torch.randn(8, 2, layer.input_size, dtype=torch.float64, requires_grad=True)
    output = whole(x)
    grad = torch.randn_like(output)
    output.backward(grad)

    def part(tensor: Tensor, dim: int, is_split: bool = True) -> Tensor:
        return tensor.detach().chunk(tp, dim)[rank].clone() if is_split else tensor.detach().clone()

    def of_input(tensor: Tensor) -> Tensor:
        return part(tensor, 0, plan.sp) if is_column else part(tensor, 2)

    def of_output(tensor: Tensor) -> Tensor:
        return part(tensor, 2) if is_column else part(tensor, 0, plan.sp)

    assert layer.bias is not None and whole.weight.grad is not None and x.grad is not None
    layer.weight.data = part(whole.weight, 0 if is_column else 1)
    layer.bias.data = part(whole.bias, 0, is_column)
    layer.weight.requires_grad_(not frozen)
    local = of_input(x).requires_grad_()
    actual = _apply(layer, local)
    actual.backward(of_output(grad))
    torch.testing.assert_close(actual, of_output(output))
    torch.testing.assert_close(local.grad, of_input(x.grad))
    if frozen:
        assert layer.weight.grad is None
    else:
        torch.testing.assert_close(layer.weight.grad, part(whole.weight.grad, 0 if is_column else 1))
    # The bias of a row-parallel layer has the gradient of this rank's tokens: ReplicatedGradients sums it.
    torch.testing.assert_close(layer.bias.grad, of_output(grad).sum((0, 1)))


@pytest.mark.parametrize("sp", [False, True])
def test_linear_layers(sp: bool) -> None:
    """Column and row parallel, trained and frozen."""
    cases = [*itertools.product((True, False), (False, True))]
    run_ranks(_in_groups, 2, _layer, _plan(2, **{"trainer.sp": sp, "model.mlp_bias": True}), cases)


LENGTH = 48
PATTERNS = {"causal": Pattern(), "window": Pattern(window=5), "blocks": Pattern(0, 2, 3, 1)}
DOCUMENTS = {"whole": ((LENGTH,), (LENGTH,)), "documents": ((12, 7, 1, 28), (5, 43))}


def documents_of(lengths: Lengths) -> Documents:
    return Documents.of(torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]))


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_work_of_a_division_is_what_the_kernels_compute(pattern: Pattern) -> None:
    """Without masked keys, which some tiles compute."""
    lengths = DOCUMENTS["documents"]
    documents = documents_of(lengths)
    visible = dense_mask(documents.positions(), pattern, documents.ids)[:, 0]
    size = LENGTH // 8
    expected = [int(visible[:, start : start + size].sum()) for start in range(0, LENGTH, size)]
    assert chunk_work(LENGTH, 8, lengths, pattern) == expected


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_of_all_ranks_adds_up(cp: int, pattern: Pattern, lengths: Lengths) -> None:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, LENGTH, 8).unbind(0)
    k, v = torch.randn(2, 2, 2, LENGTH, 8).unbind(0)
    out, lse = tiles_forward(q, k, v, lengths, pattern)
    whole = tiles_backward(grad, q, k, v, out, lse, lengths, pattern)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(cp):
        chunks = divide(cp, LENGTH, lengths, pattern)[rank]
        local = torch.tensor([position for chunk in chunks for position in chunk])
        q_part, grad_part = q[:, :, local], grad[:, :, local]
        part, part_lse = tiles_forward(q_part, k, v, lengths, pattern, chunks)
        torch.testing.assert_close(part, out[:, :, local])
        torch.testing.assert_close(part_lse, lse[:, :, local])
        dq, *dkv = tiles_backward(grad_part, q_part, k, v, part, part_lse, lengths, pattern, chunks)
        torch.testing.assert_close(dq, whole[0][:, :, local], rtol=1e-4, atol=1e-5)
        for total, more in zip(sums, dkv, strict=True):
            total += more
    for total, expected in zip(sums, whole[1:], strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
