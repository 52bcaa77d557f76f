"""Fused operators of uncompiled blocks: same numbers as the plain ones, few graphs.

tests/cuda/test_train.py counts their launches on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megatron_llama.devices.cuda.kernels import CudaKernels
from megatron_llama.devices.kernels import Kernels
from megatron_llama.model.fused_operators import FusedOperators, fused_operators
from megatron_llama.model.llama import Attention, FeedForward, swiglu
from megatron_llama.model.rms_norm import RMSNorm, normalize
from megatron_llama.model.rotary import rotate
from megatron_llama.parallel import ParallelModel
from tests.compiled import SECONDS, needs_compiler
from tests.oracle import oracle, run_layout, worst
from tests.ranks import run_ranks
from tests.rows import each_layout

PLAIN = FusedOperators(normalize, rotate, swiglu)
LENGTHS = (48, 32, 100)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
LARGEST_SHARE = 0.01
"""Share of bf16 values that may differ by a rounding, as sums over the hidden size have another order."""


class Uncompiled(Kernels):
    """Kernels whose fused functions are the functions themselves."""

    def fuse_rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function."""
        return function


def replace_operators(model: ParallelModel) -> None:
    """Give the operators to the model of a rank."""
    operators = fused_operators(Uncompiled())
    assert operators is not None
    for module in (module for chunk in model.chunks for module in chunk.modules()):
        if isinstance(module, RMSNorm):
            module.normalize = operators.normalize
        elif isinstance(module, Attention):
            module.rotate = operators.rotate
        elif isinstance(module, FeedForward):
            module.activation = operators.activation


@each_layout(__file__, "fused operators", "ranks, overrides")
def test_a_step_has_the_same_bits(ranks: int, overrides: list[str]) -> None:
    """The functions and their gradients are the plain ones, in all runs that replace or recompute operators."""
    replaced = run_layout(ranks, *overrides, tamper=replace_operators)
    plain = oracle(*overrides) if ranks == 1 else run_layout(ranks, *overrides)
    assert set(worst(replaced, plain).values()) == {0.0}


def _inputs(length: int, dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...], Tensor]]:
    """Return the operator, inputs and output's gradient of each case."""
    torch.manual_seed(length)
    x, weight, gate_up = torch.randn(length, 2, HIDDEN), torch.randn(HIDDEN), torch.randn(length, 2, 2 * HIDDEN)
    qkv = torch.randn(length, 2, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    angles = 6 * torch.rand(length, 1, 1, HEAD_DIM)
    of_attention = torch.randn(2, HEADS, length, HEAD_DIM).permute(2, 0, 1, 3)  # the layout of its gradient
    return [
        ("normalize", (x.to(dtype), weight.to(dtype), 1e-5), torch.randn_like(x).to(dtype)),
        ("rotate", (qkv[:, :, :HEADS], angles.cos(), angles.sin()), of_attention.to(dtype)),
        ("activation", (gate_up.to(dtype),), torch.randn_like(x).to(dtype)),
    ]


def _results(operators: FusedOperators, name: str, inputs: Sequence[Any], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of one operator."""
    leaves = [x.detach().requires_grad_(x.dtype == grad.dtype) if isinstance(x, Tensor) else x for x in inputs]
    out = getattr(operators, name)(*leaves)
    trained = [x for x in leaves[: 2 if name == "normalize" else 1] if isinstance(x, Tensor)]
    return [out.detach(), *torch.autograd.grad(out, trained, grad)]


def test_a_frozen_norm_has_a_gradient_of_its_input_only() -> None:
    (_, (x, weight, eps), grad), *_ = _inputs(LENGTHS[0], torch.float32)
    operators = fused_operators(Uncompiled())
    assert operators is not None
    x.requires_grad_()
    by_operator = [torch.autograd.grad(norm(x, weight, eps), x, grad) for norm in (operators.normalize, normalize)]
    assert torch.equal(*(gradient for (gradient,) in by_operator))


def _compared(_: int) -> dict[str, list[float]]:
    """Return by operator and dtype the largest share of differing values, and the graphs after each length."""
    operators = fused_operators(CudaKernels())
    assert operators is not None
    shares: dict[str, list[float]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for length in LENGTHS:
            for name, inputs, grad in _inputs(length, dtype):
                fused, plain = (_results(each, name, inputs, grad) for each in (operators, PLAIN))
                assert fused[0].stride() == plain[0].stride()
                for actual, expected in zip(fused, plain, strict=True):
                    torch.testing.assert_close(actual, expected)
                    share = (actual != expected).float().mean().item()
                    shares.setdefault(f"{name} {expected.dtype}", []).append(share)
            shares.setdefault(f"graphs {dtype}", []).append(counters["stats"]["unique_graphs"])
    return shares


@pytest.mark.slow
@needs_compiler
def test_compiled_operators_round_as_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that CUDA compiles, here by Inductor's C++."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (shares,) = run_ranks(_compared, 1, timeout=SECONDS)
    assert shares["graphs torch.bfloat16"] == [6] * len(LENGTHS), "forward and backward of three operators"
    assert shares["graphs torch.float32"] == [12] * len(LENGTHS)
    for name in ("rotate", "activation"):
        assert not any(shares[f"{name} torch.bfloat16"])
    assert max(shares["normalize torch.bfloat16"]) < LARGEST_SHARE
    assert not any(shares["rotate torch.float32"])
