"""Forecast of a command line: memory, time of a step, goodput, and scaling to more devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_llama.arch.flops import FlopsPerToken, flops_per_token, mfu
from megatron_llama.arch.shapes import parameters
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.job import Job, job_of_plan
from megatron_llama.plan.memory import USABLE, Footprint, stage_footprints
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.hardware import HardwareSpec
from megatron_llama.tools.forecast.step_time import Goodput, StepTime, goodput, load_constants, step_time
from megatron_llama.tools.forecast.this_machine import Calibration
from megatron_llama.tools.planned_run import read_planned_run
from megatron_llama.tools.settings import ClusterConfig
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
    ranks = Grid.of(config.trainer).world_size
    plan = resolve(config, ranks, exists=lambda path: True)
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
