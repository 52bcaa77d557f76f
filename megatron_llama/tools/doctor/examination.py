"""Examination of the nodes: one process per node observes, all exchange results, the first process judges."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config import Config
from megatron_llama.config.precision import BYTES
from megatron_llama.config.settings import KEPT_BY_TIME
from megatron_llama.devices import find_device, get_device
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import optimizer_bytes
from megatron_llama.system.files import user_cache
from megatron_llama.system.tables import format_ranges, gib, plural, text_table
from megatron_llama.system.wrapping import fill
from megatron_llama.tools.common import show_line
from megatron_llama.tools.doctor import disks, machine_checks, network
from megatron_llama.tools.doctor.disks import RUN, Need
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, SEVERITIES, WARNS, Finding, NodeState, names
from megatron_llama.tools.doctor.network import ClockReading, Connections


@dataclass(frozen=True)
class Examination:
    """Subject of the examination: config, plan and this process's place."""

    config: Config
    plan: Plan | None
    context: ProcessContext | None
    quick: bool

    @property
    def leads(self) -> bool:
        """Whether this process observes its node."""
        return self.context is None or self.context.local_rank == 0

    @property
    def is_first(self) -> bool:
        return self.context is None or self.context.rank == 0

    @property
    def nodes(self) -> int:
        return 1 if self.context is None else self.context.nodes


def show_progress(examination: Examination, activity: str) -> None:
    """Print the current activity on stderr, one overwritten line on a terminal; silent with ``--quick``."""
    if examination.is_first and not examination.quick:
        show_line(f"{activity} ...")


def examine_nodes(
    examination: Examination, connections: Connections
) -> tuple[list[NodeState], list[Finding], list[ClockReading | None]]:
    """Return the connected nodes, their findings and clocks on the first process; three empty lists on the others.

    Raises OSError if the first process is lost.
    """
    with ExitStack() as stack:
        echo = None
        if examination.leads and examination.nodes > 1:
            echo = network.Echo()
            stack.callback(echo.close)
        show_progress(examination, "checking versions, devices, networks, disks and limits")
        report = None
        if examination.leads:
            report = _node_report(examination, connections.local_address, echo.port if echo else 0)
        if report and examination.is_first and examination.nodes > 1:
            mark = stack.enter_context(disks.marker(output_folders(examination.config)[disks.RUN]))
            report["mark"] = mark and str(mark)
        reports = [each for each in connections.exchange(report) if each is not None]
        show_progress(examination, "comparing clocks, connecting all pairs of nodes")
        readings = connections.read_clocks()
        attempts, marker_check = None, None
        if examination.leads and examination.nodes > 1:
            number = next(each["node"] for each in reports if each["address"] == connections.local_address)
            peers = {each["node"]: (each["address"], each["port"]) for each in reports if each["node"] != number}
            attempts = network.reach_all(number, peers)
            if not examination.is_first and reports[0].get("mark"):
                marker_check = disks.check_marker(reports[0]["mark"])
        answers = connections.exchange((attempts, marker_check))
        if not examination.is_first:
            return [], [], []
        nodes = [
            NodeState(each["node"], each["name"], each["address"], each["ranks"], each["seen"]) for each in reports
        ]
        given = [answers[each["process"]] or (None, None) for each in reports]
        results = {node.number: tried for node, (tried, _) in zip(nodes, given, strict=True) if tried is not None}
        marker_checks = [check for _, check in given]
        clocks = [readings[each["process"]] if each["process"] else None for each in reports]
        return nodes, list(_judge(examination, connections, nodes, results, marker_checks, clocks)), clocks


