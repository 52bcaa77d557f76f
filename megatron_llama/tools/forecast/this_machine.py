"""Forecasts for this machine's CPU, from its calibration.

``scripts/plan.py --calibrate`` measures the machine in one or two minutes (tools/plan/measure_machine.py) and writes
one calibration file per host. On a CPU nothing overlaps: ranks share the cores, and collectives are blocking. So a
step is the sum of its components, and its communication the sum over the operations of tools/forecast/traffic.py.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.arch.parameters import parameters
from megatron_llama.plan.forecast_job import Job, job_of_plan
from megatron_llama.plan.plan import Plan
from megatron_llama.system.files import user_cache
from megatron_llama.tools.forecast import step_time as forecast
from megatron_llama.tools.forecast.hardware import HardwareSpec
from megatron_llama.tools.forecast.traffic import Operation, step_operations
from megatron_llama.topology import AXIS_NAMES

NAME = "cpu"
FORMS = ("fp32", "bf16")
WIDTH = 512
"""Hidden size of the measured elementwise operations, and width of their heads. The FFN has four times the width."""
RANKS = (1, 2, 4)
"""Numbers of ranks that are measured. Other numbers use the nearest one."""
_SMALL = {"model.hidden_size": 64, "model.intermediate_size": 128, "model.vocab_size": 256, "data.seq_length": 32}
_LARGE = {"model.hidden_size": 256, "model.intermediate_size": 1024, "model.vocab_size": 33_000, "data.seq_length": 16}
STEPS: dict[str, tuple[Mapping[str, int], int]] = {
    "small": (_SMALL, 1),
    "small, 4 micro batches": (_SMALL, 4),
    "large": (_LARGE, 1),
    "large, 4 micro batches": (_LARGE, 4),
}
"""(model, micro batches) of the timed steps. The small model measures overhead, the large one parameters."""
FREE = {"host.operation": 0.0, "latency.node": 0.0, "latency.network": 0.0, "waiting": 0.0}
"""Constants that are zero on a CPU, or that ``_communication`` counts."""
BLOCKING, OVERLAPPED = "waited for", "beside computing"  # keys of calibration files
COLLECTIVES = {
    BLOCKING: ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"),
    OVERLAPPED: ("all_reduce", "all_gather", "reduce_scatter"),
}
"""Measured collectives. Tensor-parallel ones are blocking; data-parallel ones overlap with computing."""
TILES = range(0, 400, 4)  # tile sizes that ``fit_gemms`` tries
VERSION = 2
"""Version of calibration files. Files of other versions are rejected."""


class NotCalibrated(LookupError):
    """This host has no readable calibration file."""


@dataclass(frozen=True)
class Calibration:
    """Contents of a calibration file; field names are its JSON keys."""

    version: int
    host: str
    date: str
    cores: int
    memory_bytes: int
    torch: str
    load: float
    """Load average before the measurement. With other processes running, the measured rates are too low."""
    by_ranks: Mapping[str, Any]
    """Measurements by the number of ranks."""

    def nearest(self, ranks: int) -> tuple[Any, float]:
        """Return the measurements of the nearest number of ranks, and the slowdown of ``ranks`` relative to it."""
        counts = sorted(map(int, self.by_ranks))
        count = max((each for each in counts if each <= ranks), default=counts[0])
        return self.by_ranks[str(count)], max(1.0, ranks / max(count, self.cores)) if ranks > count else 1.0


def calibration_path() -> Path:
    """Return the path of this host's calibration file."""
    return Path(user_cache("machines")) / f"{socket.gethostname()}.json"


