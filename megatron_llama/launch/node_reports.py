"""Messages between the processes of a launch: a report per process, and the start message of process 0."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from megatron_llama.config import Problem
from megatron_llama.launch.environment import ProcessContext, interface_of, local_address_to
from megatron_llama.launch.job_store import LaunchFailed
from megatron_llama.system.tables import text_table


@dataclass(frozen=True)
class NodeInfo:
    """Report of a process about itself."""

    number: int
    """Rank among the launched processes."""
    node: int
    name: str
    """Host name."""
    first_rank: int
    ranks: int
    """Ranks that the process is or starts."""
    world_size: int
    """Ranks in all, as this process counts."""
    address: str
    interface: str | None
    processes: int = 1
    """Processes in all, as its launcher reports."""
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of the process, different in each attempt."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"


@dataclass(frozen=True)
class StartMessage:
    """Start message of process 0 to all processes."""

    run_dir: str
    restarted: bool
    """Whether an earlier attempt of this launch started the run."""
    tokens: tuple[str, ...]
    """Tokens of all processes by number: a process whose token is missing ignores the message."""

    @property
    def attempt(self) -> str:
        """Unique id of this attempt."""
        return self.tokens[0]


def node_info(context: ProcessContext, first_rank: int, ranks: int, world_size: int) -> NodeInfo:
    """Return this process's report. The first node gets its address from the reports of the others."""
    try:
        address = local_address_to(context.master_addr)
    except OSError:
        address = ""  # connecting reports the error
    return NodeInfo(
        number=context.rank,
        node=context.node,
        name=socket.gethostname(),
        first_rank=first_rank,
        ranks=ranks,
        world_size=world_size,
        address=address,
        interface=interface_of(address) if address else None,
        processes=context.world_size,
    )


def check_consistent(reports: Sequence[NodeInfo]) -> list[NodeInfo]:
    """Return all reports, with the first node's address as seen by the others.

    Raises LaunchFailed if the processes count different numbers of ranks.
    """
    first = reports[0]
    odd = [node for node in reports if node.world_size != first.world_size]
    if odd:
        raise LaunchFailed(
            f"{odd[0].name} has {odd[0].ranks} ranks (world size {odd[0].world_size}), {first.name} has "
            f"{first.ranks} (world size {first.world_size}). Nodes must have the same number of devices; else write "
            "launch.hosts=[HOST:RANKS,...]"
        )
    others = [node for node in reports if node.node != 0 and node.address]
    if not others:
        return list(reports)
    address = local_address_to(others[0].address)
    interface = interface_of(address)
    return [replace(node, address=address, interface=interface) if node.node == 0 else node for node in reports]


def node_table(reports: Sequence[NodeInfo], context: ProcessContext) -> str:
    """Format a table of the nodes: ranks, address, interface."""
    rows = [("node", "name", "ranks", "address", "interface")]
    # Sorted by rank: a round-robin launcher gives a machine several rows.
    for (number, name), group in groupby(sorted(reports, key=lambda n: n.first_rank), lambda n: (n.node, n.name)):
        here = list(group)
        first, last = here[0].first_rank, here[-1].first_rank + here[-1].ranks - 1
        ranks = f"{first}-{last}" if last > first else f"{first}"
        rows.append((str(number), name, ranks, here[0].address, here[0].interface or "unknown"))
    return "\n".join([*text_table(rows), f"Rendezvous at {context.master_addr}, port {context.master_port}."]) + "\n"


def duplicate_rank(number: int, one: NodeInfo, other: NodeInfo | None) -> Problem:
    """Return the problem of two processes with one rank."""
    rule = f"two processes have this rank: {one} and {'another' if other is None else other}"
    return Problem("RANK", number, rule, "launch all ranks with one command, or set a different RANK for each")


def read_start_message(text: str | None) -> StartMessage | None:
    """Parse the start message; None if ``text`` is missing or invalid."""
    try:
        fields = json.loads(text or "")
        return StartMessage(str(fields["run_dir"]), bool(fields["restarted"]), tuple(map(str, fields["tokens"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_report(text: str | None) -> NodeInfo | None:
    """Parse a report; None if ``text`` is missing or invalid."""
    try:
        node = NodeInfo(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (node.number, node.node, node.first_rank, node.ranks, node.world_size, node.processes, node.pid)
    words = (node.name, node.address, node.interface or "", node.token)
    return node if all(type(n) is int for n in numbers) and all(type(word) is str for word in words) else None
