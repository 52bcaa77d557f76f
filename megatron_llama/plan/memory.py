"""Bytes of weights, gradients and optimizer on one rank: the part of memory that no batch size makes smaller.

A lower bound by design: activations, communication buffers and the allocator come on top, so what is refused here
could not have run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.precision import BYTES, quantized_bytes
from megatron_llama.plan.parameters import parameters_per_stage, quantized_per_stage, trained_per_stage
from megatron_llama.plan.plan import Plan

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0}


@dataclass(frozen=True)
class Machine:
    """Memory that some ranks share: a host's, by the ranks that run on it, or one accelerator's, by its one rank."""

    memory_bytes: int
    """Memory, bytes."""
    ranks: int = 1
    """Ranks that live in it."""
    name: str = "this machine"
    """What to call it in a message."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


def rank_memory(parameters: int, plan: Plan, trained: int | None = None, quantized: int = 0) -> RankMemory:
    """Bytes that ``parameters`` on one rank need under the plan's precision, ZeRO stage and optimizer.

    ``trained`` of them, all where None, have gradients and moments; ``quantized`` are kept in 8 or 4 bits, gathered or
    not, and the others lie there in the plan's frozen_dtype.
    """
    trainer = plan.config.trainer
    trained = parameters if trained is None else trained
    shard, frozen = -(-trained // plan.shard_size), -(-(parameters - trained - quantized) // plan.shard_size)
    packed = quantized_bytes(plan.quantized, quantized) if plan.quantized else 0
    # What the optimizer updates: this rank's share from ZeRO 1 on.
    stored = BYTES[plan.precision.param_dtype]
    kept = stored * shard + BYTES[plan.frozen_dtype] * frozen + -(-packed // plan.shard_size)
    # What the blocks compute with. fully_shard gathers it into a buffer of its own, in a group of one rank too; ZeRO 3
    # does so block by block, which is little.
    working = 0 if trainer.zero == 3 else (parameters - quantized) * BYTES[plan.precision.compute_dtype] + packed
    # What is reduced has the dtype of what is updated. Below ZeRO 2 the sums stay whole until the last micro batch, in
    # the dtype that they are made in.
    one_micro_batch = plan.num_microbatches == 1
    gradients = stored * shard
    if trainer.zero < 2 and not one_micro_batch:
        gradients = max(gradients, trained * BYTES[plan.precision.grad_accum_dtype])
    if one_micro_batch:
        # Each block lets go of its working copy as its gradient is made, so only the larger of the two counts.
        working -= min(working, gradients)
    moments = BYTES[plan.precision.optimizer_state_dtype] * MOMENTS[plan.config.optim.name]
    return RankMemory(kept + working, gradients, moments * shard)


def stage_memory(plan: Plan) -> list[RankMemory]:
    """Bytes on one rank of each pipeline stage."""
    counts = zip(parameters_per_stage(plan), trained_per_stage(plan), quantized_per_stage(plan), strict=True)
    return [rank_memory(count, plan, trained, quantized) for count, trained, quantized in counts]
