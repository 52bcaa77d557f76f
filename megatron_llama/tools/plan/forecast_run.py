"""Forecast of a command line, as text and JSON: memory, time of a step, goodput, and scaling to more devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_llama.arch.flops import FlopsPerToken, flops_per_token, mfu
from megatron_llama.arch.parameters import parameters
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.plan import Plan, batch_line, resolve
from megatron_llama.plan.forecast_job import Job, job_of_plan
from megatron_llama.plan.memory import USABLE, Footprint, stage_footprints
from megatron_llama.system.tables import GIB, gib, plural, short_count, text_table
from megatron_llama.system.wrapping import wrap_lines
from megatron_llama.tools.cluster_settings import ClusterConfig
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.goodput import Goodput, goodput
from megatron_llama.tools.forecast.hardware import HardwareSpec
from megatron_llama.tools.forecast.step_time import StepTime, load_constants, load_constants_file, step_time
from megatron_llama.tools.forecast.this_machine import Calibration
from megatron_llama.tools.planned_run import read_planned_run
from megatron_llama.topology import Grid

MOST_DEVICES = 16_384


@dataclass(frozen=True)
class ScaledRun:
    """Forecast of the run on another number of devices."""

    devices: int
    global_batch: int
    seconds: float
    tokens_per_second: float
    mfu: float
    """MFU with causal attention."""
    goodput: Goodput


@dataclass(frozen=True)
class Forecast:
    """Forecast of one run."""

    plan: Plan
    cluster: ClusterConfig
    device: HardwareSpec
    """Share of a device that one rank uses."""
    devices: int
    job: Job
    stages: tuple[Footprint, ...]
    time: StepTime
    flops: FlopsPerToken
    goodput: Goodput
    scaling: tuple[ScaledRun, ...]
    hardware: str | None = None
    """Name of the hardware for titles; default: the device."""
    note: str | None = None
    """How the hardware was chosen, unless the user named it."""

    @property
    def fits(self) -> bool:
        """Whether each stage fits the usable memory of its device."""
        return all(each.total <= USABLE * self.device.memory_bytes for each in self.stages)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the job."""
        return self.job.tokens_per_step / self.time.total

    @property
    def tokens(self) -> float:
        """Tokens of the whole run."""
        return self.cluster.tokens or self.plan.batches.after(self.plan.config.trainer.steps).tokens

    @property
    def days(self) -> float:
        """Duration of the run in days, with failures and checkpoints."""
        return self.tokens / self.tokens_per_second / 86400 / max(self.goodput.useful, 1e-9)

    @property
    def cost(self) -> float | None:
        """Cost of the run, in the currency of ``cluster.price``; None without a price."""
        return None if self.cluster.price is None else self.days * 24 * self.devices * self.cluster.price

    def utilization(self, flops: float) -> float:
        """Return the MFU for ``flops`` per token, relative to the peak of all ranks."""
        return mfu(flops, self.tokens_per_second, self.device.peak(self.job.format), self.job.ranks)


def forecast_run(overrides: Sequence[str]) -> Forecast:
    """Return the forecast of a command line. Raises ConfigError with all problems of the settings."""
    run = read_planned_run(overrides, always_named=True)
    config, spec = run.world.config, run.hardware.spec
    if spec is None:
        cluster = replace(run.cluster, device=this_machine.NAME)
        return forecast_local(config, cluster, _load_calibration(cluster))
    plan = resolve(config, run.world.size, exists=lambda path: True)
    forecast = forecast_plan(plan, run.cluster, spec.per_rank(), run.devices)
    return replace(forecast, hardware=run.hardware.title, note=run.hardware.note)


