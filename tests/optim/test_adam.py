"""torch's fused Adam for bf16 gradients of fp32 weights, in chunks, with torch's results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_llama import devices
from megatron_llama.devices import kernels as plain_kernels
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.optim.adam import Bf16GradientAdam
from megatron_llama.plan import Plan
from tests.oracle import make_plan, run_layout, worst

TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
NUMBERS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}
SHAPES = (61, 33), (7,), (64, 64)


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("kernels", [devices.device_named(devices.HOST).kernels(compiled=False), plain_kernels.EAGER])
def test_it_is_torchs(
    name: str, factor: float | None, kernels: plain_kernels.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK", 512)  # a whole number of vectors, which divides no weight but one
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    plain = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    for weight in weights:
        weight.grad_dtype = None  # type: ignore[attr-defined]
    groups = [([0, 2], 0.1), ([1], 0.0)]
    by_group = [{"params": [weights[n] for n in members], "weight_decay": decay} for members, decay in groups]
    inputs: Any = SimpleNamespace(groups=by_group, hyperparameters=NUMBERS, kernels=kernels)
    ours = Bf16GradientAdam(inputs, decoupled=name == "adamw")
    theirs = TORCH[name](
        [{"params": [plain[n] for n in members], "weight_decay": decay} for members, decay in groups],
        fused=True,
        **NUMBERS,
    )
    scale = None if factor is None else torch.tensor(factor)
    for _ in range(4):
        for weight, other in zip(weights, plain, strict=True):
            gradient = torch.randn(weight.shape, generator=generator)
            # Gradients that were summed over ranks are fp32.
            weight.grad = gradient = gradient if weight.ndim == 1 else gradient.bfloat16()
            other.grad = gradient.float() * (1 if factor is None else factor)
        gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
        ours.step(factor=scale)
        theirs.step()
        assert all(torch.equal(grad, weight.grad) for grad, weight in zip(gradients, weights, strict=True))
    for weight, other in zip(weights, plain, strict=True):
        assert torch.equal(weight, other)
        assert all(torch.equal(ours.state[weight][kind], theirs.state[other][kind]) for kind in theirs.state[other])


ONE = ("trainer.precision=bf16", "trainer.micro_batch_size=8", "trainer.global_batch_size=8", "optim.clip=0.1")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, []),
        (2, ["trainer.tp=2", "trainer.sp=true"]),  # norm weights' gradients are summed over ranks
        (4, ["trainer.tp=4"]),  # also gradients of replicated kv heads
        (2, ["trainer.pp=2", "model.tie_word_embeddings=true"]),  # and gradients of tied embeddings
        (1, ["optim.name=sgd"]),
        (1, ["optim.state_bits=8", "model.hidden_size=64"]),
    ],
)
def test_a_run_of_one_micro_batch_keeps_them_narrow_and_trains_the_same(
    ranks: int, layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = [*ONE, *layout]
    assert make_plan(ranks, *layout).storage.keeps_bf16_grads
    actual = run_layout(ranks, *layout, steps=3)
    stored = Plan.storage.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Plan, "storage", property(lambda plan: replace(stored(plan), keeps_bf16_grads=False)))
    # Norms are summed in another order: a bf16 gradient that is rounded once more would be 1e-3 off.
    assert max(worst(actual, run_layout(ranks, *layout, steps=3)).values()) < 1e-6
