"""Bytes on one rank of each pipeline stage, and the refusal of a run that is sure not to fit.

Weights, gradients and optimizer states are exact; plan/forecast/footprint.py adds activations, logits and buffers. On
an accelerator the whole peak counts, less what the formulas may be wrong by; a host's memory may be swapped, shared and
larger than it looks, so there only what is exact decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_llama.config.precision import BYTES, quantized_bytes, state_bytes_8bit
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.cheaper import fitting_changes
from megatron_llama.plan.forecast.footprint import Footprint, States, footprint, under_way
from megatron_llama.plan.forecast.training_job import job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.shapes import StageParameters
from megatron_llama.system.units import GIB, gib

USABLE = 0.94
"""Share of a device's memory that live tensors can fill: the rest is the driver's, the communication library's and
what the allocator can't use."""
SURE = 0.9
"""Share of the forecast peak that a run needs for sure: tests/plan/forecast/test_against_rehearsal.py keeps it within
10 %."""


@dataclass(frozen=True)
class Machine:
    """Memory that some ranks share: a host's, by the ranks that run on it, or one accelerator's, by its one rank."""

    memory_bytes: int
    """Memory, bytes."""
    ranks: int = 1
    """Ranks that share it."""
    name: str = "this machine"
    """What to call it in a message."""
    accelerator: bool = False
    """Whether it is a device's own memory, all of which counts."""
    fast_bf16: bool = True
    """Whether an accelerator multiplies bf16 faster than fp32."""


def stage_memory(plan: Plan) -> list[States]:
    """Bytes of weights, gradients and optimizer states on one rank of each pipeline stage."""
    return [rank_memory(plan, stage) for stage in plan.stages]


