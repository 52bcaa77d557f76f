"""What is tuned for: devices, their memory, and whether they are here to try something on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_llama.config import Problem
from megatron_llama.config.problems import closest_match
from megatron_llama.config.settings import Config
from megatron_llama.devices import HOST
from megatron_llama.plan import Plan
from megatron_llama.plan.job import job_of_plan
from megatron_llama.plan.memory import USABLE
from megatron_llama.system.tables import GIB, gib, plural
from megatron_llama.tools.forecast.hardware import HardwareSpec, devices, find_device
from megatron_llama.tools.forecast.step_time import load_constants, step_time
from megatron_llama.tools.forecast.this_machine import Calibration, NotCalibrated, load_calibration, local_step_time
from megatron_llama.tools.settings import ClusterConfig

if TYPE_CHECKING:
    from megatron_llama.devices import Device

SHARED_BYTES = 265 << 20
"""What the ranks of a host have in common: the code of torch and its libraries. Measured with torch 2.13."""
PROCESS_BYTES = 100 << 20
"""What each rank on a host has of its own before a tensor is there. Measured too."""
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
    ranks_per_device=1,
    host_speed=1.0,
    source="a typical core; trials correct it",
)
"""One core of a host, to rank by until trials say more."""


@dataclass(frozen=True)
class Target:
    """Devices to find settings for."""

    name: str
    """A name of the hardware table, or cpu."""
    ranks: int
    """The most ranks: all devices, or the cores of hosts."""
    nodes: int
    device: HardwareSpec
    """What one rank has; of a host, one core."""
    memory_bytes: int
    """Of one rank's device; of a host the memory that all its ranks share."""
    here: bool
    """Whether it is this machine."""
    cluster: ClusterConfig
    machine: Calibration | None = None
    """What was measured of this host, where it was."""

    @property
    def host(self) -> bool:
        """Whether ranks share cores and memory, so that there may be fewer of them."""
        return self.name == HOST

    @property
    def per_node(self) -> int:
        """Ranks of one machine."""
        return self.ranks // self.nodes

    @property
    def room(self) -> int:
        """Bytes that ``needs`` may be: of a device what live tensors can fill, of a host all."""
        return self.memory_bytes if self.host else int(USABLE * self.memory_bytes)

    def sharers(self, ranks: int) -> int:
        """Ranks, of ``ranks`` in all, that share the memory of a device, or of a host."""
        return -(-ranks // self.nodes) if self.host else 1

    def beside(self, ranks: int) -> int:
        """Bytes of a host that are taken before a tensor is there."""
        return SHARED_BYTES + self.sharers(ranks) * PROCESS_BYTES if self.host else 0

    def needs(self, peak: float, ranks: int) -> int:
        """Bytes of a device, or of a host, that a run of ``ranks`` ranks takes, each of which peaks at ``peak``."""
        return self.beside(ranks) + round(self.sharers(ranks) * peak)

    def measured(self, reported: int, ranks: int) -> int:
        """The same of a run whose first rank has reported so much: on a host its resident set, shared pages too."""
        if not self.host:
            return reported
        return SHARED_BYTES + self.sharers(ranks) * max(0, reported - SHARED_BYTES)

    def rank_device(self, ranks: int) -> HardwareSpec:
        """What each of ``ranks`` has. Ranks on a host share its cores."""
        if not self.host:
            return self.device
        cores, core = self.per_node / self.sharers(ranks), self.device
        peaks = {form: peak * cores for form, peak in core.peaks.items()}
        return replace(core, peaks=peaks, bandwidth=core.bandwidth * cores, per_node=self.sharers(ranks))

    def seconds(self, plan: Plan, ranks: int) -> float:
        """Forecast of a step of ``plan``."""
        job = job_of_plan(plan)
        if self.machine is not None and not job.lora_parameters:  # what adapters send is not predicted
            return local_step_time(plan, self.machine).total
        return step_time(job, self.rank_device(ranks), load_constants()).total

    @property
    def basis(self) -> str:
        """What forecasts of time stand on."""
        if self.machine is not None:
            return f"measured on {self.machine.host}, {self.machine.date}, load {self.machine.load:g}"
        if self.host and self.here:
            return f"{self.device.source}; scripts/plan.py --calibrate measures this machine"
        return self.device.source

    def worlds(self) -> list[int]:
        """Numbers of ranks that use all of it: all devices; of hosts, any number that divides their cores evenly."""
        if not self.host:
            return [self.ranks]
        return [each * self.nodes for each in range(1, self.per_node + 1) if self.per_node % each == 0]

    def part(self, ranks: int) -> Target:
        """``ranks`` of its devices, on as few nodes as they need."""
        nodes = -(-ranks // self.per_node)
        return replace(self, ranks=ranks, nodes=nodes, cluster=replace(self.cluster, nodes=nodes))

    def __str__(self) -> str:
        what = "cores" if self.host else self.name
        nodes = f" on {self.nodes} {plural(self.nodes, 'node')}" if self.nodes > 1 or not self.here else ""
        memory = f"{gib(self.memory_bytes)}{' together' if self.host else ' each'}"
        return f"{self.ranks} {what if self.host else 'x ' + what}{nodes}, {memory}{', this machine' * self.here}"


def find_target(
    config: Config, cluster: ClusterConfig, overrides: Sequence[str]
) -> tuple[Target | None, list[Problem]]:
    """What a command line tunes for: the cluster that it names, else this machine; and what is wrong with it."""
    named = {text.partition("=")[0] for text in overrides}
    if named & {"cluster.device", "cluster.nodes"}:
        return _elsewhere(config, cluster)
    return _here(config, cluster)


def _elsewhere(config: Config, cluster: ClusterConfig) -> tuple[Target | None, list[Problem]]:
    whole = CORE if cluster.device == HOST else find_device(cluster.device)
    if whole is None:
        names = [*devices(), HOST]
        guess = closest_match(cluster.device, names)
        advice = f"write cluster.device={guess}" if guess else f"write one of {', '.join(names)}"
        return None, [Problem("cluster.device", cluster.device, "is not in the hardware table", advice)]
    if cluster.device == HOST and not (cluster.devices_per_node and config.device.memory_gib):
        advice = "write cluster.devices_per_node=CORES and device.memory_gib=GIB, those of one machine"
        return None, [Problem("cluster.device", HOST, "of other hosts, cores and memory must be known", advice)]
    per_node = cluster.devices_per_node or whole.per_node
    rank = replace(whole, per_node=per_node).per_rank()
    nodes = cluster.nodes or 1
    memory = int(config.device.memory_gib * GIB) if config.device.memory_gib else rank.memory_bytes
    cluster = replace(cluster, nodes=nodes)
    return Target(whole.name, nodes * rank.per_node, nodes, rank, memory, False, cluster), []


def _here(config: Config, cluster: ClusterConfig) -> tuple[Target | None, list[Problem]]:
    from megatron_llama.devices import get_device

    try:
        found = get_device(config.device.name)
    except ValueError as error:
        instead = "write device=auto to take the best device that is here, or cluster.device=NAME to plan for others"
        return None, [Problem("device", config.device.name, str(error), instead)]
    memory = int(config.device.memory_gib * GIB) if config.device.memory_gib else found.memory_bytes()
    count, asked = found.count(), cluster.devices_per_node
    if not found.is_accelerator:
        ranks = asked or count
        core = CORE if ranks <= count else replace(CORE, peaks={f: p * count / ranks for f, p in CORE.peaks.items()})
        machine = None
        with contextlib.suppress(NotCalibrated):
            machine = load_calibration()
        here = replace(cluster, device=HOST, nodes=1)
        return Target(HOST, ranks, 1, core, memory, True, here, machine), []
    row = _row_of(found)
    if row is None:
        rule = f"this machine's {found.name} is not in the hardware table"
        return None, [Problem("cluster.device", None, rule, "write cluster.device=NAME tune.trials=0 to plan for it")]
    if asked not in (None, count):
        rule = f"this machine has {count} devices, and a run takes all of them"
        return None, [Problem("cluster.devices_per_node", asked, rule, "leave it out")]
    rank = replace(row.per_rank(), per_node=count)
    return Target(row.name, count, 1, rank, memory, True, replace(cluster, device=row.name, nodes=1)), []


def _row_of(found: Device) -> HardwareSpec | None:
    """The device of the table whose peak is this one's; of several the one with the nearest memory."""
    peak, memory = found.peak_flops("bf16").flops, found.memory_bytes()
    rows = [row for row in devices().values() if abs(row.per_rank().peak("bf16") / max(peak, 1.0) - 1) < 0.02]
    return min(rows, key=lambda row: abs(row.per_rank().memory_bytes - memory), default=None)
