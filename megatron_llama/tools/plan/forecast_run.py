"""From a command line to everything that is forecast of a run: memory, a step's time, and the same on more devices."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_llama import cli
from megatron_llama.arch.flops import FlopsPerToken, flops_per_token, mfu
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.problems import closest_match
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.job import Job, job_of_plan
from megatron_llama.plan.memory import Footprint, stage_footprints
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices, find_device
from megatron_llama.tools.forecast.step_time import Goodput, StepTime, goodput, load_constants, step_time
from megatron_llama.tools.forecast.this_machine import Calibration
from megatron_llama.tools.settings import ClusterConfig, load_cluster
from megatron_llama.topology import Grid

MOST_DEVICES = 16_384


@dataclass(frozen=True)
class ScaledRun:
    """The run on another number of devices."""

    devices: int
    global_batch: int
    seconds: float
    tokens_per_second: float
    mfu: float
    """Causal."""
    goodput: Goodput


@dataclass(frozen=True)
class Forecast:
    """What is forecast of one run."""

    plan: Plan
    cluster: ClusterConfig
    device: HardwareSpec
    """What one rank has."""
    devices: int
    job: Job
    stages: tuple[Footprint, ...]
    time: StepTime
    flops: FlopsPerToken
    goodput: Goodput
    scaling: tuple[ScaledRun, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.job.tokens_per_step / self.time.total

    @property
    def tokens(self) -> float:
        """Tokens of the whole run."""
        return self.cluster.tokens or self.plan.batches.after(self.plan.config.trainer.steps).tokens

    @property
    def days(self) -> float:
        """Of the whole run, with failures and checkpoints."""
        return self.tokens / self.tokens_per_second / 86400 / max(self.goodput.useful, 1e-9)

    @property
    def cost(self) -> float | None:
        """Of the whole run, in the price's currency."""
        return None if self.cluster.price is None else self.days * 24 * self.devices * self.cluster.price

    def utilisation(self, flops: float) -> float:
        """MFU by ``flops`` a token, over the peak of all ranks."""
        return mfu(flops, self.tokens_per_second, self.device.peak(self.job.format), self.job.ranks)