def _load_calibration(cluster: ClusterConfig) -> Calibration:
    """Load this machine's calibration. Raises ConfigError if it is missing, or for several machines."""
    problems, calibration = [], None
    if (cluster.nodes or 1) > 1:
        rule = "cluster.device=cpu plans for this machine alone"
        problems.append(Problem("cluster.nodes", cluster.nodes, rule, "write cluster.nodes=1"))
    try:
        calibration = this_machine.load_calibration()
    except this_machine.NotCalibrated:
        advice = "run python scripts/plan.py --calibrate (1 to 2 minutes)"
        problems.append(Problem("cluster.device", cluster.device, "this machine is not calibrated", advice))
    if problems or calibration is None:
        raise ConfigError(problems)
    return calibration


def forecast_local(config: Config, cluster: ClusterConfig, calibration: Calibration) -> Forecast:
    """Return the forecast of a run with all ranks on this machine; raise ConfigError for an invalid config."""
    plan = resolve(config, Grid.of(config.trainer).world_size, exists=lambda path: True)
    job = job_of_plan(plan)
    device, _ = this_machine.calibrated_spec(calibration, job)
    time = this_machine.local_step_time(plan, calibration)
    return _forecast(plan, replace(cluster, nodes=1), device, 1, time, [(job, time.total)])


def forecast_plan(plan: Plan, cluster: ClusterConfig, device: HardwareSpec, count: int) -> Forecast:
    """Return the forecast of ``plan`` on ``count`` devices; ``device`` is the share that one rank uses."""
    job = job_of_plan(plan)
    multiples = (1 << power for power in range(MOST_DEVICES.bit_length()))
    larger = [_with_more_ranks(job, times) for times in multiples if times == 1 or times * count <= MOST_DEVICES]
    scaled = [(each, step_time(each, device, load_constants()).total) for each in larger]
    return _forecast(plan, cluster, device, count, step_time(job, device, load_constants()), scaled)


def _forecast(
    plan: Plan,
    cluster: ClusterConfig,
    device: HardwareSpec,
    count: int,
    time: StepTime,
    scaled: Sequence[tuple[Job, float]],
) -> Forecast:
    """Return the forecast from the ``time`` of a step, and from (job, seconds of a step) on 1, 2, 4, ... devices."""
    job, scaling = job_of_plan(plan), list[ScaledRun]()
    flops = flops_per_token(plan.model, job.document or job.seq, plan.config.finetune)
    for number, (larger, seconds) in enumerate(scaled):
        rate = larger.tokens_per_step / seconds
        used = mfu(flops.causal, rate, device.peak(job.format), larger.ranks)
        run_goodput = _goodput(larger, device, cluster, count << number)
        scaling.append(ScaledRun(count << number, larger.global_batch, seconds, rate, used, run_goodput))
    stages = tuple(stage_footprints(plan))
    return Forecast(plan, cluster, device, count, job, stages, time, flops, scaling[0].goodput, tuple(scaling))


def _with_more_ranks(job: Job, times: int) -> Job:
    """Return the job with ``times`` as many data-parallel ranks and the same work per rank."""
    sharded = job.shard_size * times if job.shard_size == job.dp * job.cp and job.zero else job.shard_size
    return replace(job, dp=job.dp * times, shard_size=sharded)


