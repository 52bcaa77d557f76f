"""Before the start, everybody tells the first process where they are: a wrong address is found here, with its name.

Without this a rank that can't reach the others waits in silence. Ranks that torchrun started meet at torchrun's store;
the others at a port of the first process, where afterwards their store will be. Imports no torch of its own.
"""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from megatron_llama.config import ConfigError, Problem
from megatron_llama.launch.network import addresses_of, interface_of, is_loopback, own_address_towards
from megatron_llama.launch.process_context import Place

# Starting Python on a thousand nodes from one disk takes minutes; a host without a way to it is known much sooner.
ARRIVAL_LIMIT_SECONDS = 300.0
NO_WAY_LIMIT_SECONDS = 30.0
_CONNECT_SECONDS, _RETRY_SECONDS, _LINE_SECONDS = 5.0, 0.2, 5.0
_RUN_DIR_KEY = "megatron_llama/run.dir"


class LaunchFailed(RuntimeError):
    """The processes could not be brought together; the message says which and why, and needs no traceback."""


@dataclass(frozen=True)
class Arrival:
    """What one process says about itself."""

    job: str
    """The same for all that belong together."""
    number: int
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


class Meeting(ABC):
    """One process's part: all ``arrive``; the first one then says where the run lives, the others ``wait`` for that."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def arrive(self, mine: Arrival) -> list[Arrival]:
        """Say where this process is; the first one gets what everybody said, in order, the others nothing."""

    @abstractmethod
    def open(self, run_dir: str) -> None:
        """The first one: let the others go on."""

    @abstractmethod
    def wait(self, limit_seconds: float = ARRIVAL_LIMIT_SECONDS) -> str:
        """The others: the run's folder, when the first one says so. Raises EOFError where it has ended instead."""

    def remembered(self, run_dir: str) -> str:
        """The folder chosen in an earlier attempt of the same start, else ``run_dir``."""
        return run_dir


class PortMeeting(Meeting):
    """At a port of the first process."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.listener = _listen(place) if place.rank == 0 else None
        self._connections: list[socket.socket] = []

    def arrive(self, mine: Arrival) -> list[Arrival]:
        if self.listener is None:
            connection = _reach(self.place)
            connection.sendall((json.dumps(asdict(mine)) + "\n").encode())
            self._connections.append(connection)
            return []
        arrivals = {mine.number: mine}
        deadline = time.monotonic() + ARRIVAL_LIMIT_SECONDS
        while len(arrivals) < self.place.world_size:
            self.listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                raise LaunchFailed(_missing(self.place, arrivals)) from None
            arrival = _read_arrival(connection, mine)
            if arrival is None:  # a stranger: a port scanner, a rank of an earlier job
                connection.close()
            else:
                arrivals[arrival.number] = arrival
                self._connections.append(connection)
        self.listener.settimeout(None)
        return [arrivals[number] for number in sorted(arrivals)]

    def open(self, run_dir: str) -> None:
        for connection in self._connections:
            connection.sendall((json.dumps(run_dir) + "\n").encode())
            connection.close()

    def wait(self, limit_seconds: float = ARRIVAL_LIMIT_SECONDS) -> str:
        (connection,) = self._connections
        connection.settimeout(limit_seconds)
        try:
            with connection, connection.makefile() as lines:
                line = lines.readline()
        except OSError as error:
            raise EOFError(str(error)) from error
        if not line:
            raise EOFError("the first process has ended")
        return str(json.loads(line))


class StoreMeeting(Meeting):
    """At the store that torchrun hosts. It outlives ranks that torchrun starts again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from torch.distributed import TCPStore

        self._store = TCPStore(place.master_addr, place.master_port, is_master=False)
        self._prefix = f"megatron_llama/start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def arrive(self, mine: Arrival) -> list[Arrival]:
        self._store.set(f"{self._prefix}/{mine.number}", json.dumps(asdict(mine)))
        if self.place.rank > 0:
            return []
        arrivals: dict[int, Arrival] = {}
        for number in range(self.place.world_size):
            key = f"{self._prefix}/{number}"
            try:
                self._store.wait([key], timedelta(seconds=ARRIVAL_LIMIT_SECONDS))
            except RuntimeError:
                raise LaunchFailed(_missing(self.place, arrivals)) from None
            arrivals[number] = Arrival(**json.loads(self._store.get(key)))
        return list(arrivals.values())

    def open(self, run_dir: str) -> None:
        self._store.set(f"{self._prefix}/open", run_dir)

    def wait(self, limit_seconds: float = ARRIVAL_LIMIT_SECONDS) -> str:
        key = f"{self._prefix}/open"
        try:
            self._store.wait([key], timedelta(seconds=limit_seconds))
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise EOFError(str(error)) from error

    def remembered(self, run_dir: str) -> str:
        return self._store.compare_set(_RUN_DIR_KEY, "", run_dir).decode()


def meeting_of(place: Place) -> Meeting:
    """Where the processes of ``place``'s job meet."""
    check_first_address(place)
    return StoreMeeting(place) if place.has_store else PortMeeting(place)


