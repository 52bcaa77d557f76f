"""Bytes of weights, gradients and optimizer states on one rank, and whether they fit.

A lower bound: activations, communication buffers and the allocator come on top, so a plan that is refused here could
not have run, with any batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_llama.config.precision import BYTES, quantized_bytes
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.shapes import StageParameters, can_cut, stage_parameters
from megatron_llama.system.units import GIB, gib

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0}
"""Tensors that the optimizer keeps for each parameter."""
MOST_DEVICES = 16384


@dataclass(frozen=True)
class Machine:
    """Memory that some ranks share: a host's, by the ranks that run on it, or one accelerator's, by its one rank."""

    memory_bytes: int
    """Memory, bytes."""
    ranks: int = 1
    """Ranks that share it."""
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
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer


def stage_memory(plan: Plan) -> list[RankMemory]:
    """Bytes on one rank of each pipeline stage."""
    return [rank_memory(plan, stage) for stage in plan.stages]


def rank_memory(plan: Plan, stage: StageParameters) -> RankMemory:
    """Bytes that the parameters of one rank need under the plan's precision, ZeRO stage and optimizer."""
    trainer, precision = plan.config.trainer, plan.precision
    quantized = stage.quantizable if plan.quantized else 0
    # Gathered or not, LoRA's frozen weights are kept packed, or else in frozen_dtype.
    packed = quantized_bytes(plan.quantized, quantized) if plan.quantized else 0
    shard = -(-stage.trained // plan.shard_size)
    frozen = -(-(stage.held - stage.trained - quantized) // plan.shard_size)
    # What the optimizer updates: this rank's share from ZeRO 1 on.
    param_bytes = BYTES[precision.param_dtype]
    kept = param_bytes * shard + BYTES[plan.frozen_dtype] * frozen + -(-packed // plan.shard_size)
    # What the blocks compute with. fully_shard gathers it into a buffer of its own, in a group of one rank too; ZeRO 3
    # does so block by block, which is little.
    working = 0 if trainer.zero == 3 else (stage.held - quantized) * BYTES[precision.compute_dtype] + packed
    # Reduced gradients have the dtype of the parameters. Below ZeRO 2 the sums stay whole until the last micro batch,
    # in the dtype in which they are accumulated.
    one_micro_batch = plan.num_microbatches == 1 and not trainer.batch_schedule
    gradients = param_bytes * shard
    if trainer.zero < 2 and not one_micro_batch:
        gradients = max(gradients, stage.trained * BYTES[precision.grad_accum_dtype])
    if one_micro_batch:
        # Each block frees its working copy as its gradient is made, so only the larger of the two counts.
        working -= min(working, gradients)
    states = BYTES[precision.optimizer_state_dtype] * OPTIMIZER_STATES[plan.config.optim.name]
    return RankMemory(kept + working, gradients, states * shard)


def check_memory(plan: Plan, machine: Machine | None) -> list[Problem]:
    """The problem of a plan whose heaviest rank does not fit. ``device.memory_gib`` goes before ``machine``; where
    neither is known, nothing is checked."""
    stated = plan.config.device.memory_gib
    if stated is not None:
        machine = Machine(int(stated * GIB), 1, "a device")
    if machine is None:
        return []
    stages = stage_memory(plan)
    heaviest, needed = max(enumerate(stages), key=lambda stage: stage[1].total)
    if needed.total * machine.ranks <= machine.memory_bytes:
        return []
    where = f" (pipeline stage {heaviest})" if len(stages) > 1 else ""
    together = f", {gib(needed.total * machine.ranks)} for {machine.ranks} ranks" if machine.ranks > 1 else ""
    rule = (
        f"the heaviest rank{where} needs {gib(needed.total)} before any activation: weights {gib(needed.weights)}, "
        f"gradients {gib(needed.gradients)}, optimizer {gib(needed.optimizer)}{together}; "
        f"{machine.name} has {gib(machine.memory_bytes)}"
    )
    field, value = ("device.memory_gib", stated) if stated is not None else ("model", plan.model.name)
    return [Problem(field, value, rule, _what_fits(plan, machine), only_here=stated is None)]


def _what_fits(plan: Plan, machine: Machine) -> str:
    """The smallest change that makes the plan fit."""
    budget = machine.memory_bytes // machine.ranks
    for zero in range(plan.config.trainer.zero + 1, 4):
        heaviest = max(memory.total for memory in stage_memory(replace(plan, config=_with(plan, zero=zero))))
        if plan.dp > 1 and heaviest <= budget:
            return f"write trainer.zero={zero}, which needs {gib(heaviest)} on a rank"
    if machine.ranks == 1 and (larger := _larger_grid(plan, budget)):
        tp, pp = larger
        return f"write trainer.tp={tp} trainer.pp={pp}, on a multiple of {tp * pp} devices"
    return "write a smaller model (conf/model/ has them, from model=llama_2m on), or use a machine with more memory"


def _larger_grid(plan: Plan, budget: int) -> tuple[int, int] | None:
    """The smallest tp and pp whose heaviest rank fits without any help from data parallelism."""
    layers = plan.model.num_hidden_layers
    # One data-parallel rank does every micro batch itself.
    alone = replace(plan, dp=1, num_microbatches=max(2, plan.num_microbatches), config=_with(plan, shard_group=1))

    for devices in (2**power for power in range(MOST_DEVICES.bit_length())):
        for tp in (8, 4, 2, 1):
            pp = devices // tp
            if can_cut(plan.model, tp) and 1 <= pp <= layers and tp * pp == devices:
                count = partial(stage_parameters, plan.model, plan.config.finetune, tp=tp)
                ends = count(-(-layers // pp), first=True, last=pp == 1), count(layers // pp, first=pp == 1, last=True)
                if max(rank_memory(alone, stage).total for stage in ends) <= budget:
                    return tp, pp
    return None


def _with(plan: Plan, **changes: Any) -> Config:
    """The plan's config with other values under ``trainer``."""
    return replace(plan.config, trainer=replace(plan.config.trainer, **changes))
