"""Target of a search: devices, their memory, and whether trials can run on them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_llama.config import Problem
from megatron_llama.config.settings import Config
from megatron_llama.devices import HOST, find_device
from megatron_llama.plan import Plan
from megatron_llama.plan.defaults_and_notes import is_large
from megatron_llama.plan.forecast_job import job_of_plan
from megatron_llama.plan.memory import USABLE
from megatron_llama.system.tables import GIB, gib, plural
from megatron_llama.tools.cluster_settings import ClusterConfig
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices
from megatron_llama.tools.forecast.step_time import load_constants, step_time
from megatron_llama.tools.forecast.this_machine import Calibration, NotCalibrated, load_calibration, local_step_time
from megatron_llama.tools.planned_run import Hardware, find_hardware
from megatron_llama.topology import Grid

if TYPE_CHECKING:
    from megatron_llama.devices import Device

SHARED_BYTES = 265 << 20
"""Memory shared by the ranks of a host: code of torch and its libraries. Measured with torch 2.13."""
PROCESS_BYTES = 100 << 20
"""Private memory of each rank on a host before it creates a tensor. Measured with torch 2.13."""
CORE = HardwareSpec(
    name=HOST,
    family=HOST,
    peaks={"fp32": 60e9, "bf16": 60e9},
    reach={"fp32": 0.8, "bf16": 0.8},
    memory_bytes=0,
    bandwidth=10e9,
    link=2e9,
    bus=1.5e9,
    per_node=1 << 20,
    network=1e9,
    source="a typical CPU core, corrected by trials",
)
"""Assumed rates of one CPU core, before calibration and trials."""


@dataclass(frozen=True)
class Target:
    """Devices of the tuned run."""

    name: str
    """Name in the hardware table, or cpu."""
    ranks: int
    """Maximum number of ranks: all devices, or the cores of the hosts."""
    nodes: int
    device: HardwareSpec
    """Share of a device that one rank uses; on hosts, one core."""
    memory_bytes: int
    """Memory of one rank's device; on hosts, the memory that all ranks share."""
    is_local: bool
    """Whether the target is this machine."""
    cluster: ClusterConfig
    calibration: Calibration | None = None
    """Calibration of this host, if it exists."""
    note: str | None = None
    """How the hardware was chosen, unless the user named it."""

    @property
    def is_host(self) -> bool:
        """Whether ranks share cores and memory, so that fewer ranks are possible."""
        return self.name == HOST

    @property
    def title(self) -> str | None:
        """Name for titles; None: the device of the config."""
        return None if self.is_host else f"{self.name} (device={self.device.kind})"

    @property
    def per_node(self) -> int:
        """Ranks per machine."""
        return -(-self.ranks // self.nodes)

    @property
    def usable_bytes(self) -> int:
        """Upper bound of ``required_bytes``: the usable share of a device's memory, or all memory of a host."""
        return self.memory_bytes if self.is_host else int(USABLE * self.memory_bytes)

    def ranks_sharing_memory(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks share the memory of a device or host."""
        return -(-ranks // self.nodes) if self.is_host else 1

    def baseline_bytes(self, ranks: int) -> int:
        """Return the bytes of a host that processes need before they create tensors."""
        return SHARED_BYTES + self.ranks_sharing_memory(ranks) * PROCESS_BYTES if self.is_host else 0

    def required_bytes(self, peak: float, ranks: int) -> int:
        """Return the bytes that ``ranks`` ranks with a peak of ``peak`` bytes each need on a device or host."""
        return self.baseline_bytes(ranks) + round(self.ranks_sharing_memory(ranks) * peak)

    def measured_bytes(self, reported: int, ranks: int) -> int:
        """Return the bytes of a device or host from the memory that rank 0 reported (on a host, its resident set)."""
        if not self.is_host:
            return reported
        return SHARED_BYTES + self.ranks_sharing_memory(ranks) * max(0, reported - SHARED_BYTES)

    def rank_device(self, ranks: int) -> HardwareSpec:
        """Return the share of a device that one of ``ranks`` ranks uses. Ranks on a host share its cores."""
        if not self.is_host:
            return self.device
        cores, core = self.per_node / self.ranks_sharing_memory(ranks), self.device
        peaks = {form: peak * cores for form, peak in core.peaks.items()}
        return replace(core, peaks=peaks, bandwidth=core.bandwidth * cores, per_node=self.ranks_sharing_memory(ranks))

    def seconds(self, plan: Plan, ranks: int) -> float:
        """Return the forecast seconds of a step of ``plan``."""
        job = job_of_plan(plan)
        if self.calibration is not None and not job.lora_parameters:  # the CPU forecast does not cover adapters
            return local_step_time(plan, self.calibration).total
        return step_time(job, self.rank_device(ranks), load_constants()).total

    @property
    def basis(self) -> str:
        """Source of the time forecasts."""
        if self.calibration is not None:
            return f"measured on {self.calibration.host}, {self.calibration.date}, load {self.calibration.load:g}"
        if self.is_host and self.is_local:
            return f"{self.device.source}; run scripts/plan.py --calibrate to measure this machine"
        return self.device.source

    def world_sizes(self) -> list[int]:
        """Return the world sizes that use the whole target: all devices, or on hosts each divisor of their cores."""
        if not self.is_host:
            return [self.ranks]
        return [each * self.nodes for each in range(1, self.per_node + 1) if self.per_node % each == 0]

    def subset(self, ranks: int) -> Target:
        """Return the target with ``ranks`` of its devices, on as few nodes as possible."""
        nodes = -(-ranks // self.per_node)
        return replace(self, ranks=ranks, nodes=nodes, cluster=replace(self.cluster, nodes=nodes))

    def __str__(self) -> str:
        label = "cores" if self.is_host else f"x {self.name}"
        nodes = f" on {self.nodes} {plural(self.nodes, 'node')}" if self.nodes > 1 or not self.is_local else ""
        memory = f"{gib(self.memory_bytes)}{' in total' if self.is_host else ' each'}"
        return f"{self.ranks} {label}{nodes}, {memory}{', this machine' * self.is_local}"


def find_target(
    config: Config, cluster: ClusterConfig, overrides: Sequence[str]
) -> tuple[Target | None, list[Problem]]:
    """Return the target of a command line, and its problems: the hardware that it names, or this machine.

    An accelerator that this machine has is tuned here. Without any name, a large model is planned for the default chip
    if this machine has no accelerator.
    """
    names = {text.partition("=")[0] for text in overrides}
    if not names & {"cluster.device", "cluster.nodes"} and (is_available(config.device.name, config)):
        return _local_target(config, cluster)
    hardware, problems = find_hardware(config, cluster, overrides)
    if hardware is None:
        return None, problems
    target, more = _named_target(config, cluster, hardware, names)
    return target, [*problems, *more]


def is_available(name: str, config: Config) -> bool:
    """Whether ``device=name`` tunes for this machine."""
    from megatron_llama.devices import get_device

    facts = find_device(name)
    if name == HOST or (facts is None and not is_large(config)):
        return True
    try:
        return get_device(name).is_accelerator
    except ValueError:
        return facts is None  # reports the unknown name


def _named_target(
    config: Config, cluster: ClusterConfig, hardware: Hardware, names: set[str]
) -> tuple[Target | None, list[Problem]]:
    whole, name = hardware.spec or CORE, hardware.spec.name if hardware.spec is not None else HOST
    if name == HOST and not (cluster.devices_per_node and config.device.memory_gib):
        advice = "add cluster.devices_per_node=CORES device.memory_gib=GIB (per machine)"
        return None, [Problem("cluster.device", HOST, "needs the cores and memory of a machine", advice)]
    rank = replace(whole, per_node=cluster.devices_per_node or whole.per_node).per_rank()
    memory = int(config.device.memory_gib * GIB) if config.device.memory_gib else rank.memory_bytes
    grid = Grid.of(config.trainer)
    ranks, nodes = rank.per_node * (cluster.nodes or 1), cluster.nodes or 1
    if cluster.nodes is None and name != HOST and {"trainer.tp", "trainer.pp", "trainer.dp"} <= names:
        ranks = grid.world_size  # the command line sets the layout
        nodes = -(-ranks // rank.per_node)
    cluster = replace(cluster, device=name, nodes=nodes)
    return Target(name, ranks, nodes, rank, memory, False, cluster, note=hardware.note), []


def _local_target(config: Config, cluster: ClusterConfig) -> tuple[Target | None, list[Problem]]:
    from megatron_llama.devices import get_device

    try:
        device = get_device(config.device.name)
    except ValueError as error:
        instead = "write device=auto for the best device of this host, or cluster.device=NAME to plan for another"
        return None, [Problem("device", config.device.name, str(error), instead)]
    memory = int(config.device.memory_gib * GIB) if config.device.memory_gib else device.memory_bytes()
    count, requested = device.count(), cluster.devices_per_node
    if not device.is_accelerator:
        ranks = requested or count
        core = CORE if ranks <= count else replace(CORE, peaks={f: p * count / ranks for f, p in CORE.peaks.items()})
        calibration = None
        with contextlib.suppress(NotCalibrated):
            calibration = load_calibration()
        return Target(HOST, ranks, 1, core, memory, True, replace(cluster, device=HOST, nodes=1), calibration), []
    row = _find_row(device)
    if row is None:
        rule = f"the {device.name} of this machine is not in the hardware table"
        return None, [Problem("cluster.device", None, rule, "write cluster.device=NAME tune.trials=0 to plan for it")]
    if requested not in (None, count):
        rule = f"this machine has {count} devices, and a run uses all of them"
        return None, [Problem("cluster.devices_per_node", requested, rule, "remove the setting")]
    rank = replace(row.per_rank(), per_node=count)
    return Target(row.name, count, 1, rank, memory, True, replace(cluster, device=row.name, nodes=1)), []


def _find_row(device: Device) -> HardwareSpec | None:
    """Return the row of the hardware table with the device's peak, and the nearest memory."""
    peak, memory = device.peak_flops("bf16").flops, device.memory_bytes()
    rows = [row for row in devices().values() if abs(row.per_rank().peak("bf16") / max(peak, 1.0) - 1) < 0.02]
    return min(rows, key=lambda row: abs(row.per_rank().memory_bytes - memory), default=None)