def _goodput(job: Job, device: HardwareSpec, cluster: ClusterConfig, count: int) -> Goodput:
    """Return the goodput at the optimal checkpoint interval."""
    checkpoint_bytes = parameters(job.model) * (job.state.weight + job.state.master + job.state.moments)
    nodes = max(1, count // device.per_node)
    return goodput(
        count,
        checkpoint_bytes / count,
        failure_hours=cluster.failure_hours,
        restart_seconds=60 * cluster.restart_minutes,
        write_seconds=checkpoint_bytes / nodes / (1e9 * cluster.storage_gbps),
    )


# The forecast as text and as JSON.
MOST_STAGES = 16
PARTS = {
    "matmul": "GEMMs of the blocks",
    "head": "output head and loss",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "launch": "kernel launches and host",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "pipeline": "messages between stages",
    "bubble": "pipeline bubble",
    "data_parallel": "data parallelism",
    "offload": "offloading",
    "optimizer": "optimizer",
    "waiting": "waiting for the slowest node",
}
"""Labels of the fields of ``StepTime``."""


def report_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the lines of the report."""
    job, plan, cluster = forecast.job, forecast.plan, forecast.cluster
    nodes = f"{cluster.nodes} {plural(cluster.nodes or 1, 'node')}"
    ranks = f"{job.ranks} {plural(job.ranks, 'rank')}"
    if forecast.note is not None:
        yield from (forecast.note, "")
    yield f"{plan.model.name} on {forecast.devices} x {cluster.device} ({nodes}), {ranks}"
    virtual, context = f" (x {job.vpp} virtual)" if job.vpp > 1 else "", f" x cp {job.cp}" if job.cp > 1 else ""
    grid = f"tp {job.tp} x pp {job.pp}{virtual}{context} x dp {job.dp}, zero {job.zero}"
    batches = "batch" if job.num_microbatches == 1 else "batches"
    micro = f"{job.num_microbatches:,} micro {batches} of {job.micro_batch}"
    yield from wrap_lines(f"{grid}{', sp' if job.sp else ''}, recompute {job.recompute}, {micro}", rest="  ")
    yield batch_line(plan.config, forecast.hardware)
    for section in (_memory, _time, _run, _scaling):
        yield from ("", *section(forecast))
    yield from ("", "assumptions")
    for line in (*assumptions(forecast), *plan.notes):
        yield from wrap_lines(line, "  ", "    ")


def _memory(forecast: Forecast) -> Iterator[str]:
    """Yield one row per stage, then the activations of the stage with the highest peak."""
    usable, stages = USABLE * forecast.device.memory_bytes, forecast.stages
    head = ("", "weights", "grads", "optimizer", "activations", "logits", "buffers", "peak", "fits")
    rows: list[tuple[str, ...]] = [head]
    order = list(range(len(stages)))
    shown = order if len(order) <= MOST_STAGES else [*order[: MOST_STAGES - 1], order[-1]]
    for stage in shown:
        each = stages[stage]
        states = (each.weights, each.gradients, each.optimizer)
        sizes = (*states, each.activation_bytes, each.logits, each.buffers, each.total)
        fits = "yes" if each.total <= usable else "NO"
        rows.append((f"stage {stage}", *(f"{size / GIB:.2f}" for size in sizes), fits))
    yield "memory per rank, GiB"
    yield from text_table(rows, left=1)
    heaviest = max(stages, key=lambda each: each.total)
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in heaviest.activations.items() if size)
    activations = f"activations of stage {stages.index(heaviest)}: {kinds or 'none'}"
    yield from wrap_lines(activations, "  ", "    ")
    yield f"  device memory per rank: {gib(forecast.device.memory_bytes)}, {USABLE:.0%} usable"
    if heaviest.total > usable:
        yield f"  DOES NOT FIT: stage {stages.index(heaviest)} needs {gib(heaviest.total)}"


def _time(forecast: Forecast) -> Iterator[str]:
    """Yield one row per component, largest first."""
    total = forecast.time.total
    parts = sorted(forecast.time.parts().items(), key=lambda part: -part[1])
    rows = [("time of a step", "s", "share")]
    rows += [(PARTS[name], f"{part:.4g}", f"{part / total:.1%}") for name, part in parts if part]
    rows.append(("data loading", "0", "prefetched"))
    rows.append(("total", f"{total:.4g}", ""))
    yield from text_table(rows, left=1)


def _run(forecast: Forecast) -> Iterator[str]:
    rate, goodput = forecast.tokens_per_second, forecast.goodput
    peak = f"{forecast.job.ranks} x {forecast.device.peak(forecast.job.format) / 1e12:,.0f} TFLOP/s"
    rows = [
        ("tokens/s", f"{rate:,.0f}; {rate / forecast.devices:,.0f} per device"),
        ("MFU", f"{forecast.utilization(forecast.flops.causal):.2%} with causal attention"),
        (
            "",
            f"{forecast.utilization(forecast.flops.full):.2%} with full attention, of {peak} in {forecast.job.format}",
        ),
        ("goodput", f"{goodput.useful:.2%}"),
        ("", f"{goodput.lost:.2%} lost to {goodput.failures_a_day:.3g} failures per day"),
        ("", f"{goodput.waiting:.2%} lost to a checkpoint every {goodput.interval / 60:,.0f} min"),
        ("run", f"{short_count(forecast.tokens)} tokens in {forecast.days:,.3g} days"),
    ]
    if forecast.cost is not None:
        rows.append(("cost", f"{forecast.cost:,.0f} at {forecast.cluster.price:g} per device and hour"))
    yield from text_table(rows)


def _scaling(forecast: Forecast) -> Iterator[str]:
    """Yield one row per number of devices, with the same work per rank and more data-parallel ranks."""
    first = forecast.scaling[0]
    rows = [("devices", "batch", "s/step", "tokens/s", "MFU", "scaling", "goodput", "net tokens/s")]
    for each in forecast.scaling:
        scaling = each.tokens_per_second / first.tokens_per_second / (each.devices / first.devices)
        counts = (f"{each.devices:,}", f"{each.global_batch:,}", f"{each.seconds:.4g}")
        shares = (f"{each.mfu:.1%}", f"{scaling:.1%}", f"{each.goodput.useful:.1%}")
        net = each.tokens_per_second * each.goodput.useful
        rows.append((*counts, f"{each.tokens_per_second:,.0f}", *shares, f"{net:,.0f}"))
    yield from text_table(rows, left=0)


def assumptions(forecast: Forecast) -> Iterator[str]:
    """Yield the sources and assumptions of the numbers."""
    device, cluster, constants = forecast.device, forecast.cluster, load_constants_file()
    yield f"device: {device.source}"
    if device.name == this_machine.NAME:
        yield "nothing overlaps: ranks share the cores, and collectives are blocking"
        return
    yield (
        f"network: {device.per_node} ranks per node on links of {device.link / 1e9:,.0f} GB/s; "
        f"{device.network / 1e9:,.4g} GB/s per rank between nodes"
    )
    if f"matmul.{device.family}.{forecast.job.format}" in constants["constants"]:
        yield f"speed: constants of {constants['date']}, fitted to {constants['data']}"
    else:
        yield f"speed: GEMM benchmarks; no published runs for {device.name} in {forecast.job.format}"
    yield "attention: as fast as torch's FlashAttention 2"
    yield (
        f"failures: one per device and {cluster.failure_hours:,.0f} h; a restart takes {cluster.restart_minutes:g} min"
    )
    yield f"checkpoints: {cluster.storage_gbps:g} GB/s per node, written during training, at the optimal interval"
    yield "no other jobs on the network; data loading is not a bottleneck"


def report_json(forecast: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON."""
    return {
        "hardware": forecast.cluster.device,
        "device": forecast.plan.config.device.name,
        "global_batch_size": forecast.plan.config.trainer.global_batch_size,
        "seq_length": forecast.plan.config.data.length,
        "precision": forecast.plan.config.trainer.precision,
        "fits": forecast.fits,
        "devices": forecast.devices,
        "ranks": forecast.job.ranks,
        "memory_bytes": {
            "device": forecast.device.memory_bytes,
            "usable_share": USABLE,
            "stages": [
                {**each.parts(), "activations_by_kind": dict(each.activations), "peak": each.total}
                for each in forecast.stages
            ],
        },
        "step_time_s": {**forecast.time.parts(), "total": forecast.time.total},
        "tokens_per_second": forecast.tokens_per_second,
        "mfu": {
            "causal": forecast.utilization(forecast.flops.causal),
            "full": forecast.utilization(forecast.flops.full),
        },
        "goodput": asdict(forecast.goodput),
        "tokens": forecast.tokens,
        "days": forecast.days,
        "cost": forecast.cost,
        "scaling": [asdict(each) for each in forecast.scaling],
        "assumed": list(assumptions(forecast)),
    }
