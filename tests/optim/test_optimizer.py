"""Our optimizer over shards against torch's over transformers' Llama; bf16 gradients in chunks; norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_llama import devices
from megatron_llama.devices import HOST, device_named, kernels
from megatron_llama.devices import kernels as plain_kernels
from megatron_llama.devices.cpu import kernels as cpu_kernels
from megatron_llama.devices.cpu.kernels import CHUNK
from megatron_llama.optim import build_optimizer
from megatron_llama.optim.adam import Bf16GradientAdam
from megatron_llama.optim.norm import gradient_norm, parameter_norm
from megatron_llama.optim.optimizer import build_schedule, decays
from megatron_llama.parallel import Shard
from megatron_llama.plan import Plan
from tests.model.llamas import hf_config, load, whole_batch
from tests.oracle import (
    CPU,
    Tensors,
    assemble,
    distance,
    make_plan,
    rank_batches,
    rank_groups,
    rank_model,
    rectangles,
    run_layout,
    worst,
)
from tests.ranks import run_ranks
from tests.rows import rows

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
SHARDED = {
    "tp2·dp2, zero 1": (4, ("trainer.tp=2", "trainer.zero=1")),
    "dp2, zero 1": (2, ("trainer.zero=1",)),
}


@dataclass
class Training:
    """The numbers of a few steps, in order."""

    norms: list[float] = field(default_factory=list)
    """Gradient norms before clipping."""
    weights: list[Any] = field(default_factory=list)
    """Before the first step, and after each: tensors by name, or a rank's rectangles of them."""
    parameter_norm: float = 0.0
    """Gradients of the last weights."""


def ours(world_size: int, plans: list[Plan]) -> list[Training]:
    ranks = run_ranks(_train, world_size, plans)
    actual = []
    for index in range(len(plans)):
        runs: list[Training] = [rank[index] for rank in ranks]
        assert all((run.norms, run.parameter_norm) == (runs[0].norms, runs[0].parameter_norm) for run in runs)
        weights = [assemble([run.weights[step] for run in runs])[0] for step in range(STEPS + 1)]
        actual.append(Training(runs[0].norms, weights, runs[0].parameter_norm))
    return actual


def plain(plans: list[Plan], initial: list[Tensors]) -> list[Training]:
    return run_ranks(_train_plain, 1, plans, initial)[0]


@pytest.fixture(scope="module")
def single() -> tuple[list[Training], list[Training]]:
    """Each case in one process, by our optimizer and by torch's."""
    pytest.importorskip("transformers", reason="its Llama is the plain model here, a development dependency")
    plans = [make_plan(1, *overrides) for overrides in CASES.values()]
    actual = ours(1, plans)
    return actual, plain(plans, [training.weights[0] for training in actual])


def test_one_process_equals_torch(single: tuple[list[Training], list[Training]]) -> None:
    for name, training, expected in zip(CASES, *single, strict=True):
        compare(name, training, expected)


@pytest.mark.parametrize(("ranks", "layout"), rows(SHARDED.items(), {"dp2, zero 1"}))
def test_shards_equal_torch(ranks: int, layout: tuple[str, ...], single: tuple[list[Training], list[Training]]) -> None:
    # A run over shards: the clip norm is of the whole gradient, and every update is the same.
    names = ("adamw", "sgd")
    expected = dict(zip(CASES, single[1], strict=True))
    plans = [make_plan(ranks, *layout, *CASES[name]) for name in names]
    for name, training in zip(names, ours(ranks, plans), strict=True):
        compare(name, training, expected[name])


def test_clipping_was_at_work_and_each_weight_is_counted_once(single: tuple[list[Training], list[Training]]) -> None:
    clipped, free = (dict(zip(CASES, single[0], strict=True))[name] for name in ("adamw", "adamw, not clipped"))
    assert min(clipped.norms[1:]) > CLIP
    assert distance(clipped.weights[-1]["lm_head.weight"], free.weights[-1]["lm_head.weight"]) > 1e-5
    for training in single[0]:
        whole = torch.cat([tensor.flatten() for tensor in training.weights[-1].values()]).norm().item()
        assert training.parameter_norm == pytest.approx(whole, rel=1e-5)


def test_norms_alone_are_exempt_from_weight_decay() -> None:
    assert [decays(name) for name in ("norm.weight", "layers.3.post_attention_layernorm.weight")] == [False, False]
    assert all(decays(name) for name in ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.o_proj.weight"))


def compare(name: str, training: Training, expected: Training) -> None:
    assert training.norms == pytest.approx(expected.norms, rel=1e-5), name
    for step in range(1, STEPS + 1):
        for tensor, weight in expected.weights[step].items():
            assert distance(training.weights[step][tensor], weight) <= 2e-5, (name, step, tensor)
    # Not vacuous: the weights went a long way, compared with that tolerance.
    for tensor, weight in training.weights[-1].items():
        assert distance(weight, training.weights[0][tensor]) > 5e-4, (name, tensor)


def _train(rank: int, plans: list[Plan]) -> list[Training]:
    actual = []
    with rank_groups(plans[0], rank):
        for plan in plans:
            model = rank_model(plan, rank)
            optimizer, batches = build_optimizer(plan, model), rank_batches(plan)
            training = Training(weights=[rectangles(model.shards, lambda shard: shard.local)])
            for step in range(STEPS):
                model.forward_backward(batches.at(step * plan.config.trainer.global_batch_size))
                norm = optimizer.gradient_norm()
                optimizer.step(norm)
                training.norms.append(norm.item())
                training.weights.append(rectangles(model.shards, lambda shard: shard.local))
            training.parameter_norm = parameter_norm(model.shards, CPU).item()
            actual.append(training)
    return actual


def _train_plain(rank: int, plans: list[Plan], initial: list[Tensors]) -> list[Training]:
    return [_plain_steps(plan, weights) for plan, weights in zip(plans, initial, strict=True)]


def _plain_steps(plan: Plan, initial: Tensors) -> Training:
    """The plain version: one model, torch's optimizer, torch's clipping."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM(hf_config(plan.model))
    load(llama, initial)
    named = dict(llama.named_parameters())
    optim, training = plan.config.optim, Training()
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    inner: torch.optim.Optimizer
    if optim.name == "sgd":
        inner = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.betas[0])
    else:
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
        inner = kind(groups, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
    schedule = build_schedule(plan, inner)
    training.weights.append(initial)
    for step in range(STEPS):
        tokens, labels, mask = whole_batch(plan, step)
        marked = torch.where(mask > 0, labels, -100)
        llama(tokens, labels=marked, shift_labels=marked, num_items_in_batch=mask.sum()).loss.backward()
        largest = float("inf") if optim.clip is None else optim.clip
        training.norms.append(torch.nn.utils.clip_grad_norm_(named.values(), largest).item())
        inner.step()
        inner.zero_grad()
        schedule.step()
        training.weights.append({name: parameter.detach().clone() for name, parameter in named.items()})
    return training


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
