"""Two Llamas side by side: ours in some layout, and transformers' with the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_llama.arch.hf_tp_mapping import Rectangle
from megatron_llama.config import ModelConfig
from megatron_llama.config.rope import rope_to_hf
from megatron_llama.optim.optimizer import build_schedule
from megatron_llama.parallel import Shard
from megatron_llama.plan import Plan
from tests.compiled import SECONDS, prepare_rank
from tests.oracle import RaggedSamples, Tensors, assemble, rank_batches, rank_groups, rank_model, rectangles
from tests.parallel.symmetric_memory import fused_products
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Answer:
    """The results of a Llama for one global batch."""

    logits: torch.Tensor
    """[b, s, vocabulary] of the first ``micro_batch_size`` samples."""
    loss: float
    """Mean over the global batch's tokens."""
    accuracy: float
    """Share of these tokens whose label has the largest logit."""
    grads: Tensors
    weights: Tensors
    fused: int = 0
    """Matmuls with a fused gather or scatter that each rank has run (trainer.async_tp)."""


def ours(world_size: int, plans: list[Plan]) -> list[Answer]:
    """Our answer to each of ``plans``, which must share one layout: they run one after another in the same ranks."""
    compiling = any(plan.config.trainer.compile for plan in plans)
    ranks = run_ranks(_answers, world_size, plans, timeout=SECONDS if compiling else 120)
    actual = []
    for index, plan in enumerate(plans):
        answers = [rank[index] for rank in ranks]
        last = answers[-1]
        assert len({(*answer[1:3], answer[5]) for answer in answers}) == 1, "ranks disagree about loss or accuracy"
        grads, weights = (assemble([answer[i] for answer in answers])[0] for i in (3, 4))
        logits = last[0][:, :, : plan.model.vocab_size]
        actual.append(Answer(logits, last[1], last[2], grads, weights, last[5]))
    return actual


def theirs(plan: Plan, weights: Tensors, dtype: torch.dtype = torch.float32) -> Answer:
    """The results of transformers' Llama with our weights. Call it in a forked rank: it runs a backward pass."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_config(hf_config(plan.model), attn_implementation="sdpa")
    load(llama, weights)
    llama = llama.to(dtype)
    tokens, labels, mask = whole_batch(plan, 0)
    logits = llama(tokens[: plan.config.trainer.micro_batch_size]).logits
    output = output_of_batch(llama, plan, 0)
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in llama.named_parameters() if parameter.grad is not None}
    right = ((output.logits.argmax(-1) == labels) * mask).sum() / mask.sum()
    return Answer(logits.detach(), output.loss.item(), right.item(), grads, weights)


def output_of_batch(llama: Any, plan: Plan, step: int) -> Any:
    """The output for a step's global batch, with transformers' loss over unmasked tokens."""
    tokens, labels, mask = whole_batch(plan, step)
    marked = torch.where(mask > 0, labels, -100)  # which masks a token
    return llama(tokens, labels=marked, shift_labels=marked, num_items_in_batch=mask.sum())


def loss_of_batch(llama: Any, plan: Plan, step: int) -> torch.Tensor:
    return output_of_batch(llama, plan, step).loss  # type: ignore[no-any-return]


LossOfStep = Callable[[Any, Plan, int], torch.Tensor]


def train_plain(llama: Any, plan: Plan, steps: int, loss_of: LossOfStep = loss_of_batch) -> tuple[list[float], ...]:
    """Train by torch's optimizer and clipping; return losses and gradient norms. Call it in a forked rank.

    The groups are as in transformers' Trainer: weight decay for all weights except norms.
    """
    optim, losses, norms = plan.config.optim, list[float](), list[float]()
    named = {name: parameter for name, parameter in llama.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [p for name, p in named.items() if ("norm" in name) == is_norm], "weight_decay": decay}
        for is_norm, decay in ((False, optim.weight_decay), (True, 0.0))
    ]
    inner: torch.optim.Optimizer
    if optim.name == "sgd":
        inner = torch.optim.SGD(groups, lr=optim.peak_lr, momentum=optim.betas[0])
    else:
        kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
        inner = kind(groups, lr=optim.peak_lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
    schedule = build_schedule(plan, inner)
    for step in range(steps):
        loss = loss_of(llama, plan, step)
        loss.backward()
        losses.append(loss.item())
        largest = float("inf") if optim.clip is None else optim.clip
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), largest).item())
        inner.step()
        inner.zero_grad()
        schedule.step()
    return losses, norms


def load(llama: LlamaForCausalLM, weights: Tensors) -> None:
    """Load Hugging Face tensors into a transformers Llama; each of its tensors must be present."""
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if llama.config.tie_word_embeddings else []
    assert (missing, unexpected) == (tied, []), (missing, unexpected)


def hf_config(model: ModelConfig) -> LlamaConfig:
    """Return the shape as a transformers config of its model type: Mistral's for a Llama with a sliding window."""
    from transformers import LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= rope_to_hf(model) or {}
    same = dataclasses.asdict(model)
    for name in ("name", "model_type", "rope_theta", "rope_scaling", "sparse_attention"):
        del same[name]
    windowed = same["sliding_window"] is not None
    kinds: dict[str, Any] = {"llama": MistralConfig if windowed else LlamaConfig}
    kind = (kinds | {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "olmo2": Olmo2Config})[model.model_type]
    if model.model_type.startswith("qwen"):
        same |= {"use_sliding_window": windowed, "max_window_layers": 0}
    same |= {"pad_token_id": None, "eos_token_id": None}  # the gradient of OLMo 2's padding token would be zero
    return kind(**same, rope_parameters=rope, attn_implementation="sdpa", use_cache=False)


