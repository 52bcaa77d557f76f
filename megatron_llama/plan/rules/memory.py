"""The rejection of runs that cannot fit into memory, by the estimate of plan/memory.py.

On an accelerator the whole peak less the error of the formulas must fit. Host memory may be swapped or shared, so there
only the exact part must fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_llama import optional_tools
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.devices import find_device
from megatron_llama.plan.memory import SURE, USABLE, Footprint, stage_footprints
from megatron_llama.plan.plan import Plan
from megatron_llama.system.tables import GIB, gib


@dataclass(frozen=True)
class Machine:
    """Memory of a host, shared by its ranks, or of an accelerator, used by one rank."""

    memory_bytes: int
    """Memory, bytes."""
    ranks: int = 1
    """Ranks that share it."""
    name: str = "this machine"
    """Name in messages."""
    accelerator: bool = False
    """Whether this is device memory, where the whole peak counts."""
    fast_bf16: bool = True
    """Whether an accelerator multiplies bf16 faster than fp32."""


def check_memory(plan: Plan, machine: Machine | None, replan: Callable[[Config, int], Plan]) -> list[Problem]:
    """Return the problem of a plan whose heaviest rank cannot fit.

    Args:
        machine: Memory of this host; ``device.memory_gib`` takes precedence. Without both nothing is checked.
        replan: Plans another config on another world size, to find changes that fit.
    """
    stated = plan.config.device.memory_gib
    machine = _stated_machine(plan) or machine
    if machine is None:
        return []
    heaviest, needed = max(enumerate(stage_footprints(plan)), key=lambda stage: _sure(stage[1], machine))
    if _sure(needed, machine) * machine.ranks <= machine.memory_bytes:
        return []
    where = f" (pipeline stage {heaviest})" if plan.config.trainer.pp > 1 else ""
    size, moment, names = needed.states, "before any activation", ["weights", "gradients", "optimizer"]
    if machine.accelerator:
        size, moment, names = needed.total, "at its peak", [*names, "activations", "logits", "buffers"]
    parts = ", ".join(f"{name} {gib(part)}" for name, part in needed.parts().items() if part and name in names)
    together = f", {gib(size * machine.ranks)} for {machine.ranks} ranks" if machine.ranks > 1 else ""
    rule = (
        f"the heaviest rank{where} needs {gib(size)} {moment}: {parts}{together}; "
        f"{machine.name} has {gib(machine.memory_bytes)}"
    )
    field, value = ("device.memory_gib", stated) if stated is not None else ("model", plan.model.name)
    return [Problem(field, value, rule, _suggest_changes(plan, machine, replan), machine_specific=stated is None)]


def _stated_machine(plan: Plan) -> Machine | None:
    """Return the machine of ``device.memory_gib``, None if it is unset."""
    stated = plan.config.device.memory_gib
    if stated is None:
        return None
    device = find_device(plan.config.device.name)
    return Machine(int(stated * GIB), 1, "a device", accelerator=device is None or device.is_accelerator)


def reserve_notes(plan: Plan, machine: Machine | None) -> list[str]:
    """Return a note if the tensors fit a device only without ``Device.memory_reserve``. Arguments as check_memory."""
    machine, device = _stated_machine(plan) or machine, find_device(plan.config.device.name)
    if machine is None or device is None or not machine.accelerator:
        return []
    total = max(each.total for each in stage_footprints(plan))
    reserve = device.memory_reserve(total)
    if not reserve or total + reserve <= machine.memory_bytes:
        return []
    return [
        f"device memory is tight: {gib(total)} of tensors and an estimated {gib(reserve)} for fragmentation, device "
        f"context and communication exceed {gib(machine.memory_bytes)}. If the run is out of memory or slow, write a "
        "smaller trainer.micro_batch_size, or trainer.recompute=full"
    ]


def _sure(needed: Footprint, machine: Machine) -> float:
    """Return the bytes that the rank certainly needs."""
    if not machine.accelerator:
        return needed.states + needed.host
    return max(SURE * needed.total, needed.states)


def _suggest_changes(plan: Plan, machine: Machine, replan: Callable[[Config, int], Plan]) -> str:
    """Return the cheapest changes that make the plan fit; a general suggestion without tools."""
    fitting_changes = optional_tools.load(optional_tools.ADVICE)
    budget = machine.memory_bytes // machine.ranks

    def needs(other: Plan) -> int:
        return max(each.total if machine.accelerator else each.states + each.host for each in stage_footprints(other))

    limit = USABLE * budget if machine.accelerator else budget
    if fitting_changes is not None:
        changes = fitting_changes(
            plan,
            lambda other: needs(other) <= limit,
            replan,
            more_devices=machine.ranks == 1,
            has_host=machine.accelerator,
        )
        if changes:
            return "write " + ", or ".join(
                change.describe(needs(change.plan), max(stage.host for stage in stage_footprints(change.plan)))
                for change in changes
            )
    return "write a smaller model (see conf/model/, from model=llama_2m on), or use a host with more memory"
