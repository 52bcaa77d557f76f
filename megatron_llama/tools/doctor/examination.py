"""The nodes' part of an examination: each first process observes its node, all meet, and the first one judges."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megatron_llama.config import Config
from megatron_llama.devices import get_device
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.plan import Plan
from megatron_llama.tools.doctor import clocks, disks, hardware_check, interfaces, pairs, process_limits, versions
from megatron_llama.tools.doctor.finding import BREAKS, Finding, Node
from megatron_llama.tools.doctor.meeting import ClockReading, Meeting
from megatron_llama.tools.doctor.need import folders_of, need_of


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
            echo = pairs.Echo()
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
            tried = (own, pairs.reach_all(own, peers))
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
        versions.CHECK: versions.observe(),
        hardware_check.CHECK: hardware_check.observe(device, count=not case.quick),
        process_limits.CHECK: process_limits.observe(),
        disks.CHECK: disks.observe(folders_of(case.config)),
    }
    name = seen[hardware_check.CHECK].get("device")
    seen[interfaces.CHECK] = interfaces.observe(get_device(name).interface_variable if name else interfaces.GLOO)
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
    yield from versions.judge(nodes)
    yield from hardware_check.judge(nodes)
    yield from interfaces.judge(nodes)
    yield from pairs.judge(nodes, results)
    yield from clocks.judge(nodes, readings)
    yield from disks.judge(nodes, looks, None if case.plan is None else need_of(case.plan))
    found = nodes[0].seen[hardware_check.CHECK].get("device")
    yield from process_limits.judge(nodes, accelerator=bool(found) and get_device(found).is_accelerator)


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