def whole_batch(plan: Plan, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, labels, loss mask) of a step's global batch, each [samples, s]."""
    samples = RaggedSamples(plan.config.data.length, plan.model.vocab_size)
    size = plan.config.trainer.global_batch_size
    batch = [samples[index] for index in range(step * size, (step + 1) * size)]
    tokens, labels, mask = (torch.stack([sample[key] for sample in batch]) for key in ("tokens", "labels", "loss_mask"))
    return tokens, labels, mask


@torch.no_grad()
def roughen_norms(shards: Iterable[Shard]) -> None:
    """Gives the norms' weights other values than one: else a norm that ignores its weight would pass."""
    for shard in shards:
        for rectangle in shard.rectangles:
            if len(rectangle.global_shape) == 1:
                shard.local[rectangle.local_slices].add_(_noise(rectangle))


def _noise(rectangle: Rectangle) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(rectangle.name.encode()))
    # Large biases would drown the rest of queries and keys: their gradients would be rounding errors.
    scale = 0.1 if rectangle.name.endswith(".bias") else 0.3
    whole = scale * torch.randn(rectangle.global_shape, generator=generator)
    return whole[tuple(slice(o, o + n) for o, n in zip(rectangle.offset, rectangle.size, strict=True))]


def _answers(rank: int, plans: list[Plan]) -> list[tuple]:
    with rank_groups(plans[0], rank):
        return [_answer(rank, plan) for plan in plans]


def _answer(rank: int, plan: Plan) -> tuple:
    prepare_rank(plan)
    before = fused_products()
    model = rank_model(plan, rank)
    roughen_norms(model.shards)
    batches = rank_batches(plan).at(0)
    logits = model.logits(batches[0].tokens)
    if logits is not None:
        logits = gather_from_tensor_model_parallel_region(logits).transpose(0, 1)
    accuracy = model.evaluate(batches)[1].item()
    loss = model.forward_backward(batches).item()
    grads, weights = (rectangles(model.shards, of) for of in (lambda shard: shard.grad, lambda shard: shard.local))
    return logits, loss, accuracy, grads, weights, fused_products() - before
