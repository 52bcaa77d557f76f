"""The nodes' part of an examination: each first process observes its node, all meet, and the first one judges."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config import Config
from megatron_llama.config.precision import BYTES
from megatron_llama.config.problems import fill
from megatron_llama.devices import get_device
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.plan import Plan
from megatron_llama.plan.memory import optimizer_bytes
from megatron_llama.system.files import user_cache
from megatron_llama.system.tables import gib, plural, text_table
from megatron_llama.tools.doctor import disks, machine, network
from megatron_llama.tools.doctor.disks import RUN, Need
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, SEVERITIES, WARNS, Finding, Node
from megatron_llama.tools.doctor.network import ClockReading, Meeting
from megatron_llama.tools.doctor.ranks import Rate


@dataclass(frozen=True)
class Case:
    """What is to be examined, as this process sees it."""

    config: Config
    plan: Plan | None
    context: ProcessContext | None
    quick: bool

    @property
    def leads(self) -> bool:
        """Whether this is the process that observes its node."""
        return self.context is None or self.context.local_rank == 0

    @property
    def is_first(self) -> bool:
        return self.context is None or self.context.rank == 0

    @property
    def nodes(self) -> int:
        return 1 if self.context is None else self.context.nodes


def say(case: Case, what: str) -> None:
    """What is being done, on stderr: one line that is written over on a terminal, nothing in a quick examination."""
    if case.is_first and not case.quick:
        sys.stderr.write(f"\r\x1b[K{what} ..." if sys.stderr.isatty() else f"{what} ...\n")
        sys.stderr.flush()


def examine_nodes(case: Case, meeting: Meeting) -> tuple[list[Node], list[Finding], list[ClockReading | None]]:
    """All nodes that have come and what is wrong with them, on the first process; three empty lists on the others.
    Raises OSError where the first process is lost."""
    with ExitStack() as stack:
        echo = mark = None
        if case.leads and case.nodes > 1:
            echo = network.Echo()
            stack.callback(echo.close)
        say(case, "looking at versions, devices, networks, disks and limits")
        report = _report(case, meeting.own_address, echo.port if echo else 0) if case.leads else None
        if report and case.is_first and case.nodes > 1:
            mark = disks.leave_mark(folders_of(case.config)[disks.RUN])
            if mark is not None:
                stack.callback(mark.remove)
                report["mark"] = str(mark.path)
        reports = [each for each in meeting.exchange(report) if each is not None]
        say(case, "comparing clocks, trying all ports between the nodes")
        readings = meeting.read_clocks()
        tried, look = None, None
        if case.leads and case.nodes > 1:
            own = next(each["node"] for each in reports if each["address"] == meeting.own_address)
            peers = {each["node"]: (each["address"], each["port"]) for each in reports if each["node"] != own}
            tried = (own, network.reach_all(own, peers))
            if not case.is_first and reports[0].get("mark"):
                look = disks.look_for(reports[0]["mark"])
        answers = meeting.exchange((tried, look))
        if not case.is_first:
            return [], [], []
        nodes = [Node(each["node"], each["name"], each["address"], each["ranks"], each["seen"]) for each in reports]
        by_process = {each["process"]: number for number, each in enumerate(reports)}
        looks: list[Any] = [None] * len(nodes)
        clocks_read: list[ClockReading | None] = [None] * len(nodes)
        results = {}
        for process, number in by_process.items():
            if answers[process] is not None and answers[process][0] is not None:
                results[answers[process][0][0]] = answers[process][0][1]
                looks[number] = answers[process][1]
            clocks_read[number] = readings[process] if process else None
        return nodes, list(_judge(case, meeting, nodes, results, looks, clocks_read)), clocks_read


def _report(case: Case, address: str, port: int) -> dict[str, Any]:
    """What a node's first process has to say."""
    context = case.context
    device = case.config.device.name
    seen = {
        machine.VERSIONS: machine.observe_versions(),
        machine.HARDWARE: machine.observe_hardware(device, count=not case.quick),
        machine.LIMITS: machine.observe_limits(),
        disks.CHECK: disks.observe(folders_of(case.config)),
    }
    name = seen[machine.HARDWARE].get("device")
    seen[network.INTERFACES] = network.observe_interfaces(get_device(name).interface_variable if name else network.GLOO)
    return {
        "process": 0 if context is None else context.rank,
        "node": 0 if context is None else context.node,
        "name": socket.gethostname(),
        "address": address,
        "port": port,
        "ranks": _ranks(case),
        "seen": seen,
    }


