"""The machine that plans, as a device to plan for: what was measured of it, and what follows for a training step.

``scripts/plan.py --calibrate`` measures for a minute or two (tools/plan/measure_machine.py) and writes one file for
each host.
On processors nothing runs beside anything else: ranks share the cores, host and device are the same, a collective is
waited for. So a step is the sum of its parts, and communication is the sum over tools/forecast/traffic.py's operations.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.plan.job import Job, job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.tools.forecast.hardware import HardwareSpec
from megatron_llama.tools.forecast.step_time import (
    FLASH_BACKWARD,
    LOSS_BYTES,
    MEMORY_REACH,
    StepTime,
    kernel_count,
    load_constants,
    sign_bytes,
    step_time,
)
from megatron_llama.tools.forecast.traffic import Operation, step_operations

NAME = "cpu"
FORMS = ("fp32", "bf16")
WIDTH = 512
"""Of the pieces that are measured: a stream of that width, as many heads' columns, four times as much in the FFN."""
RANKS = (1, 2, 4)
"""Processes that are measured at the same time; for other numbers the nearest is taken."""
_SMALL = {"model.hidden_size": 64, "model.intermediate_size": 128, "model.vocab_size": 256, "data.seq_length": 32}
_LARGE = {"model.hidden_size": 256, "model.intermediate_size": 1024, "model.vocab_size": 33_000, "data.seq_length": 16}
STEPS: dict[str, tuple[Mapping[str, int], int]] = {
    "small": (_SMALL, 1),
    "small, 4 micro batches": (_SMALL, 4),
    "large": (_LARGE, 1),
    "large, 4 micro batches": (_LARGE, 4),
}
"""Models whose steps are timed, and micro batches: one that is nothing but overhead, one that is all parameters."""
FREE = {"host.operation": 0.0, "latency.node": 0.0, "latency.network": 0.0, "waiting": 0.0}
"""What a processor does not wait for, or what ``communication`` counts."""
WAITED, BESIDE = "waited for", "beside computing"
COLLECTIVES = {
    WAITED: ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"),
    BESIDE: ("all_reduce", "all_gather", "reduce_scatter"),
}
"""Kinds that are measured, and how a rank goes on: the sums of tp are waited for, the data-parallel ones are not."""
TILES = range(0, 400, 4)


VERSION = 2
"""Of what is measured: files of other versions are measured anew."""


class NotCalibrated(LookupError):
    """There are no measurements of this host that can be read."""


@dataclass(frozen=True)
class Calibration:
    """A calibration file."""

    version: int
    host: str
    date: str
    cores: int
    memory_bytes: int
    torch: str
    load: float
    """Processes that wanted a core a minute before: measured among others, rates are too low."""
    by_ranks: Mapping[str, Any]
    """Measurements by the number of ranks."""

    def nearest(self, ranks: int) -> tuple[Any, float]:
        """The measurements nearest to a number of ranks, and how much slower more ranks than those are."""
        counts = sorted(map(int, self.by_ranks))
        count = max((each for each in counts if each <= ranks), default=counts[0])
        return self.by_ranks[str(count)], max(1.0, ranks / max(count, self.cores)) if ranks > count else 1.0


def calibration_path(host: str | None = None) -> Path:
    """Where a host's measurements are."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "megatron_llama" / "machines" / f"{host or socket.gethostname()}.json"


def load_calibration(path: Path | None = None) -> Calibration:
    """The measurements of this host. Raises NotMeasured."""
    try:
        found = Calibration(**json.loads((path or calibration_path()).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise NotCalibrated(str(error)) from error
    if found.version != VERSION:
        raise NotCalibrated("another version of this program has measured it")
    return found


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds to start, seconds for each unit), none negative, of (units, seconds): with the least relative error."""
    weight = sum(1 / seconds**2 for _, seconds in samples)
    units = sum(x / seconds**2 for x, seconds in samples)
    squares = sum((x / seconds) ** 2 for x, seconds in samples)
    times = sum(1 / seconds for _, seconds in samples)
    both = sum(x / seconds for x, seconds in samples)
    slope = max(0.0, (weight * both - units * times) / (weight * squares - units**2))
    start = (times - slope * units) / weight
    return (start, slope) if start >= 0 else (0.0, both / squares)


