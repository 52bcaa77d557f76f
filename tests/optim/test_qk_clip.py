"""QK-Clip against plain references: the largest logits, the scaled weights, and skipped steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megatron_llama.arch.attention_pattern import Pattern
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import Documents, build_attention_inputs, dense_mask, masked
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from tests.model.llamas import hf_config, load, whole_batch
from tests.oracle import (
    Tensors,
    assemble,
    distance,
    make_plan,
    on_ranks,
    on_ranks_by_plan,
    oracle,
    rank_batches,
    rectangles,
    run_layout,
)
from tests.rows import each_layout

TAU, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1.0, 4, 4, 2, 8
CLIP = f"optim.qk_clip={TAU}"
PATTERNS = {
    "causal": (Pattern(), None),
    "window": (Pattern(window=7), None),
    "blocks": (Pattern(0, 3, 4, 1), None),
    "documents": (Pattern(), [5, 9, 26]),
    "documents, window": (Pattern(window=4), [17, 1, 22]),
    "documents, blocks": (Pattern(0, 2, 3, 1), [21, 19]),
}


@pytest.mark.parametrize("kernel", ["tiles", "mask"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("chunks", [None, (range(5, 15), range(30, 40))], ids=["whole", "chunks"])
def test_largest_logits_are_those_of_all_scores(
    name: str, kernel: str, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "SCORES_AT_ONCE", 1)  # blocks of 16
    pattern, lengths = PATTERNS[name]
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, heads, 40, 8, generator=generator) for heads in (6, 2))
    documents = None
    if lengths is not None:
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        documents = Documents.of(torch.stack([row, torch.zeros_like(row)]))
    positions = documents.positions() if documents else torch.arange(40).expand(2, -1)
    visible = dense_mask(positions, pattern, None if documents is None else documents.ids)
    scores = (q @ k.repeat_interleave(3, dim=1).mT * 8**-0.5).masked_fill(~visible, -torch.inf)
    index = torch.arange(40) if chunks is None else torch.cat([torch.arange(c.start, c.stop) for c in chunks])
    inputs = build_attention_inputs(torch.zeros(2, 40), documents, pattern, kernel, compiled=False)
    inputs = masked(positions, pattern, documents) if kernel == "mask" and inputs is None else inputs
    largest = torch_attention.largest_logits(q[:, :, index], k, inputs, chunks)
    torch.testing.assert_close(largest, scores[:, :, index].amax((0, 2, 3)), rtol=1e-6, atol=1e-6)


@cache
def logits_of_transformers() -> torch.Tensor:
    """Return the largest logits [layers, heads] of transformers' Llama, with the initial weights, on the first step."""
    plan, table = make_plan(1), torch.full((LAYERS, HEADS), -torch.inf)
    model = LlamaForCausalLM(hf_config(plan.model))
    model.set_attn_implementation("eager")
    load(model, oracle().initial)
    original = modeling_llama.eager_attention_forward

    def recorded(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT * HEAD_DIM**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        table[module.layer_idx] = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
        return original(module, query, key, *args, **kwargs)

    modeling_llama.eager_attention_forward = recorded
    try:
        with torch.no_grad():
            model(whole_batch(plan, 0)[0])
    finally:
        modeling_llama.eager_attention_forward = original
    return table


def scaled(weights: Tensors, table: torch.Tensor) -> Tensors:
    """Return the weights after QK-Clip by the logits [layers, heads], by a loop over heads."""
    results = {name: tensor.clone() for name, tensor in weights.items()}
    for layer in range(LAYERS):
        for kv in range(KV_HEADS):
            group = range(kv * HEADS // KV_HEADS, (kv + 1) * HEADS // KV_HEADS)
            gamma = min(1.0, TAU / max(table[layer, head].item() for head in group))
            for module, heads in (("q_proj", group), ("k_proj", (kv,))):
                for kind in ("weight", "bias"):
                    tensor = results.get(f"model.layers.{layer}.self_attn.{module}.{kind}")
                    for head in heads if tensor is not None else ():
                        tensor[head * HEAD_DIM : (head + 1) * HEAD_DIM] *= gamma**0.5
    return results


Steps = list[tuple[torch.Tensor, bool]]
"""Logits [layers, heads] of each step, and whether the step is skipped."""


def run_steps(plan: Plan, model: ParallelModel, steps: Steps) -> tuple[list[list[tuple]], list[dict[str, float]]]:
    """Run steps with zero gradients and given logits; return the weights before and after each step, and the metrics
    after each."""
    optimizer, metrics = build_optimizer(plan, model), []
    weights = [rectangles(model.shards, lambda shard: shard.local)]
    for table, skip in steps:
        _set_logits(plan, model, table)
        for shard in model.trained:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
        optimizer.update(torch.tensor(1.0), torch.tensor(skip))
        optimizer.advance(updated=not skip)
        weights.append(rectangles(model.shards, lambda shard: shard.local))
        metrics.append(optimizer.metrics())
    return weights, metrics


def _set_logits(plan: Plan, model: ParallelModel, table: torch.Tensor) -> None:
    tp_rank = plan.topology(dist.get_rank()).place["tp"]
    for chunk in model.chunks if plan.config.optim.qk_clip is not None else ():
        for number, block in chunk.layers.items():
            layer: Any = block.self_attn
            layer.max_logits = table[int(number)].chunk(HEADS // layer.num_heads)[tp_rank].clone()


def test_logits_and_weights_are_those_of_a_plain_reference() -> None:
    table = logits_of_transformers()
    assert (table > TAU).any() and (table < TAU).any()
    assert (table.unflatten(1, (KV_HEADS, -1)).amax(2) < TAU).any(), "some groups keep their weights"
    expected = scaled(run_layout(1, steps=1).weights, table)
    result = run_layout(1, CLIP, steps=1).weights
    for name, weight in expected.items():
        assert distance(result[name], weight) < 1e-6, name


OPTIMIZERS = {
    (name, precision): (f"trainer.precision={precision}", *settings)
    for name, settings in (("adamw", ()), ("muon, qwen2", ("optim.name=muon", "model.model_type=qwen2")))
    for precision in ("fp32", "bf16_sr")
}
TABLE = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(1)) * 3


@cache
def updates_of_one_process(*clip: str) -> list[Tensors]:
    plans = [make_plan(1, *settings, *clip) for settings in OPTIMIZERS.values()]
    return [assemble([weights[-1]])[0] for weights, _ in on_ranks_by_plan(run_steps, plans, [(TABLE, False)])[0]]


@each_layout(__file__, "QK-Clip")
def test_weights_have_the_bits_of_one_process(ranks: int, layout: list[str]) -> None:
    plans = [make_plan(ranks, CLIP, *settings, *layout) for settings in OPTIMIZERS.values()]
    answers = on_ranks_by_plan(run_steps, plans, [(TABLE, False)])
    unclipped = updates_of_one_process()
    for index, ((name, precision), expected) in enumerate(zip(OPTIMIZERS, updates_of_one_process(CLIP), strict=True)):
        weights = assemble([answer[index][0][-1] for answer in answers])[0]
        assert [key for key, tensor in expected.items() if not torch.equal(weights[key], tensor)] == [], name
        assert all(answer[index][1] == [{"max_attention_logit": TABLE.max().item()}] for answer in answers)
        for key, tensor in scaled(unclipped[index], TABLE).items():
            assert distance(weights[key].float(), tensor.float()) < (1e-6 if precision == "fp32" else 6e-3), key


def test_a_skipped_step_keeps_weights_and_forgets_its_logits() -> None:
    plans = [make_plan(2, CLIP, "trainer.tp=2", f"optim.name={name}") for name in ("adamw", "muon", "sgd")]
    steps = [(torch.full((LAYERS, HEADS), value), value > 1) for value in (9.0, 0.5)]
    for answers in on_ranks_by_plan(run_steps, plans, steps):
        for (initial, skipped, _), metrics in answers:
            assert all(torch.equal(before[-1], after[-1]) for before, after in zip(initial, skipped, strict=True))
            assert metrics == [{"max_attention_logit": 9.0}, {"max_attention_logit": 0.5}]


def test_validation_and_recomputation_record_nothing() -> None:
    assert on_ranks(calls_of_a_step, make_plan(1, CLIP, "trainer.recompute=full")) == [(4 * LAYERS, 0)]


def calls_of_a_step(plan: Plan, model: ParallelModel) -> tuple[int, int]:
    """Return the numbers of measurements in a training step with four micro batches, and in a validation."""
    calls: list[int] = []
    original = torch_attention.largest_logits
    torch_attention.largest_logits = lambda *inputs: calls.append(1) or original(*inputs)
    batches = rank_batches(plan).at(0)
    model.forward_backward(batches)
    train = len(calls)
    model.evaluate(batches)
    return train, len(calls) - train
