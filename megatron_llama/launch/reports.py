"""What the processes of a start tell one another before it: where each is, and what the first one opens it with."""

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
    """What one process reports about itself."""

    number: int
    """Its rank among the processes that were started."""
    node: int
    name: str
    """The machine's own name."""
    first_rank: int
    ranks: int
    """Ranks that it is or will start."""
    world_size: int
    """Ranks in all, by its own count."""
    address: str
    interface: str | None
    processes: int = 1
    """Processes that its starter says it has started."""
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """A word that no other process has, nor this number's process in another attempt of the same start."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"


@dataclass(frozen=True)
class Opening:
    """What the first process tells all when the start opens."""

    run_dir: str
    again: bool
    """An earlier attempt of the same start has begun the run."""
    tokens: tuple[str, ...]
    """Those of all processes, by number: who does not find its own is not meant."""

    @property
    def attempt(self) -> str:
        """A name for this attempt, which no other one has."""
        return self.tokens[0]


def node_info(context: ProcessContext, first_rank: int, ranks: int, world_size: int) -> NodeInfo:
    """This process's report. The first node learns its own address only from the others'."""
    try:
        address = local_address_to(context.master_addr)
    except OSError:
        address = ""  # connecting will say more
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
    """All reports, with the first node's address as the others see it. Raises LaunchFailed where the processes don't
    count the same number of ranks."""
    first = reports[0]
    odd = [node for node in reports if node.world_size != first.world_size]
    if odd:
        raise LaunchFailed(
            f"{odd[0].name} has {odd[0].ranks} ranks and so counts {odd[0].world_size} in all; {first.name} has "
            f"{first.ranks} and counts {first.world_size}. All nodes must have equally many devices, or launch.hosts "
            "must say how many each has"
        )
    others = [node for node in reports if node.node != 0 and node.address]
    if not others:
        return list(reports)
    address = local_address_to(others[0].address)
    interface = interface_of(address)
    return [replace(node, address=address, interface=interface) if node.node == 0 else node for node in reports]


def node_table(reports: Sequence[NodeInfo], context: ProcessContext) -> str:
    """Which node has which ranks, and how it is reached; one row each."""
    rows = [("node", "name", "ranks", "address", "interface")]
    # In the order of the ranks: a starter that deals them out in turn gives a machine more than one row.
    for (number, name), group in groupby(sorted(reports, key=lambda n: n.first_rank), lambda n: (n.node, n.name)):
        here = list(group)
        first, last = here[0].first_rank, here[-1].first_rank + here[-1].ranks - 1
        ranks = f"{first}-{last}" if last > first else f"{first}"
        rows.append((str(number), name, ranks, here[0].address, here[0].interface or "unknown"))
    return "\n".join([*text_table(rows), f"They meet at {context.master_addr}, port {context.master_port}."]) + "\n"


def same_number(number: int, one: NodeInfo, other: NodeInfo | None) -> Problem:
    """The problem of two processes with one number."""
    rule = f"two processes have this number: {one}, and {'another' if other is None else other}"
    return Problem("RANK", number, rule, "start all ranks with one command, or give each a number of its own")


def read_opening(text: str | None) -> Opening | None:
    """What the first process has said; None where it has said nothing, or that is none."""
    try:
        said = json.loads(text or "")
        return Opening(str(said["run_dir"]), bool(said["again"]), tuple(map(str, said["tokens"])))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_report(text: str | None) -> NodeInfo | None:
    """A report that has come; None where none has, or what came is none."""
    try:
        node = NodeInfo(**json.loads(text or ""))
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (node.number, node.node, node.first_rank, node.ranks, node.world_size, node.processes, node.pid)
    words = (node.name, node.address, node.interface or "", node.token)
    return node if all(type(n) is int for n in numbers) and all(type(word) is str for word in words) else None
