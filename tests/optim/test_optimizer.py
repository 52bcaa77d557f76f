"""Our optimizer over shards against torch's over a plain model: transformers' Llama with the same weights and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_llama.optim import build_optimizer
from megatron_llama.optim.norm import parameter_norm
from megatron_llama.optim.optimizer import build_schedule, decays
from megatron_llama.plan import Plan
from tests.model.llamas import hf_config, load, whole_batch
from tests.oracle import CPU, Tensors, assemble, distance, make_plan, rank_batches, rank_groups, rank_model, rectangles
from tests.ranks import run_ranks
from tests.rows import rows

transformers = pytest.importorskip("transformers", reason="its Llama is the plain model here, a development dependency")

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


def test_clipping_was_at_work(single: tuple[list[Training], list[Training]]) -> None:
    clipped, free = (dict(zip(CASES, single[0], strict=True))[name] for name in ("adamw", "adamw, not clipped"))
    assert min(clipped.norms[1:]) > CLIP
    assert distance(clipped.weights[-1]["lm_head.weight"], free.weights[-1]["lm_head.weight"]) > 1e-5


def test_parameter_norm_counts_each_weight_once(single: tuple[list[Training], list[Training]]) -> None:
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
            optimizer, batches = build_optimizer(plan, model), rank_batches(plan, rank)
            training = Training(weights=[rectangles(model, lambda shard: shard.local)])
            for step in range(STEPS):
                model.forward_backward(batches.at(step * plan.config.trainer.global_batch_size))
                norm = optimizer.gradient_norm()
                optimizer.step(norm)
                training.norms.append(norm.item())
                training.weights.append(rectangles(model, lambda shard: shard.local))
            training.parameter_norm = parameter_norm(model.shards, CPU).item()
            actual.append(training)
    return actual


def _train_plain(rank: int, plans: list[Plan], initial: list[Tensors]) -> list[Training]:
    return [_plain_steps(plan, weights) for plan, weights in zip(plans, initial, strict=True)]


def _plain_steps(plan: Plan, initial: Tensors) -> Training:
    """The plain version: one model, torch's optimizer, torch's clipping."""
    llama = transformers.LlamaForCausalLM(hf_config(plan.model))
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