def _node_report(examination: Examination, address: str, port: int) -> dict[str, Any]:
    """Collect the observations of this node."""
    context = examination.context
    device = examination.config.device.name
    seen = {
        machine_checks.VERSIONS: machine_checks.observe_versions(),
        machine_checks.HARDWARE: machine_checks.observe_hardware(device, count=not examination.quick),
        machine_checks.LIMITS: machine_checks.observe_limits(),
        disks.CHECK: disks.observe(output_folders(examination.config)),
    }
    name = seen[machine_checks.HARDWARE].get("device")
    seen[network.INTERFACES] = network.observe_interfaces(get_device(name).interface_variable if name else network.GLOO)
    return {
        "process": 0 if context is None else context.rank,
        "node": 0 if context is None else context.node,
        "name": socket.gethostname(),
        "address": address,
        "port": port,
        "ranks": _ranks(examination),
        "seen": seen,
    }


def _ranks(examination: Examination) -> str:
    """Format the range of ranks that the plan places on this node."""
    if examination.plan is None:
        return ""
    context = examination.context
    if context is None:
        first, count = 0, examination.plan.world_size
    elif context.one_per_node:
        counts = context.ranks_of_nodes(examination.plan.world_size)
        first, count = sum(counts[: context.node]), counts[context.node]
    else:
        first, count = context.rank, context.local_ranks
    return format_ranges(range(first, first + count))


def _judge(
    examination: Examination,
    connections: Connections,
    nodes: Sequence[NodeState],
    results: dict[int, list[dict[str, Any]]],
    marker_checks: Sequence[Any],
    readings: Sequence[ClockReading | None],
) -> Iterator[Finding]:
    yield from _missing(examination, connections)
    yield from machine_checks.judge_versions(nodes)
    yield from machine_checks.judge_hardware(nodes)
    yield from network.judge_interfaces(nodes)
    yield from network.judge_pairs(nodes, results)
    yield from machine_checks.judge_clocks(nodes, readings)
    yield from disks.judge(nodes, marker_checks, None if examination.plan is None else disk_need(examination.plan))
    device = nodes[0].seen[machine_checks.HARDWARE].get("device")
    yield from machine_checks.judge_limits(nodes, accelerator=bool(device) and get_device(device).is_accelerator)


def _missing(examination: Examination, connections: Connections) -> Iterator[Finding]:
    """Report processes that did not connect."""
    context = examination.context
    if context is None or not connections.missing:
        return
    hosts = _host_names(context.nodes)
    for number in connections.missing:
        node = number if context.one_per_node else number // context.local_ranks
        name = hosts[node] if node < len(hosts) else f"{'node' if context.one_per_node else 'rank'} {number}"
        where = f"{name} → {context.master_addr}"
        message = f"did not connect to {context.master_addr}, port {context.master_port}, or lost the connection"
        remedy = f"read its output; open port {context.master_port} for it (firewall, security group), or"
        yield Finding("rendezvous", BREAKS, where, message, f"{remedy} set other MASTER_ADDR and MASTER_PORT")


