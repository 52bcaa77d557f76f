"""Our optimizer over shards against torch's over transformers' Llama; bf16 gradients in chunks; norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_llama import devices
from megatron_llama.devices import HOST, device_named, kernels
from megatron_llama.devices import kernels as plain_kernels
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.devices.cpu.kernels import CHUNK
from megatron_llama.optim.adam import Bf16GradientAdam
from megatron_llama.optim.gradient_norm import gradient_norm, parameter_norm
from megatron_llama.parallel import Shard
from megatron_llama.plan import Plan
from tests.model.llamas import hf_config, load, train_plain
from tests.oracle import CPU, Result, Tensors, distance, make_plan, on_ranks, oracle, run_layout, worst
from tests.ranks import run_ranks
from tests.rows import each_layout, rows

STEPS = 5
CLIP = 0.5
# Large enough that forgetting the weight decay, or the norms' exemption from it, would show in every tensor.
COMMON = ("optim.lr=0.005", "optim.weight_decay=0.5", f"optim.clip={CLIP}", "trainer.steps=8")
CASES = {
    "adamw": COMMON,
    "adamw, not clipped": (*COMMON, "optim.clip=null"),
    "adam": (*COMMON, "optim.name=adam", "optim.weight_decay=0.05", "optim.betas=[0.8,0.99]", "optim.eps=1e-4"),
    "sgd": (*COMMON, "optim.name=sgd", "optim.lr=0.3", "optim.betas=[0.7,0]"),
}
SHARDED = {"tp2·dp2, zero 1": (4, ("trainer.tp=2", "trainer.zero=1")), "dp2, zero 1": (2, ("trainer.zero=1",))}


class Plain(NamedTuple):
    """Results of torch's optimizer: gradient norms before clipping, and the last weights."""

    norms: list[float]
    weights: Tensors


@pytest.fixture(scope="module")
def single() -> dict[str, tuple[Result, Plain]]:
    """Each case in one process, by our optimizer and by torch's."""
    pytest.importorskip("transformers", reason="its Llama is the plain model here, a development dependency")
    ours = {name: run_layout(1, *overrides, steps=STEPS) for name, overrides in CASES.items()}
    plans = [make_plan(1, *overrides) for overrides in CASES.values()]
    theirs = run_ranks(_train_plain, 1, plans, [result.initial for result in ours.values()])[0]
    return {name: (result, plain) for (name, result), plain in zip(ours.items(), theirs, strict=True)}


def test_one_process_equals_torch(single: dict[str, tuple[Result, Plain]]) -> None:
    for name, (result, expected) in single.items():
        compare(name, result, expected)
    clipped, free = (single[name][0] for name in ("adamw", "adamw, not clipped"))
    assert min(clipped.norms[1:]) > CLIP, "clipping was at work"
    assert distance(clipped.weights["lm_head.weight"], free.weights["lm_head.weight"]) > 1e-5


@pytest.mark.parametrize(("ranks", "layout"), rows(SHARDED.items(), {"dp2, zero 1"}))
def test_shards_equal_torch(ranks: int, layout: tuple[str, ...], single: dict[str, tuple[Result, Plain]]) -> None:
    """The clip norm is of the whole gradient, and every update is the same."""
    for name in ("adamw", "sgd"):
        compare(name, run_layout(ranks, *layout, *CASES[name], steps=STEPS), single[name][1])


def test_the_parameter_norm_counts_each_weight_once() -> None:
    whole = torch.cat([tensor.flatten() for tensor in oracle().initial.values()]).norm().item()
    plan = make_plan(4, "trainer.tp=2", "trainer.zero=1")
    norms = on_ranks(lambda plan, model: parameter_norm(model.shards, CPU).item(), plan)
    assert norms == [pytest.approx(whole, rel=1e-5)] * 4


def compare(name: str, result: Result, expected: Plain) -> None:
    assert result.norms == pytest.approx(expected.norms, rel=1e-5), name
    for tensor, weight in expected.weights.items():
        assert distance(result.weights[tensor], weight) <= 2e-5, (name, tensor)
        # Not vacuous: the weights went a long way, compared with that tolerance.
        assert distance(result.weights[tensor], result.initial[tensor]) > 5e-4, (name, tensor)


def _train_plain(rank: int, plans: list[Plan], initial: list[Tensors]) -> list[Plain]:
    return [_plain_steps(plan, weights) for plan, weights in zip(plans, initial, strict=True)]


def _plain_steps(plan: Plan, initial: Tensors) -> Plain:
    """The plain version: one model, torch's optimizer, torch's clipping."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM(hf_config(plan.model))
    load(llama, initial)
    _, norms = train_plain(llama, plan, STEPS)
    return Plain(norms, {name: parameter.detach() for name, parameter in llama.named_parameters()})


SHAPES = (3 * CHUNK // 512 + 5, 512), (700, 7), (900,)


class _Whole(Shard):
    """A parameter that one rank owns, in two parts."""

    def owned(self, tensor: torch.Tensor, *, every_replica: bool = False) -> Iterator[torch.Tensor]:
        yield from tensor.tensor_split(2)


def _norm_shards(dtypes: tuple[torch.dtype, ...]) -> list[Shard]:
    generator, shards = torch.Generator().manual_seed(1), []
    for shape, dtype in zip(SHAPES, dtypes, strict=True):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad_dtype = None  # type: ignore[attr-defined]
        parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        shards.append(_Whole("norm.weight", parameter, [], True))
    return shards


def _errors(rank: int, dtypes: tuple[torch.dtype, ...]) -> list[float]:
    """Relative errors of the gradients' and the weights' norm."""
    shards = _norm_shards(dtypes)
    actual = gradient_norm(shards, CPU), parameter_norm(shards, CPU)
    grads, weights = [shard.grad for shard in shards], [shard.local for shard in shards]
    exact = [torch.cat([x.double().flatten() for x in tensors if x is not None]).norm() for tensors in (grads, weights)]
    return [float((norm.double() - right).abs() / right) for norm, right in zip(actual, exact, strict=True)]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.float32)], ids=str
)
def test_it_is_exact_for_large_matrices(dtypes: tuple[torch.dtype, ...]) -> None:
    assert max(run_ranks(_errors, 1, dtypes)[0]) < 5e-7


def test_chunks_on_a_cpu_have_the_bits_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK", 3000)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator).bfloat16() for shape in ((61, 512), (700, 7), (2900,), (0, 5))]
    parts.append(torch.randn(4, 5000, generator=generator))
    ours, plain = (each.norms(parts) for each in (device_named(HOST).kernels(compiled=False), kernels.EAGER))
    assert torch.equal(torch.cat(ours), torch.cat(plain))


TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
NUMBERS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6}
ADAM_SHAPES = (61, 33), (7,), (64, 64)


@pytest.mark.parametrize("name", ["adamw", "adam"])
@pytest.mark.parametrize("factor", [None, 0.37])
@pytest.mark.parametrize("kernels", [devices.device_named(devices.HOST).kernels(compiled=False), plain_kernels.EAGER])
def test_it_is_torchs(
    name: str, factor: float | None, kernels: plain_kernels.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "CHUNK", 512)  # a whole number of vectors, which divides no weight but one
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ADAM_SHAPES]
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


@each_layout(__file__, "one micro batch")
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
