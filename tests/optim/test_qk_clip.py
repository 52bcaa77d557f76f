"""QK-Clip against plain references: the largest logits, the scaled weights, and skipped steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices import attention, get_device
from megatron_llama.devices.visibility import Documents, build_attention_inputs, dense_mask, masked
from megatron_llama.optim import build_optimizer
from megatron_llama.parallel import ParallelModel, build_model, process_groups
from megatron_llama.plan import Plan
from tests.oracle import RaggedSamples, Tensors, assemble, distance, make_plan, oracle, rectangles
from tests.ranks import run_ranks

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
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 1)  # blocks of 16
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
    largest = attention.largest_logits(q[:, :, index], k, inputs, chunks)
    expected = scores[:, :, index].amax((0, 2, 3))
    torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)


@cache
def logits_of_transformers() -> torch.Tensor:
    """Return the largest logits [layers, heads] of transformers' Llama, with the initial weights, on the first step."""
    table = torch.full((LAYERS, HEADS), -torch.inf)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 4096}
    sizes |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    plan = make_plan(1)
    theta = {"rope_theta": plan.model.rope_theta, "rope_type": "default"}
    config = LlamaConfig(**sizes, rms_norm_eps=plan.model.rms_norm_eps, rope_parameters=theta)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.load_state_dict(oracle().initial)
    original = modeling_llama.eager_attention_forward

    def recorded(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT * HEAD_DIM**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        table[module.layer_idx] = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
        return original(module, query, key, *args, **kwargs)

    modeling_llama.eager_attention_forward = recorded
    try:
        with torch.no_grad():
            model(torch.stack([RaggedSamples(16, 64)[index]["tokens"] for index in range(8)]))
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


def one_step(rank: int, plan: Plan, table: torch.Tensor | None, skip: bool = False) -> tuple[Any, ...]:
    """Run a step; with ``table`` with equal gradients and these logits. Return the weights and the metrics."""
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, torch.device("cpu")):
        model = build_model(plan, topology, device, torch.device("cpu"))
        optimizer = build_optimizer(plan, model)
        initial = rectangles(model, lambda shard: shard.local)
        if table is not None:
            _set_logits(model, table, topology.place["tp"])
        for shard in model.trained:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
        optimizer.update(torch.tensor(1.0), torch.tensor(skip))
        optimizer.advance(updated=not skip)
        return initial, rectangles(model, lambda shard: shard.local), optimizer.metrics()


def _set_logits(model: ParallelModel, table: torch.Tensor, tp_rank: int) -> None:
    for chunk in model.chunks:
        for number, block in chunk.layers.items():
            layer: Any = block.self_attn
            layer.max_logits = table[int(number)].chunk(HEADS // layer.num_heads)[tp_rank].clone()


def test_logits_and_weights_are_those_of_a_plain_reference() -> None:
    table = logits_of_transformers()
    assert (table > TAU).any() and (table < TAU).any()
    assert (table.unflatten(1, (KV_HEADS, -1)).amax(2) < TAU).any(), "some groups keep their weights"
    from tests.oracle import run_layout

    expected = scaled(run_layout(1, steps=1).weights, table)
    result = run_layout(1, CLIP, steps=1).weights
    for name, weight in expected.items():
        assert distance(result[name], weight) < 1e-6, name


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_sr", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [[], ["optim.name=muon", "model.model_type=qwen2"]], ids=["adamw", "muon, qwen2"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(4, ["trainer.tp=2", "trainer.zero=3"]), (4, ["trainer.tp=4"]), (4, ["trainer.pp=2", "trainer.vpp=2"])],
    ids=["tp2·dp2, zero 3", "tp4, kv heads < tp", "pp2·vpp2·dp2"],
)
def test_weights_have_the_bits_of_one_process(
    ranks: int, layout: list[str], settings: list[str], precision: str
) -> None:
    table = torch.rand(LAYERS, HEADS, generator=torch.Generator().manual_seed(1)) * 3
    each = [CLIP, f"trainer.precision={precision}", *settings]
    (_, one, _), *_ = run_ranks(one_step, 1, make_plan(1, *each), table)
    answers = run_ranks(one_step, ranks, make_plan(ranks, *each, *layout), table)
    expected, weights = assemble([one])[0], assemble([answer[1] for answer in answers])[0]
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []
    assert {answer[2]["max_attention_logit"] for answer in answers} == {table.max().item()}
    (_, unclipped, _), *_ = run_ranks(one_step, 1, make_plan(1, *each[1:]), None)
    for name, tensor in scaled(assemble([unclipped])[0], table).items():
        assert distance(weights[name].float(), tensor.float()) < (1e-6 if precision == "fp32" else 6e-3), name


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_a_skipped_step_keeps_weights_and_forgets_its_logits(name: str) -> None:
    plan = make_plan(2, CLIP, "trainer.tp=2", f"optim.name={name}")
    for initial, weights, metrics in run_ranks(one_step, 2, plan, torch.full((LAYERS, HEADS), 9.0), True):
        assert all(torch.equal(before[-1], after[-1]) for before, after in zip(initial, weights, strict=True))
        assert metrics == {"max_attention_logit": 9.0}
    for metrics in run_ranks(metrics_of_two_steps, 2, plan):
        assert metrics == [{"max_attention_logit": 9.0}, {"max_attention_logit": 0.5}]


def metrics_of_two_steps(rank: int, plan: Plan) -> list[dict[str, float]]:
    device, topology = get_device("cpu"), plan.topology(rank)
    with process_groups(plan, topology, device, torch.device("cpu")):
        model = build_model(plan, topology, device, torch.device("cpu"))
        optimizer, metrics = build_optimizer(plan, model), []
        for value in (9.0, 0.5):
            _set_logits(model, torch.full((LAYERS, HEADS), value), topology.place["tp"])
            for shard in model.trained:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
            optimizer.update(torch.tensor(1.0), torch.tensor(value > 1))
            optimizer.advance(updated=value < 1)
            metrics.append(optimizer.metrics())
        return metrics


def test_validation_and_recomputation_record_nothing() -> None:
    assert run_ranks(calls_of_a_step, 1, make_plan(1, CLIP, "trainer.recompute=full")) == [(4 * LAYERS, 0)]


def calls_of_a_step(rank: int, plan: Plan) -> tuple[int, int]:
    """Return the numbers of measurements in a training step with four micro batches, and in a validation."""
    from megatron_llama.data.batches import Batches
    from megatron_llama.parallel import max_logits

    device, topology, cpu = get_device("cpu"), plan.topology(rank), torch.device("cpu")
    calls: list[int] = []
    original = max_logits.largest_logits
    max_logits.largest_logits = lambda *inputs: calls.append(1) or original(*inputs)
    with process_groups(plan, topology, device, cpu):
        model = build_model(plan, topology, device, cpu)
        batches = Batches(RaggedSamples(16, 64), plan, topology, cpu).at(0)
        model.forward_backward(batches)
        train = len(calls)
        model.evaluate(batches)
        return train, len(calls) - train