def _ranks(case: Case) -> str:
    """The ranks of this node, as the plan would place them."""
    if case.plan is None:
        return ""
    context = case.context
    if context is None:
        first, count = 0, case.plan.world_size
    elif context.one_per_node:
        counts = context.ranks_of_nodes(case.plan.world_size)
        first, count = sum(counts[: context.node]), counts[context.node]
    else:
        first, count = context.rank, context.local_ranks
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _judge(
    case: Case,
    meeting: Meeting,
    nodes: Sequence[Node],
    results: dict[int, list[dict[str, Any]]],
    looks: Sequence[Any],
    readings: Sequence[ClockReading | None],
) -> Iterator[Finding]:
    yield from _missing(case, meeting)
    yield from machine.judge_versions(nodes)
    yield from machine.judge_hardware(nodes)
    yield from network.judge_interfaces(nodes)
    yield from network.judge_pairs(nodes, results)
    yield from machine.judge_clocks(nodes, readings)
    yield from disks.judge(nodes, looks, None if case.plan is None else need_of(case.plan))
    found = nodes[0].seen[machine.HARDWARE].get("device")
    yield from machine.judge_limits(nodes, accelerator=bool(found) and get_device(found).is_accelerator)


def _missing(case: Case, meeting: Meeting) -> Iterator[Finding]:
    """Processes that have not come."""
    context = case.context
    if context is None or not meeting.missing:
        return
    hosts = _host_names(context.nodes)
    for number in meeting.missing:
        node = number if context.one_per_node else number // context.local_ranks
        name = hosts[node] if node < len(hosts) else f"{'node' if context.one_per_node else 'rank'} {number}"
        where = f"{name} → {context.master_addr}"
        what = (
            f"it has not come to {context.master_addr}, port {context.master_port}, where all meet, or was lost again"
        )
        remedy = f"read what it says itself; open port {context.master_port} from there (firewall, security group), or"
        yield Finding("meeting", BREAKS, where, what, f"{remedy} set MASTER_ADDR and MASTER_PORT to others")