def stage_footprints(plan: Plan) -> list[Footprint]:
    """Bytes on one rank of each pipeline stage at the largest moment of a step, with activations."""
    job, found = job_of_plan(plan), []
    for number, stage in enumerate(plan.stages):
        states = rank_memory(plan, stage)
        on_host = 0
        if "optimizer" in plan.config.trainer.offload:  # its states, and copies of weights and gradients
            shard = BYTES[plan.precision.param_dtype] * -(-stage.trained // plan.shard_size)
            states, on_host = states._replace(optimizer=0), states.optimizer + 2 * shard
        if plan.config.trainer.batch_schedule or under_way(job, number) < job.num_microbatches:
            needed = footprint(job, number, states)
            found.append(replace(needed, host=needed.host + on_host))
            continue
        # All micro batches come before the first backward pass. Before it there are no gradients, after it one less.
        if job.num_microbatches == 1:
            after = Footprint(*states, activations={}, logits=0, buffers=0)
            working = min(states.gradients, _working(plan, stage))  # what the gradients take the place of
            if plan.frees_table(is_first=number == 0, is_last=number == plan.config.trainer.pp - 1):
                table = plan.padded_vocab_size // plan.config.trainer.tp * plan.model.hidden_size
                working -= min(working, table * BYTES[plan.precision.compute_dtype])
        else:
            after, working = footprint(replace(job, num_microbatches=job.num_microbatches - 1), number, states), 0
        before = footprint(job, number, States(states.weights, working, states.optimizer))
        largest = max(before, after, key=lambda moment: moment.total)
        found.append(replace(largest, host=before.host + on_host))
    return found


def _working(plan: Plan, stage: StageParameters) -> int:
    """Bytes of what the blocks compute with. fully_shard gathers it into a buffer of its own, in a group of one rank
    that casts its weights too; ZeRO 3 does so block by block, which is little. Working copies are of what is cast."""
    if plan.plain_parameters or plan.config.trainer.zero == 3:
        return 0
    quantized = stage.quantizable if plan.quantized else 0
    if plan.working_copies:
        trained_only = plan.frozen_dtype == plan.precision.compute_dtype
        cast = stage.trained if trained_only else stage.held - quantized
        return cast * BYTES[plan.precision.compute_dtype]
    packed = quantized_bytes(plan.quantized, quantized) if plan.quantized else 0
    return (stage.held - quantized) * BYTES[plan.precision.compute_dtype] + packed


def rank_memory(plan: Plan, stage: StageParameters) -> States:
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
    working = _working(plan, stage)
    # Reduced gradients have the dtype of the parameters, unless they stay as they are made. Below ZeRO 2 the sums stay
    # whole until the last micro batch, in the dtype in which they are accumulated.
    narrow = shard - stage.summed if plan.narrow_gradients else 0
    gradients = param_bytes * (shard - narrow) + BYTES[precision.compute_dtype] * narrow
    if trainer.zero < 2 and not plan.one_micro_batch:
        gradients = max(gradients, stage.trained * BYTES[precision.grad_accum_dtype])
    if plan.one_micro_batch:
        # Each block frees its working copy as its gradient is made, so only the larger of the two counts.
        working -= min(working, gradients)
    states = optimizer_bytes(plan, stage, plan.shard_size)
    if plan.exchanges_signs:  # the errors of the rank that averages
        states += BYTES[precision.optimizer_state_dtype] * -(-shard // plan.dp)
    return States(kept + working, gradients, states)


def optimizer_bytes(plan: Plan, stage: StageParameters, ranks: int = 1) -> int:
    """Bytes of the states of what is trained in ``stage`` on one of the ``ranks`` that share them."""
    in_blocks = stage.in_blocks if plan.config.optim.state_bits == 8 else 0
    rest = -(-(stage.trained - in_blocks) // ranks) * BYTES[plan.precision.optimizer_state_dtype]
    return plan.config.optim.row.state_tensors * (rest + state_bytes_8bit(-(-in_blocks // ranks)))


def check_memory(
    plan: Plan, machine: Machine | None, again: Callable[[Config, int], Plan] | None = None
) -> list[Problem]:
    """The problem of a plan whose heaviest rank is sure not to fit; what is stated goes before ``machine``, and where
    neither is known nothing is checked. ``again`` plans another config and world, to find what fits."""
    stated = plan.config.device.memory_gib
    if stated is not None:
        machine = Machine(int(stated * GIB), 1, "a device", accelerator=plan.config.device.name != "cpu")
    if machine is None:
        return []
    heaviest, needed = max(enumerate(stage_footprints(plan)), key=lambda stage: _sure(stage[1], machine))
    if _sure(needed, machine) * machine.ranks <= machine.memory_bytes:
        return []
    where = f" (pipeline stage {heaviest})" if plan.config.trainer.pp > 1 else ""
    parts = f"weights {gib(needed.weights)}, gradients {gib(needed.gradients)}, optimizer {gib(needed.optimizer)}"
    size, what = needed.states, "before any activation"
    if machine.accelerator:
        parts += f", activations {gib(needed.kept)}, logits {gib(needed.logits)}, buffers {gib(needed.buffers)}"
        size, what = needed.total, "at its peak"
    together = f", {gib(size * machine.ranks)} for {machine.ranks} ranks" if machine.ranks > 1 else ""
    rule = (
        f"the heaviest rank{where} needs {gib(size)} {what}: {parts}{together}; "
        f"{machine.name} has {gib(machine.memory_bytes)}"
    )
    field, value = ("device.memory_gib", stated) if stated is not None else ("model", plan.model.name)
    return [Problem(field, value, rule, _what_fits(plan, machine, again), only_here=stated is None)]


def _sure(needed: Footprint, machine: Machine) -> float:
    """Bytes without which the rank can't run."""
    if not machine.accelerator:
        return needed.states + needed.host
    return max(SURE * needed.total, needed.states)


def _on_host(plan: Plan) -> int:
    """Bytes in the host's memory for the rank that has most there."""
    return max(each.host for each in stage_footprints(plan))


def _what_fits(plan: Plan, machine: Machine, again: Callable[[Config, int], Plan] | None) -> str:
    """The cheapest changes that make the plan fit."""
    budget = machine.memory_bytes // machine.ranks

    def needs(other: Plan) -> int:
        return max(each.total if machine.accelerator else each.states + each.host for each in stage_footprints(other))

    room = USABLE * budget if machine.accelerator else budget
    found = fitting_changes(
        plan,
        lambda other: needs(other) <= room,
        again,
        more_devices=machine.ranks == 1,
        has_host=machine.accelerator,
    )
    if found:
        told = (change.in_words(needs(change.plan), _on_host(change.plan)) for change in found)
        return "write " + ", or ".join(told)
    return "write a smaller model (conf/model/ has them, from model=llama_2m on), or use a machine with more memory"