def _host_names(count: int) -> list[str]:
    """Return the node names of a Slurm job; empty outside of Slurm."""
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return []
    try:
        command = ["scontrol", "show", "hostnames", listed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = done.stdout.split()
    return names if len(names) == count else []


# Printed report: the nodes, the measured rates, and each finding with its fix.
_MARKS = {BREAKS: "✗", WARNS: "!", NOTES: "·"}
_COLOURS = {BREAKS: "31;1", WARNS: "33;1", NOTES: "36"}


@dataclass(frozen=True)
class DoctorReport:
    """Result of an examination."""

    nodes: Sequence[NodeState]
    readings: Sequence[ClockReading | None]
    """Clocks of the nodes."""
    findings: Sequence[Finding]
    measured: Mapping[str, Any] | None
    """Measurements of the ranks; None if skipped."""
    seconds: float
    """Duration of the examination."""

    def page(self, *, colour: bool) -> str:
        """Format the report as text."""
        lines = [*_node_table(self.nodes, self.readings), ""] if self.nodes else []
        if self.measured is not None:
            from megatron_llama.tools.doctor.rank_and_link_speed import speed_table  # needs torch

            lines += [*speed_table(self.measured), ""]
        ordered = sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        for finding in ordered:
            lines += _block(finding, colour)
        return "\n".join([*lines, *_verdict(self.nodes, ordered, self.seconds)]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self) | {"seconds": round(self.seconds, 1)}


def _node_table(nodes: Sequence[NodeState], readings: Sequence[ClockReading | None]) -> list[str]:
    rows = [("node", "ranks", "address", "interface", "device", "clock", "run.dir", "free")]
    software: dict[str, list[NodeState]] = {}
    for node, reading in zip(nodes, readings, strict=True):
        device, disk = node.seen[machine_checks.HARDWARE], node.seen[disks.CHECK][disks.RUN]
        count = f"{device['count']} x " if device.get("count") else ""
        clock = "" if reading is None else f"{reading.ahead:+.3f} s"
        speed = f"{disks.WRITTEN / disk['seconds'] / 1e6:,.0f} MB/s" if "seconds" in disk else "?"
        free = "?" if disk["free"] is None else gib(disk["free"])
        place = (node.name, node.ranks, node.address, network.interface_of_node(node) or "")
        rows.append((*place, f"{count}{device.get('device', 'none')}", clock, speed, free))
        versions = node.seen[machine_checks.VERSIONS]
        software.setdefault(f"torch {versions['torch']}, commit {versions['commit']}", []).append(node)
    lines = text_table([[*map(str, row)] for row in rows])
    return [*lines, "", *(fill("", f"{names(users)}: {versions}") for versions, users in software.items())]


def _block(finding: Finding, colour: bool) -> Iterator[str]:
    title = f"{_MARKS[finding.severity]} {finding.check:12s}{finding.where}"
    yield f"\x1b[{_COLOURS[finding.severity]}m{title}\x1b[0m" if colour else title
    yield fill(f"  {'':12s}", finding.what)
    yield fill(f"  {'do':>10s}  ", finding.remedy)
    yield ""


def _verdict(nodes: Sequence[NodeState], findings: Sequence[Finding], seconds: float) -> Iterator[str]:
    scope = f" on {len(nodes)} {plural(len(nodes), 'node')}" * bool(nodes) + f" in {seconds:.0f} s"
    if not findings:
        yield f"No problems{scope}."
        return
    counts = [sum(finding.severity == severity for finding in findings) for severity in SEVERITIES]
    words = ("fatal", "may fail or slow a run", "for information")
    summary = ", ".join(f"{count} {word}" for count, word in zip(counts, words, strict=True) if count)
    yield f"{len(findings)} {plural(len(findings), 'finding')}{scope}: {summary}."


def output_folders(config: Config) -> dict[str, Path]:
    """Return the folders that a run writes to, by setting."""
    folders = {RUN: Path(config.run.dir or "runs")}
    device = find_device(config.device.name)
    compiles = config.trainer.compile if device is None else device.compiles_code(config)
    if compiles:
        folders["trainer.compile_cache"] = Path(config.trainer.compile_cache or user_cache("compile")).expanduser()
    if config.data.cache_dir:
        folders["data.cache_dir"] = Path(config.data.cache_dir).expanduser()
    return folders


def disk_need(plan: Plan) -> Need:
    """Return the bytes of a checkpoint (trained weights, optimizer states) and the number of checkpoints on disk."""
    config = plan.config
    size = plan.whole.trained * BYTES[plan.precision.param_dtype] + optimizer_bytes(plan, plan.whole)
    every, keep, steps = config.checkpoint.every_steps, config.checkpoint.keep, config.trainer.steps
    saved = steps // every if every else 0
    saved += int(config.checkpoint.save_last and bool(not every or steps % every))
    # The oldest is deleted after the newest is complete.
    on_disk = saved if keep is None else min(saved, keep + 1)
    if config.checkpoint.every_minutes and keep is None:  # more, if the setting is not the default
        on_disk = max(on_disk, KEPT_BY_TIME + 1)
    return Need(size if saved else 0, on_disk)
