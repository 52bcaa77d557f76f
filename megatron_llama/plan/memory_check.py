"""Whether weights, gradients and optimizer fit in memory, and what would make them fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.memory import Machine, RankMemory, rank_memory, stage_memory
from megatron_llama.plan.parameters import (
    kv_heads,
    lora_parameters_per_layer,
    matrices_per_layer,
    stage_parameters,
    stage_trained,
)
from megatron_llama.plan.plan import Plan
from megatron_llama.system.units import GIB, gib

MOST_DEVICES = 16384


def check_memory(plan: Plan, machine: Machine | None) -> list[Problem]:
    """The problem of a plan whose heaviest rank can't fit; ``device.memory_gib`` goes before what was found here."""
    stated = plan.config.device.memory_gib
    if stated is not None:
        machine = Machine(int(stated * GIB), 1, "a device")
    if machine is None:
        return []
    stages = stage_memory(plan)
    heaviest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    needed = stages[heaviest]
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
    return [Problem(field, value, rule, _what_fits(plan, machine))]


def _what_fits(plan: Plan, machine: Machine) -> str:
    """The smallest change that makes the plan fit."""
    budget = machine.memory_bytes // machine.ranks
    for stage in range(plan.config.trainer.zero + 1, 4):
        heaviest = _heaviest(replace(plan, config=_trainer(plan, zero=stage)))
        if plan.dp > 1 and heaviest.total <= budget:
            return f"write trainer.zero={stage}, which needs {gib(heaviest.total)} on a rank"
    larger = _larger_grid(plan, budget) if machine.ranks == 1 else None
    if larger:
        tp, pp = larger
        return f"write trainer.tp={tp} trainer.pp={pp}, on a multiple of {tp * pp} devices"
    return "write a smaller model (conf/model/ has them, from model=llama_2m on), or use a machine with more memory"


def _larger_grid(plan: Plan, budget: int) -> tuple[int, int] | None:
    """The smallest tp and pp whose heaviest rank fits without any help from data parallelism."""
    model = plan.model
    sizes = [
        size
        for size in (8, 4, 2, 1)
        if model.num_attention_heads % size == 0
        and model.intermediate_size % size == 0
        and (kv_heads(model) % size == 0 or size % kv_heads(model) == 0)
    ]
    # One data-parallel rank does every micro batch itself.
    alone = replace(plan, dp=1, num_microbatches=max(2, plan.num_microbatches), config=_trainer(plan, shard_group=1))
    devices = 1
    while devices <= MOST_DEVICES:
        for tp in sizes:
            pp = devices // tp
            if 1 <= pp <= model.num_hidden_layers and tp * pp == devices:
                first = _stage(alone, -(-model.num_hidden_layers // pp), tp, first=True, last=pp == 1)
                last = _stage(alone, model.num_hidden_layers // pp, tp, first=pp == 1, last=True)
                if max(first.total, last.total) <= budget:
                    return tp, pp
        devices *= 2
    return None


def _stage(plan: Plan, layers: int, tp: int, *, first: bool, last: bool) -> RankMemory:
    """Memory of one rank of a pipeline stage."""
    model, finetune = plan.model, plan.config.finetune
    count = stage_parameters(model, layers, tp, first=first, last=last)
    count += layers * lora_parameters_per_layer(model, finetune, tp)
    trained = stage_trained(model, finetune, layers, tp, first=first, last=last)
    return rank_memory(count, plan, trained, layers * matrices_per_layer(model, tp) if plan.quantized else 0)


def _trainer(plan: Plan, **changes: Any) -> Config:
    """The plan's config with other values under ``trainer``."""
    return replace(plan.config, trainer=replace(plan.config.trainer, **changes))


def _heaviest(plan: Plan) -> RankMemory:
    return max(stage_memory(plan), key=lambda memory: memory.total)