def check_first_address(place: Place) -> None:
    """Raises ConfigError, naming this node, where it takes the first node's address for its own or for nothing."""
    if place.nodes == 1:
        return
    instead = "set MASTER_ADDR to the first node's name or address as the other nodes know it"
    try:
        addresses = addresses_of(place.master_addr)
    except OSError as error:
        rule = f"node {place.node}, {socket.gethostname()}, finds no address for it: {error.strerror}"
        raise ConfigError([Problem("MASTER_ADDR", place.master_addr, rule, instead)]) from error
    # The first node may well know its own name as 127.0.1.1 (Debian does that): the others are who must reach it.
    wrong = is_loopback(place.master_addr) if place.node == 0 else all(map(is_loopback, addresses))
    if wrong:
        rule = f"on node {place.node}, {socket.gethostname()}, this is {addresses[0]}: every node takes it for itself"
        raise ConfigError([Problem("MASTER_ADDR", place.master_addr, rule, instead)])


def arrival_of(place: Place, first_rank: int, ranks: int, world_size: int) -> Arrival:
    """What this process has to say. The first node learns its own address only from the others'."""
    try:
        address = own_address_towards(place.master_addr)
    except OSError:
        address = ""  # connecting will say more
    return Arrival(
        job=f"{place.job}/{place.starter}/{place.world_size}",
        number=place.rank,
        node=place.node,
        name=socket.gethostname(),
        first_rank=first_rank,
        ranks=ranks,
        world_size=world_size,
        address=address,
        interface=interface_of(address) if address else None,
    )


def settled(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Everybody's arrival as the first process knows it after all have spoken: the first node's address is the one
    towards the others. Raises LaunchFailed where the processes don't count the same ranks."""
    first = arrivals[0]
    odd = [a for a in arrivals if a.world_size != first.world_size]
    if odd:
        raise LaunchFailed(
            f"{odd[0].name} has {odd[0].ranks} ranks and so counts {odd[0].world_size} in all; {first.name} has "
            f"{first.ranks} and counts {first.world_size}. All nodes must have equally many devices, or launch.hosts "
            "must say how many each has"
        )
    others = [a for a in arrivals if a.node != 0 and a.address]
    if not others:
        return list(arrivals)
    address = own_address_towards(others[0].address)
    known = {"address": address, "interface": interface_of(address)}
    return [Arrival(**(asdict(a) | known)) if a.node == 0 else a for a in arrivals]


def table(arrivals: Sequence[Arrival], place: Place) -> str:
    """Which node has which ranks, and how it is reached; one row each."""
    rows = [("node", "name", "ranks", "address", "interface")]
    for node in sorted({a.node for a in arrivals}):
        here = [a for a in arrivals if a.node == node]
        last = max(a.first_rank + a.ranks for a in here) - 1
        first = min(a.first_rank for a in here)
        ranks = f"{first}-{last}" if last > first else f"{first}"
        rows.append((str(node), here[0].name, ranks, here[0].address, here[0].interface or "unknown"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    meet = f"They meet at {place.master_addr}, port {place.master_port}."
    return "\n".join([*lines, meet]) + "\n"


def _listen(place: Place) -> socket.socket:
    """The port of the first process, on all its addresses."""
    backlog = max(128, 2 * place.world_size)
    try:
        if socket.has_dualstack_ipv6():
            where = ("", place.master_port)
            return socket.create_server(where, family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        return socket.create_server(("", place.master_port), backlog=backlog)
    except OSError as error:
        rule = f"the first node, {socket.gethostname()}, can't listen there: {error.strerror}"
        raise ConfigError(
            [Problem("MASTER_PORT", place.master_port, rule, "set MASTER_PORT to a free port, the same on all nodes")]
        ) from error


def _reach(place: Place) -> socket.socket:
    """A connection to the first process, which may start later than this one."""
    begin = time.monotonic()
    while True:
        try:
            return socket.create_connection((place.master_addr, place.master_port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            # Refused: the machine is there, the process is not there yet.
            refused = isinstance(error, ConnectionRefusedError)
            if time.monotonic() - begin > (ARRIVAL_LIMIT_SECONDS if refused else NO_WAY_LIMIT_SECONDS):
                raise LaunchFailed(
                    f"node {place.node}, {socket.gethostname()}, can't reach the first node at {place.master_addr}, "
                    f"port {place.master_port}: {error.strerror or error}"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _read_arrival(connection: socket.socket, mine: Arrival) -> Arrival | None:
    """What the other end says, if it is one of ours."""
    connection.settimeout(_LINE_SECONDS)
    try:
        said: Any = json.loads(connection.makefile().readline())
        arrival = Arrival(**said)
    except (OSError, ValueError, TypeError):
        return None
    return arrival if arrival.job == mine.job else None


def _missing(place: Place, arrivals: dict[int, Arrival]) -> str:
    missing = [number for number in range(place.world_size) if number not in arrivals]
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    here = ", ".join(dict.fromkeys(arrival.name for arrival in arrivals.values()))
    kind = "nodes" if place.one_per_node else "ranks"
    return f"{kind} {shown} of {place.world_size} have not come within {ARRIVAL_LIMIT_SECONDS:g} s; here are {here}"
