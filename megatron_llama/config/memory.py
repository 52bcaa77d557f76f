"""Bytes of weights, gradients and optimizer on one rank: the part of memory that no batch size makes smaller.

A lower bound by design: activations, communication buffers and the allocator come on top, so what is refused here
could not have run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.counting import parameters_per_stage
from megatron_llama.config.plan import Plan

GIB = 2**30
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


def rank_memory(parameters: int, plan: Plan) -> RankMemory:
    """Bytes that ``parameters`` on one rank need under the plan's precision, ZeRO stage and optimizer."""
    zero, shards = plan.config.trainer.zero, plan.shard_size
    shard = -(-parameters // shards)
    # What the optimizer updates, in fp32: this rank's share from ZeRO 1 on.
    master = 4 * shard
    # What the blocks compute with. ZeRO 3 gathers it block by block; in fp32 an unsharded master is used as it is.
    if zero == 3 or (plan.config.trainer.precision == "fp32" and shards == 1):
        working = 0
    else:
        working = parameters * (4 if plan.config.trainer.precision == "fp32" else 2)
    # Gradient sums are fp32. Below ZeRO 2 they stay whole until the last micro batch; a single one is reduced at once.
    whole_gradients = zero == 0 or (zero == 1 and plan.num_microbatches > 1)
    gradients = 4 * (parameters if whole_gradients else shard)
    return RankMemory(master + working, gradients, 4 * MOMENTS[plan.config.optim.name] * shard)


def stage_memory(plan: Plan) -> list[RankMemory]:
    """Bytes on one rank of each pipeline stage."""
    return [rank_memory(count, plan) for count in parameters_per_stage(plan)]