def filled(tile: float, rows: float, inner: float, columns: float) -> float:
    """FLOPs of a product, those that starting and ending tiles could have done in the same time included."""
    return 2 * rows * inner * columns * (1 + tile / rows) * (1 + tile / inner) * (1 + tile / columns)


def fit_products(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(FLOP/s of large products, what starting and ending tiles costs) of (rows, inner, columns, seconds)."""

    def spread(tile: float) -> tuple[float, float]:
        """How far the logarithms of all rates are from their mean, and that mean."""
        rates = [math.log(filled(tile, *shape) / seconds) for *shape, seconds in samples]
        mean = sum(rates) / len(rates)
        return sum((rate - mean) ** 2 for rate in rates), mean

    tile = min(TILES, key=lambda each: spread(each)[0])
    return math.exp(spread(tile)[1]), float(tile)


def calibrated_spec(machine: Calibration, job: Job) -> tuple[HardwareSpec, dict[str, float]]:
    """What one of the job's ranks has of this machine, and the constants of step_time.py there."""
    found, slower = machine.nearest(job.ranks)
    of_form, form, width = found[job.format], job.format, job.inner_bytes
    rate, tile = fit_products(of_form["products"])
    bandwidth = found["copy"] / slower / MEMORY_REACH
    device = HardwareSpec(
        name=NAME,
        family=NAME,
        peaks={form: rate / slower},
        reach={form: 1.0},
        memory_bytes=machine.memory_bytes // job.ranks,
        bandwidth=bandwidth,
        link=math.inf,
        bus=math.inf,
        per_node=job.ranks,
        network=math.inf,
        ranks_per_device=1,
        host_speed=1.0,
        source=f"measured on {machine.host}, {machine.date}, {machine.cores} cores, load {machine.load:g}",
    )
    # Forward and backward of causal attention with 8 heads of 64, as step_time.py counts it, at the rate of products.
    cost = [
        (1 / tokens, seconds * rate / (2 * sequences * tokens * tokens * 512 * (1 + FLASH_BACKWARD)))
        for sequences, tokens, seconds in of_form["attention"]
    ]
    slow, each = fit_line(cost)
    if not slow:  # noise: no length is faster than another
        slow, each = sum(factor for _, factor in cost) / len(cost), 0.0
    head = load_constants()["tile.head"]
    share = (1 + head / 64) / slow
    # Tokens of the pieces cost (10 h + 3 ffn + 4 h) elements, two and a half times.
    per_token = fit_line(of_form["pieces"])[1]
    passes = per_token * found["copy"] / ((10 + 3 * 4 + 4) * WIDTH * width * 2.5)
    tokens, inner, vocabulary, seconds = of_form["loss"]
    seconds -= 3 * filled(tile, tokens, inner, vocabulary) / rate  # the head's own products
    constants = {
        **load_constants(),
        **FREE,
        **{name: 0.0 for name in load_constants() if name.startswith("exposed.")},
        f"matmul.{NAME}.{form}": 1.0,
        "tile.bf16": tile,
        f"attention.{NAME}.flash": share,
        "tile.attention": each / slow,
        "passes.eager": passes,
        "passes.loss": max(0.0, seconds) * found["copy"] / (tokens * vocabulary * LOSS_BYTES),
    }
    return device, constants


def local_step_time(plan: Plan, machine: Calibration) -> StepTime:
    """The forecast of one step of ``plan`` on this machine, all ranks on it."""
    job = job_of_plan(plan)
    found, slower = machine.nearest(job.ranks)
    overhead = _overhead(machine, job)
    device, constants = calibrated_spec(machine, job)
    constants |= {f"gap.{job.program.kernels}": overhead.operation * slower, "launch.step": overhead.step * slower}
    base = step_time(job, device, constants)
    stage = max(range(job.pp), key=lambda each: job.layers_by_stage[each] + (each == job.pp - 1))
    held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
    updated = trained / (job.shard_size if job.zero else 1)
    held = trained if job.lora_parameters else held  # frozen weights are neither cast nor summed
    passed = job.num_microbatches * held * overhead.micro_batch
    if job.exchanges_signs:
        updating = updated * sign_bytes(job.dp) / found["copy"]
    else:
        updating = updated * found["adam"]
    sent = [each for each in step_operations(plan, stage, 0) if each.key.axis != "world"]
    by_axis = _communication(found, sent, plan.exchanges_signs, slower)
    pipelined = base.total - base.optimizer - base.bubble - constants["launch.step"] + passed
    return replace(
        base,
        memory_bound=base.memory_bound + passed * slower,
        optimizer=(updating + held * overhead.parameter) * slower,
        tensor=by_axis["tp"],
        pipeline=by_axis["pp"],
        data_parallel=by_axis["dp"],
        bubble=base.bubble * (1 + by_axis["tp"] / pipelined) if pipelined else 0.0,
    )


@dataclass(frozen=True)
class _Overhead:
    """What a step costs besides its arithmetic."""

    step: float
    """Seconds of each step."""
    operation: float
    """Seconds of each operation of a block."""
    parameter: float
    """Seconds of each parameter that a rank holds in a step: casts, gathering and scattering without a wire."""
    micro_batch: float
    """The same in a micro batch: gradients are added up."""


def _overhead(machine: Calibration, job: Job) -> _Overhead:
    """From the steps of a model that is nothing but overhead, and of one that is all parameters."""
    found, _ = machine.nearest(job.ranks)
    steps = {name: found["steps"][f"{name}, {job.format}"] for name in STEPS}
    ranks = max(count for count in map(int, machine.by_ranks) if machine.by_ranks[str(count)] is found)
    small, large = (tiny_job(job, sizes, ranks) for sizes in (_SMALL, _LARGE))
    layers = small.shape.layers
    per_micro_batch = max(0.0, (steps["small, 4 micro batches"] - steps["small"]) / 3)
    device, constants = calibrated_spec(machine, replace(job, dp=ranks, tp=1, pp=1))
    constants |= {"gap.eager": 0.0, "launch.step": 0.0}

    def work(tiny: Job) -> float:
        return step_time(tiny, device, constants).total - step_time(tiny, device, constants).optimizer

    operation = max(0.0, per_micro_batch - work(small)) / (layers * kernel_count(small))
    wire = found.get("collectives")

    def sent(tiny: Job) -> float:
        """Seconds in which the gradients are scattered and the weights gathered, once."""
        if wire is None:
            return 0.0
        size = tiny.shape.parameters
        sums, gathers = (fit_line(wire[BESIDE][kind]) for kind in ("reduce_scatter", "all_gather"))
        calls = tiny.shape.layers + 1
        return calls * (sums[0] + gathers[0]) + size * (4 * sums[1] + tiny.inner_bytes * gathers[1])

    step = max(0.0, steps["small"] - per_micro_batch - sent(small))
    parameters = large.shape.parameters
    added = (
        (steps["large, 4 micro batches"] - steps["large"]) / 3 - work(large) - layers * operation * kernel_count(large)
    )
    added = max(0.0, added) / parameters
    rest = steps["large"] - step - work(large) - sent(large) - layers * operation * kernel_count(large)
    rest -= parameters * (added + found["adam"] / ranks)
    return _Overhead(step, operation, max(0.0, rest) / parameters, added)


def tiny_job(job: Job, sizes: Mapping[str, int], ranks: int) -> Job:
    """The job of a measured step, with one micro batch of one sequence on each of ``ranks`` data-parallel ranks."""
    hidden = sizes["model.hidden_size"]
    shape = replace(
        job.shape,
        hidden=hidden,
        layers=4,
        heads=2,
        kv_heads=2,
        head_dim=hidden // 2,
        ffn=sizes["model.intermediate_size"],
        vocab=sizes["model.vocab_size"],
        tied=False,
    )
    return Job(
        shape,
        sizes["data.seq_length"],
        1,
        1,
        dp=ranks,
        shard_size=ranks,
        format=job.format,
        state=job.state,
        inner_bytes=job.inner_bytes,
        program=replace(job.program, kernels="eager"),
    )


def _communication(
    found: Mapping[str, Any], operations: Sequence[Operation], signs: bool, slower: float
) -> dict[str, float]:
    """Seconds of what a rank sends in a step, by axis; ``signs`` are sent by the optimizer, which waits for them."""
    seconds = {"tp": 0.0, "pp": 0.0, "dp": 0.0}
    if "collectives" not in found:
        return seconds
    for each in operations:
        kind = each.key.kind
        if kind == "recv":
            continue  # the other end of a send, which takes as long
        how = BESIDE if each.key.axis == "dp" and kind in COLLECTIVES[BESIDE] and not signs else WAITED
        start, unit = fit_line(found["collectives"][how][kind])
        seconds[each.key.axis] += each.calls * (start + each.payload * unit) * slower
    return seconds
