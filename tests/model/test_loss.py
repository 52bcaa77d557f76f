"""The loss of one chunk of logits, compared with autograd in fp64. tests/layouts/ compares layouts and chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_llama.devices import HOST, device_named
from megatron_llama.model import loss
from megatron_llama.model.loss import IN_PLACE, LossSpec, SoftmaxKernels, fused_softmax
from tests.ranks import run_ranks


def uncompiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return function


@pytest.mark.parametrize("softmax", [IN_PLACE, fused_softmax(uncompiled)], ids=["in place", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_losses_and_gradients_are_those_of_fp64(softmax: SoftmaxKernels, dtype: torch.dtype, z_loss: float) -> None:
    """Includes tokens with a probability near 1, whose gradient is probability - 1."""
    torch.manual_seed(0)
    labels, weights = torch.randint(50, (24,)), torch.rand(24) / 24
    weights[3] = 0  # no loss
    logits = torch.randn(24, 50)
    logits[torch.arange(8), labels[:8]] += 12
    logits = logits.to(dtype)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, labels, reduction="none") + z_loss * exact.logsumexp(1).square()
    (expected * weights).sum().backward()
    assert exact.grad is not None
    # If the kernels need fp32, the caller rounds the gradients.
    grads = logits.float() if softmax.needs_fp32 else logits
    losses = loss._losses_and_gradients(grads, labels, weights, LossSpec(50, None, False, softmax, z_loss=z_loss))
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=2e-6)
    rounding = 2**-8 if grads.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(grads.double(), exact.grad, rtol=rounding, atol=1e-8)


@pytest.mark.parametrize("vocabulary", [50, 48, 96, 128])
def test_logits_column_by_column(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column-major logits, as with AMX units, give the same loss and gradients, also in a shorter last chunk."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*size).bfloat16() for size in ((24, 16), (vocabulary, 16)))
    labels, weights, softmax = torch.randint(vocabulary, (24,)), torch.rand(24) / 24, fused_softmax(uncompiled)
    kernels = device_named(HOST).kernels(compiled=True)
    monkeypatch.setattr(loss, "loss_chunk", lambda _: 10)
    results = []
    for units in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda units=units: units)
        assert kernels.logits_like(hidden, 10, vocabulary).stride() == ((1, 10) if units else (vocabulary, 1))
        gradient = torch.empty_like(hidden)
        spec = LossSpec(vocabulary - 2, None, False, softmax, kernels)
        losses, sums = loss._by_chunks(hidden, weight, labels, weights, spec, gradient, needs_weight_grad=True)
        assert sums is not None
        results.append((losses, sums, gradient.float()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-4)
    eager = device_named(HOST).kernels(compiled=False)
    for dtype, tokens, others in (
        (torch.float32, 10, kernels),
        (torch.bfloat16, 769, kernels),
        (torch.bfloat16, 10, eager),
    ):
        assert others.logits_like(hidden.to(dtype), tokens, vocabulary).is_contiguous()


def _gradients_of_multiples(rank: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 1, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    spec = LossSpec(20, None, False, kernels=device_named(HOST).kernels(compiled=False))
    how = torch.randint(20, (6,)), torch.full((6,), 1 / 6), spec
    once, four = (
        torch.autograd.grad(factor * loss._LinearCrossEntropy.apply(x, weight, *how), (x, weight)) for factor in (1, 4)
    )
    for one, other in zip(once, four, strict=True):
        assert one.any() and torch.equal(4 * one, other)


def test_a_multiple_of_the_loss_has_a_multiple_of_its_gradients() -> None:
    run_ranks(_gradients_of_multiples, 1)