def forecast_run(overrides: Sequence[str]) -> Forecast:
    """The forecast of a command line. Raises ConfigError with everything that is wrong with it."""
    cluster, rest, problems = load_cluster(overrides)
    here = cluster.device == this_machine.NAME
    whole = None if here else find_device(cluster.device)
    machine = _machine(cluster, problems) if here else None
    if whole is None and not here:
        names = list(devices())
        guess = closest_match(cluster.device, names)
        advice = f"write cluster.device={guess}" if guess else f"write one of {', '.join(names)}"
        problems.append(Problem("cluster.device", cluster.device, "is not in the hardware table", advice))
    try:
        config = cli.parse_overrides(rest)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if machine is not None:
        return forecast_here(config, cluster, machine)
    assert whole is not None, "or there is a problem"
    if config.device.name == "auto":
        config.device.name = whole.kind
    if cluster.devices_per_node:
        whole = replace(whole, per_node=cluster.devices_per_node)
    parts = whole.ranks_per_device
    wanted = Grid.of(config.trainer).world_size
    nodes = cluster.nodes or -(-wanted // (whole.per_node * parts))
    count = nodes * whole.per_node if cluster.nodes else -(-wanted // parts)
    plan = resolve(config, count * parts if cluster.nodes else wanted, exists=lambda path: True)
    return forecast_plan(plan, replace(cluster, nodes=nodes), whole.per_rank(), count)


def _machine(cluster: ClusterConfig, problems: list[Problem]) -> Calibration | None:
    """What was measured of this machine; what is missing or does not go with it is added to ``problems``."""
    if (cluster.nodes or 1) > 1:
        rule = "a forecast for this machine is of this machine alone"
        problems.append(Problem("cluster.nodes", cluster.nodes, rule, "write cluster.nodes=1"))
    try:
        return this_machine.load_calibration()
    except this_machine.NotCalibrated:
        rule = "this machine has not been measured"
        advice = "run python scripts/plan.py --calibrate, which takes a minute or two"
        problems.append(Problem("cluster.device", cluster.device, rule, advice))
        return None


def forecast_here(config: Config, cluster: ClusterConfig, machine: Calibration) -> Forecast:
    """The forecast of a run on this machine, all ranks on it. Raises ConfigError."""
    ranks = Grid.of(config.trainer).world_size
    plan = resolve(config, ranks, exists=lambda path: True)
    job = job_of_plan(plan)
    device, _ = this_machine.calibrated_spec(machine, job)
    time = this_machine.local_step_time(plan, machine)
    flops = flops_per_token(plan.model, job.seq, plan.config.finetune)
    rate = job.tokens_per_step / time.total
    kept = _goodput(job, device, cluster, 1)
    used = mfu(flops.causal, rate, device.peak(job.format), ranks)
    alone = ScaledRun(1, job.global_batch, time.total, rate, used, kept)
    stages = tuple(stage_footprints(plan))
    return Forecast(plan, replace(cluster, nodes=1), device, 1, job, stages, time, flops, kept, (alone,))


def forecast_plan(plan: Plan, cluster: ClusterConfig, device: HardwareSpec, count: int) -> Forecast:
    """The forecast of ``plan`` on ``count`` devices, of which each rank has ``device``."""
    job = job_of_plan(plan)
    stages = tuple(stage_footprints(plan))
    time = step_time(job, device, load_constants())
    flops = flops_per_token(plan.model, job.document or job.seq, plan.config.finetune)
    scaling = tuple(_scaled(job, times, device, cluster, flops, count) for times in _multiples(count))
    return Forecast(
        plan, cluster, device, count, job, stages, time, flops, _goodput(job, device, cluster, count), scaling
    )


def _multiples(count: int) -> list[int]:
    """1, 2, 4, ... times as many devices, up to 16,384."""
    found, times = [], 1
    while times == 1 or times * count <= MOST_DEVICES:
        found.append(times)
        times *= 2
    return found


def _scaled(
    job: Job, times: int, device: HardwareSpec, cluster: ClusterConfig, flops: FlopsPerToken, count: int
) -> ScaledRun:
    """The job with ``times`` as many data-parallel ranks, each with the same work."""
    sharded = job.shard_size * times if job.shard_size == job.dp and job.zero else job.shard_size
    larger = replace(job, dp=job.dp * times, shard_size=sharded)
    seconds = step_time(larger, device, load_constants()).total
    rate = larger.tokens_per_step / seconds
    used = mfu(flops.causal, rate, device.peak(job.format), larger.ranks)
    kept = _goodput(larger, device, cluster, count * times)
    return ScaledRun(count * times, larger.global_batch, seconds, rate, used, kept)


def _goodput(job: Job, device: HardwareSpec, cluster: ClusterConfig, count: int) -> Goodput:
    """With checkpoints as often as is best."""
    whole = job.shape.parameters * (job.state.weight + job.state.master + job.state.moments)
    nodes = max(1, count // device.per_node)
    return goodput(
        count,
        whole / count,
        failure_hours=cluster.failure_hours,
        restart_seconds=60 * cluster.restart_minutes,
        write_seconds=whole / nodes / (1e9 * cluster.storage_gbps),
    )


# Sweeps over layouts on one machine, as vTrain publishes them, as rows of published runs.
#
# The columns are GPUs, global batch, micro batch, hidden size, attention heads, # layers, sequence length, tensor
# parallelism, data parallelism, pipeline parallelism and iteration time (ms): GPT models trained by
# Megatron-DeepSpeed in
# 16 bits on the eight A100 of a node (VIA-Research/vTrain). What such a file does not say is filled in here.


TIME = "iteration time (ms)"
CONFIDENCE = "sweep"
"""Many rows that are alike: a fit counts each one little."""
COLUMNS = {
    "n_devices": "GPUs",
    "global_batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "kv_heads": "attention heads",
    "layers": "# layers",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
UNSAID = {
    "source": "VIA-Research/vTrain, one node",
    "model": "gpt",
    "arch": "GPT",
    "ffn_kind": "gelu",
    "vocab": "51200",
    "tied": "1",
    "device": "A100-40GB-SXM",
    "sharding": "none",
    "sp": "no",
    # The simulator's own settings say otherwise. But with 4/3 of the work, the longest of these runs would compute
    # their products at more than the chip's peak, after what scores and norms take of the memory's bandwidth.
    "recompute": "none",
    "precision": "fp16 mixed",
    "framework": "Megatron-DeepSpeed",
    "confidence": CONFIDENCE,
}


def is_sweep(rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether a table is one of these."""
    return bool(rows) and TIME in rows[0]


def published_rows(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The rows of a sweep with the columns of published runs, numbered from 1."""
    return [_published(number, row) for number, row in enumerate(rows, 1)]


def _published(number: int, row: Mapping[str, str]) -> dict[str, str]:
    found = {"id": f"sweep {number}", **UNSAID, **{name: row.get(column, "") for name, column in COLUMNS.items()}}
    found["ffn"], found["step_time_s"] = f"4 x {found['hidden']}", f"{row.get(TIME, '')} ms"
    return found