def _host_names(count: int) -> list[str]:
    """The nodes of a job of Slurm's; empty elsewhere."""
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return []
    try:
        command = ["scontrol", "show", "hostnames", listed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = done.stdout.split()
    return found if len(found) == count else []


# What the doctor prints: the nodes, the collectives' speeds, and every finding with what to do.


WIDTH = 110
_MARKS = {BREAKS: "✗", WARNS: "!", NOTES: "·"}
_COLOURS = {BREAKS: "31;1", WARNS: "33;1", NOTES: "36"}


@dataclass(frozen=True)
class Report:
    """All that an examination has brought to light."""

    nodes: Sequence[Node]
    readings: Sequence[ClockReading | None]
    """Of the nodes' clocks."""
    findings: Sequence[Finding]
    measured: Mapping[str, Any] | None
    """What the ranks have measured; None where they did not."""
    seconds: float
    """That it took."""

    def page(self, *, colour: bool) -> str:
        """As text for people."""
        lines = [*_node_table(self.nodes, self.readings), ""] if self.nodes else []
        if self.measured is not None:
            lines += [*_speed_table(self.measured), ""]
        ordered = sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        for finding in ordered:
            lines += _block(finding, colour)
        return "\n".join([*lines, *_verdict(self.nodes, ordered, self.seconds)]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"seconds": round(self.seconds, 1)}


def _node_table(nodes: Sequence[Node], readings: Sequence[ClockReading | None]) -> list[str]:
    rows = [("node", "ranks", "address", "interface", "device", "torch", "commit", "clock", "run.dir", "free")]
    for node, reading in zip(nodes, readings, strict=True):
        device, disk = node.seen[machine.HARDWARE], node.seen[disks.CHECK][disks.RUN]
        count = f"{device['count']} x " if device.get("count") else ""
        clock = "" if reading is None else f"{reading.ahead:+.3f} s"
        speed = f"{disks.WRITTEN / disk['seconds'] / 1e6:,.0f} MB/s" if "seconds" in disk else "?"
        rows.append(
            (
                node.name,
                node.ranks,
                node.address,
                network.interface_of_node(node) or "",
                f"{count}{device.get('device', 'none')}",
                str(node.seen[machine.VERSIONS]["torch"]),
                node.seen[machine.VERSIONS]["commit"],
                clock,
                speed,
                "?" if disk["free"] is None else gib(disk["free"]),
            )
        )
    return text_table([[*map(str, row)] for row in rows])


def _speed_table(measured: Mapping[str, Any]) -> list[str]:
    """The slowest group of each axis, as the NCCL tests count."""
    slowest: dict[tuple[str, str, int], Rate] = {}
    for fields in measured["collectives"]:
        rate = Rate(**fields)
        known = slowest.get((rate.axis, rate.kind, rate.size))
        if known is None or rate.seconds > known.seconds:
            slowest[rate.axis, rate.kind, rate.size] = rate
    rates = [rate / 1e9 for rate in measured["products"]]
    lines = [f"Products: {min(rates):,.1f} to {max(rates):,.1f} GFLOP/s on {len(rates)} {plural(len(rates), 'rank')}."]
    if links := [rate / 1e6 for _, _, rate in measured["links"]]:
        lines.append(f"Links between nodes: {min(links):,.0f} to {max(links):,.0f} MB/s.")
    if not slowest:
        return lines
    rows = [("axis", "collective", "ranks", "size", "time", "algorithm", "bus")]
    for rate in slowest.values():
        rows.append(
            (
                rate.axis,
                rate.kind,
                str(rate.ranks),
                _size(rate.size),
                f"{1e6 * rate.seconds:,.0f} us",
                f"{rate.algorithm_bandwidth / 1e9:.3f} GB/s",
                f"{rate.bus_bandwidth / 1e9:.3f} GB/s",
            )
        )
    return [*lines, "", *text_table(rows, left=2)]


def _block(finding: Finding, colour: bool) -> Iterator[str]:
    title = f"{_MARKS[finding.severity]} {finding.check:12s}{finding.where}"
    yield f"\x1b[{_COLOURS[finding.severity]}m{title}\x1b[0m" if colour else title
    yield fill(f"  {'':12s}", finding.what, WIDTH)
    yield fill(f"  {'do':>10s}  ", finding.remedy, WIDTH)
    yield ""


def _verdict(nodes: Sequence[Node], findings: Sequence[Finding], seconds: float) -> Iterator[str]:
    looked = f"{len(nodes)} {plural(len(nodes), 'node')} in {seconds:.0f} s"
    if not findings:
        yield f"Nothing is wrong with {looked}."
        return
    counts = [sum(finding.severity == severity for finding in findings) for severity in SEVERITIES]
    words = ("sure to break a run", "that may cost one", "good to know")
    told = ", ".join(f"{count} {word}" for count, word in zip(counts, words, strict=True) if count)
    yield f"{len(findings)} {plural(len(findings), 'finding')} on {looked}: {told}."


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


# What the settings say about the machines before a run: its folders, and what it will write into them.


def folders_of(config: Config) -> dict[str, Path]:
    """The folders that a run writes to, by their setting."""
    found = {RUN: Path(config.run.dir or "runs")}
    if config.trainer.compile:
        found["trainer.compile_cache"] = Path(config.trainer.compile_cache or user_cache("compile")).expanduser()
    if config.data.cache_dir:
        found["data.cache_dir"] = Path(config.data.cache_dir).expanduser()
    return found


def need_of(plan: Plan) -> Need:
    """Weights and optimizer states of what is trained, and how many checkpoints there will be."""
    config = plan.config
    size = plan.whole.trained * BYTES[plan.precision.param_dtype] + optimizer_bytes(plan, plan.whole)
    every, keep, steps = config.checkpoint.every_steps, config.checkpoint.keep, config.trainer.steps
    made = (steps // every if every else 0) + (1 if config.checkpoint.save_last and (not every or steps % every) else 0)
    # An old one goes once the new one is whole.
    kept = made if keep is None else min(made, keep + 1)
    return Need(size if made else 0, kept)