def load_calibration(path: Path | None = None) -> Calibration:
    """Return the calibration of this host.

    Raises NotCalibrated if the file is missing, unreadable or of another version.
    """
    try:
        calibration = Calibration(**json.loads((path or calibration_path()).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise NotCalibrated(str(error)) from error
    if calibration.version != VERSION:
        raise NotCalibrated("the calibration file is of another version")
    return calibration


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = start + slope * units to (units, seconds), by least relative squares. Neither is negative."""
    weight = sum(1 / seconds**2 for _, seconds in samples)
    units = sum(x / seconds**2 for x, seconds in samples)
    squares = sum((x / seconds) ** 2 for x, seconds in samples)
    times = sum(1 / seconds for _, seconds in samples)
    both = sum(x / seconds for x, seconds in samples)
    slope = max(0.0, (weight * both - units * times) / (weight * squares - units**2))
    start = (times - slope * units) / weight
    return (start, slope) if start >= 0 else (0.0, both / squares)


def filled(tile: float, rows: float, inner: float, columns: float) -> float:
    """Return the FLOPs of a GEMM, including those lost in partial tiles."""
    return 2 * rows * inner * columns * (1 + tile / rows) * (1 + tile / inner) * (1 + tile / columns)


def fit_gemms(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit (FLOP/s of large GEMMs, tile size) to samples of (rows, inner, columns, seconds)."""

    def spread(tile: float) -> tuple[float, float]:
        """Return the squared deviations of the log rates from their mean, and the mean."""
        rates = [math.log(filled(tile, *shape) / seconds) for *shape, seconds in samples]
        mean = sum(rates) / len(rates)
        return sum((rate - mean) ** 2 for rate in rates), mean

    tile = min(TILES, key=lambda each: spread(each)[0])
    return math.exp(spread(tile)[1]), float(tile)


def _format(job: Job) -> str:
    """Return the format of matmuls on a CPU, which multiplies float8 operands in fp32."""
    return "fp32" if job.format in forecast.LOW_PRECISION else job.format


def calibrated_spec(calibration: Calibration, job: Job) -> tuple[HardwareSpec, dict[str, float]]:
    """Return the share of this machine that one rank of ``job`` uses, and its constants for step_time.py."""
    measured, slower = calibration.nearest(job.ranks)
    form, width = _format(job), job.inner_bytes
    of_form = measured[form]
    rate, tile = fit_gemms(of_form["products"])
    bandwidth = measured["copy"] / slower / forecast.MEMORY_REACH
    machine = f"{calibration.host}, {calibration.date}, {calibration.cores} cores, load {calibration.load:g}"
    device = HardwareSpec(
        name=NAME,
        family=NAME,
        peaks={form: rate / slower},
        reach={form: 1.0},
        memory_bytes=calibration.memory_bytes // job.ranks,
        bandwidth=bandwidth,
        per_node=job.ranks,
        source=f"measured on {machine}",
    )
    # Forward and backward of causal attention with 8 heads of size 64, relative to GEMMs of its FLOPs.
    cost = [
        (1 / tokens, seconds * rate / (2 * sequences * tokens * tokens * 512 * (1 + forecast.FLASH_BACKWARD)))
        for sequences, tokens, seconds in of_form["attention"]
    ]
    slow, each = fit_line(cost)
    if not slow:  # noise: the length has no effect
        slow, each = sum(factor for _, factor in cost) / len(cost), 0.0
    head = forecast.load_constants()["tile.head"]
    share = (1 + head / 64) / slow
    # The elementwise operations of a token move (10 h + 3 ffn + 4 h) elements, 2.5 times for forward and backward.
    passes = fit_line(of_form["pieces"])[1] * measured["copy"] / ((10 + 3 * 4 + 4) * WIDTH * width * 2.5)
    tokens, inner, vocabulary, seconds = of_form["loss"]
    seconds -= 3 * filled(tile, tokens, inner, vocabulary) / rate  # the head's GEMMs
    constants = {
        **forecast.load_constants(),
        **FREE,
        **{name: 0.0 for name in forecast.load_constants() if name.startswith("exposed.")},
        f"matmul.{NAME}.{form}": 1.0,
        "tile.bf16": tile,
        f"attention.{NAME}.flash": share,
        "tile.attention": each / slow,
        "passes.eager": passes,
        "passes.loss": max(0.0, seconds) * measured["copy"] / (tokens * vocabulary * forecast.LOSS_BYTES),
    }
    return device, constants


def local_step_time(plan: Plan, calibration: Calibration) -> forecast.StepTime:
    """Return the forecast of one step of ``plan`` with all ranks on this machine."""
    job = job_of_plan(plan)
    measured, slower = calibration.nearest(job.ranks)
    overhead = _overhead(calibration, job)
    device, constants = calibrated_spec(calibration, job)
    constants |= {f"gap.{job.kernels}": overhead.operation * slower, "launch.step": overhead.step * slower}
    base = forecast.step_time(job, device, constants)
    stage = max(range(job.pp), key=lambda each: job.layers_by_stage[each] + (each == job.pp - 1))
    held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
    updated = trained / (job.shard_size if job.zero else 1)
    held = trained if job.lora_parameters else held  # frozen weights are neither cast nor summed
    passed = job.num_microbatches * held * overhead.micro_batch
    if job.exchanges_signs:
        updating = updated * forecast.sign_bytes(job.dp * job.cp) / measured["copy"]
    else:
        updating = updated * measured["adam"] + forecast.orthogonalization(job, device) / slower
    sent = [each for each in step_operations(plan, stage, 0) if each.axis != "world"]
    by_axis = _communication(measured, sent, plan.exchanges_signs, slower)
    pipelined = base.total - base.optimizer - base.bubble - constants["launch.step"] + passed
    return replace(
        base,
        memory_bound=base.memory_bound + passed * slower,
        optimizer=(updating + held * overhead.parameter) * slower,
        tensor=by_axis["tp"],
        context=by_axis["cp"],
        pipeline=by_axis["pp"],
        data_parallel=by_axis["dp"],
        bubble=base.bubble * (1 + by_axis["tp"] / pipelined) if pipelined else 0.0,
    )


@dataclass(frozen=True)
class _Overhead:
    """Costs of a step other than arithmetic."""

    step: float
    """Seconds per step."""
    operation: float
    """Seconds per kernel of a block."""
    parameter: float
    """Seconds per parameter of the rank and step: casts, and local copies of gathers and reductions."""
    micro_batch: float
    """Seconds per parameter and micro batch: accumulation of gradients."""


def _overhead(calibration: Calibration, job: Job) -> _Overhead:
    """Derive the overhead from the timed steps of the small and the large model."""
    measured, _ = calibration.nearest(job.ranks)
    steps = {name: measured["steps"][f"{name}, {_format(job)}"] for name in STEPS}
    ranks = max(count for count in map(int, calibration.by_ranks) if calibration.by_ranks[str(count)] is measured)
    small, large = (tiny_job(job, sizes, ranks) for sizes in (_SMALL, _LARGE))
    layers = small.model.num_hidden_layers
    per_micro_batch = max(0.0, (steps["small, 4 micro batches"] - steps["small"]) / 3)
    device, constants = calibrated_spec(calibration, replace(job, dp=ranks, tp=1, pp=1))
    constants |= {"gap.eager": 0.0, "launch.step": 0.0}

    def work(tiny: Job) -> float:
        return forecast.step_time(tiny, device, constants).total - forecast.step_time(tiny, device, constants).optimizer

    operation = max(0.0, per_micro_batch - work(small)) / (layers * forecast.kernel_count(small))
    collectives = measured.get("collectives")

    def sent(tiny: Job) -> float:
        """Return the seconds of one reduce-scatter of the gradients and one all-gather of the weights."""
        if collectives is None:
            return 0.0
        size = parameters(tiny.model)
        sums, gathers = (fit_line(collectives[OVERLAPPED][kind]) for kind in ("reduce_scatter", "all_gather"))
        calls = tiny.model.num_hidden_layers + 1
        return calls * (sums[0] + gathers[0]) + size * (4 * sums[1] + tiny.inner_bytes * gathers[1])

    step = max(0.0, steps["small"] - per_micro_batch - sent(small))
    count = parameters(large.model)
    computing = work(large) + layers * operation * forecast.kernel_count(large)
    added = max(0.0, (steps["large, 4 micro batches"] - steps["large"]) / 3 - computing) / count
    rest = steps["large"] - step - computing - sent(large)
    rest -= count * (added + measured["adam"] / ranks)
    return _Overhead(step, operation, max(0.0, rest) / count, added)


def tiny_job(job: Job, sizes: Mapping[str, int], ranks: int) -> Job:
    """Return the job of a timed step: one micro batch of one sequence on each of ``ranks`` data-parallel ranks."""
    hidden = sizes["model.hidden_size"]
    model = replace(
        job.model,
        hidden_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=hidden // 2,
        intermediate_size=sizes["model.intermediate_size"],
        vocab_size=sizes["model.vocab_size"],
        tie_word_embeddings=False,
    )
    return Job(
        model,
        sizes["data.seq_length"],
        1,
        1,
        dp=ranks,
        shard_size=ranks,
        format=_format(job),
        state=job.state,
        inner_bytes=job.inner_bytes,
    )


def _communication(
    measured: Mapping[str, Any], operations: Sequence[Operation], signs: bool, slower: float
) -> dict[str, float]:
    """Return the seconds of communication in a step by axis. The exchange of ``signs`` (1-bit Adam) is blocking."""
    seconds = dict.fromkeys(AXIS_NAMES, 0.0)
    if "collectives" not in measured:
        return seconds
    for each in operations:
        kind = each.kind
        if kind == "recv":
            continue  # counted by the matching send
        overlaps = each.axis == "dp" and kind in COLLECTIVES[OVERLAPPED] and not signs
        mode = OVERLAPPED if overlaps else BLOCKING
        start, unit = fit_line(measured["collectives"][mode][kind])
        seconds[each.axis] += each.calls * (start + each.payload * unit) * slower
    return seconds
