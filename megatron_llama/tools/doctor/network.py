"""Checks of the network: interfaces, the rendezvous of the nodes, clocks, and TCP connections between nodes."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median_high
from typing import Any

from megatron_llama.launch.environment import ProcessContext, address_of_interface, addresses_of, is_loopback
from megatron_llama.launch.job_store import QUIET, JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.rendezvous import check_first_address, listen, wait_until_reachable
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, WARNS, Finding, NodeState, odd_ones

INTERFACES = "interfaces"
GLOO = "GLOO_SOCKET_IFNAME"
"""Gloo runs the checkpoint collectives on every device and all collectives on CPU."""
_SYSTEM = Path("/sys/class/net")


def observe_interfaces(variable: str) -> dict[str, Any]:
    """Return the interfaces, the addresses of the host name, and the variables that select an interface.

    ``variable`` is the one of the device's communication library.
    """
    name = socket.gethostname()
    host_addresses: list[str] = []
    with suppress(OSError):
        host_addresses = addresses_of(name)
    interfaces = {}
    for _, interface in socket.if_nameindex():
        interfaces[interface] = {
            "address": address_of_interface(interface),
            "mtu": _number(interface, "mtu"),
            "megabits": _number(interface, "speed"),
            "up": _read(interface, "operstate") != "down",
        }
    variables = {key: os.environ[key] for key in dict.fromkeys((GLOO, variable)) if os.environ.get(key)}
    return {"host": name, "own": host_addresses, "interfaces": interfaces, "asked": variables}


def judge_interfaces(nodes: Sequence[NodeState]) -> Iterator[Finding]:
    """Report variables that name missing interfaces, host names that resolve to loopback, and odd MTU or speed.

    A single node is not checked.
    """
    if len(nodes) == 1:
        return
    for node in nodes:
        seen = node.seen[INTERFACES]
        usable = {name: each for name, each in seen["interfaces"].items() if each["up"] and each["address"]}
        for variable, text in seen["asked"].items():
            taken = [name for name in usable if matches(text, name, exact=variable == GLOO)]
            if all(is_loopback(usable[name]["address"]) for name in taken):
                message = f"{variable}={text} selects {'only loopback' if taken else 'no interface of this node'}"
                listed = ", ".join(f"{name} ({each['address']})" for name, each in usable.items())
                good = interface_of_node(node)
                unset = "unset it: train.py selects the interface that reaches the first node"
                remedy = f"set {variable}={good}, or unset it" if good else unset
                yield Finding(INTERFACES, BREAKS, node.name, f"{message}; available: {listed}", remedy)
        if GLOO not in seen["asked"] and (not seen["own"] or is_loopback(seen["own"][0])):
            meaning = seen["own"][0] if seen["own"] else "nothing"
            message = f"host name {seen['host']} resolves to {meaning}, where gloo listens by default"
            remedy = f"train.py needs no fix: it selects {interface_of_node(node) or 'the right interface'};"
            yield Finding(INTERFACES, NOTES, node.name, message, f"{remedy} for other programs correct /etc/hosts")
    for quantity, words in (("mtu", "MTU"), ("megabits", "speed in Mbit/s")):
        used = [node.seen[INTERFACES]["interfaces"].get(interface_of_node(node), {}) for node in nodes]
        for node, value, _, usual in odd_ones(nodes, [interface.get(quantity) for interface in used]):
            if value is not None and usual is not None:
                name = interface_of_node(node)
                message = f"the {words} of {name} is {value}; on most nodes {usual}"
                cable = "check the cable and the switch port, or exclude the node"
                remedy = f"run ip link set {name} mtu {usual}" if quantity == "mtu" else cable
                yield Finding(INTERFACES, WARNS, node.name, message, remedy)


def matches(text: str, name: str, *, exact: bool) -> bool:
    """Return whether the text of a variable selects an interface.

    Gloo takes names (``exact``). Accelerator libraries take name prefixes; ``^`` excludes them, ``=`` means full names.
    """
    if exact:
        return name in text.split(",")
    negated, text = text.startswith("^"), text.removeprefix("^")
    exact_name, text = text.startswith("="), text.removeprefix("=")
    listed = [part for part in text.split(",") if part]
    return (name in listed if exact_name else name.startswith(tuple(listed))) != negated


def interface_of_node(node: NodeState) -> str | None:
    """Return the interface with the address that other nodes use for this node."""
    interfaces = node.seen[INTERFACES]["interfaces"].items()
    return next((name for name, each in interfaces if node.address and each["address"] == node.address), None)


def _read(interface: str, name: str) -> str:
    try:
        return (_SYSTEM / interface / name).read_text(encoding="ascii").strip()
    except OSError:  # a virtual interface has no speed
        return ""


def _number(interface: str, name: str) -> int | None:
    text = _read(interface, name)
    return int(text) if text.isdigit() and int(text) > 0 else None


# Connections of all processes to the first one, which exchange JSON lines.
#
# launch/rendezvous.py needs torch and fails if a process is missing. Here a missing process is a finding, and the
# others continue.
ARRIVAL_SECONDS = 60.0
ANSWER_SECONDS = 120.0
PINGS = 7


@dataclass(frozen=True)
class ClockReading:
    """Clock of a process relative to the first process."""

    ahead: float
    """Seconds: its clock minus the clock of the first process at half of the round trip; from the fastest answer."""
    round_trip: float
    """Seconds; the error of the reading is at most half of it."""


class _Connection:
    """A connection that carries JSON lines with an HMAC of the job's secret."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._secret = connection, secret.encode()
        self._file = connection.makefile("rb")

    def send(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.connection.sendall(self._seal(text) + b" " + text + b"\n")

    def receive(self) -> Any:
        """Return the next value. Raises OSError, also for data that this job did not send."""
        seal, _, text = self._file.readline().rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(seal, self._seal(text)):
            raise ConnectionError("the connection was closed or carries data of another job")
        return json.loads(text)

    def _seal(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest().encode()


class Connections:
    """Connections of the first process with all others; with one process there is no connection."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.local_address = ""
        """Address that the other processes use for this one."""
        self._connections: dict[int, _Connection] = {}
        self._first: _Connection | None = None

    @property
    def missing(self) -> list[int]:
        """Processes that did not connect or were lost; on the first process only."""
        return [number for number in range(1, self.count) if number not in self._connections]

    def exchange(self, value: Any) -> list[Any]:
        """All-gather a JSON value over the processes; None for a missing process.

        Raises OSError if the first process is lost.
        """
        if self._first is not None:
            self._first.send(value)
            answer: list[Any] = self._first.receive()
            return answer
        values: list[Any] = [value, *[None] * (self.count - 1)]
        self._for_each_connection(lambda number, line: values.__setitem__(number, line.receive()))
        self._for_each_connection(lambda _, line: line.send(values))
        return values

    def read_clocks(self) -> list[ClockReading | None]:
        """Return all clocks on the first process, an empty list on the others; raises as ``exchange``."""
        if self._first is not None:
            for _ in range(PINGS):
                self._first.receive()
                self._first.send(time.time())
            return []
        readings: list[ClockReading | None] = [None] * self.count
        self._for_each_connection(lambda number, line: readings.__setitem__(number, _read_clock(line)))
        return readings

    def close(self) -> None:
        """Close all connections."""
        for line in [*self._connections.values(), *([self._first] if self._first else [])]:
            line.connection.close()

    def _for_each_connection(self, act: Callable[[int, _Connection], None]) -> None:
        """Call ``act`` with each connection; drop connections that fail."""
        for number, line in list(self._connections.items()):
            try:
                act(number, line)
            except (OSError, ValueError):
                line.connection.close()
                del self._connections[number]

    def _gather(self, listener: socket.socket, secret: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._connections) < self.count - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                break
            connection.settimeout(min(5.0, seconds))
            line = _Connection(connection, secret)
            try:
                number = line.receive()["number"]
            except (OSError, ValueError, TypeError, KeyError):  # not a process of this job, or a port scan
                connection.close()
                continue
            if isinstance(number, int) and 0 < number < self.count:
                self._connections[number] = line
                self.local_address = _plain(connection.getsockname()[0])

    @classmethod
    def of(cls, context: ProcessContext | None, secret: str, seconds: float = ARRIVAL_SECONDS) -> Connections:
        """Connect to the first process, which waits ``seconds`` for the others.

        Raises ConfigError for an unusable address or port, and LaunchFailed if the first process cannot be reached.
        """
        if context is None or context.world_size == 1:
            return cls()
        connections = cls(context.world_size)
        check_first_address(context)
        if context.has_store:
            context = _choose_other_port(context)
        if context.rank == 0:
            with listen(context) as listener:
                connections._gather(listener, secret, seconds)
            return connections
        wait_until_reachable(context, seconds)
        connection = socket.create_connection((context.master_addr, context.master_port), timeout=ANSWER_SECONDS)
        connections._first = _Connection(connection, secret)
        connections.local_address = _plain(connection.getsockname()[0])
        connections._first.send({"number": context.rank})
        return connections


def _choose_other_port(context: ProcessContext) -> ProcessContext:
    """Replace the port, which torchrun's agent occupies, by a free one; the agent's store passes it on.

    Raises LaunchFailed if the store is lost.
    """
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    from torch.distributed import TCPStore

    job = f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    address, port = context.master_addr, context.master_port
    try:
        limit = timedelta(seconds=ARRIVAL_SECONDS)
        store = JobStore(lambda: TCPStore(address, port, is_master=False, timeout=limit), job, "", ARRIVAL_SECONDS)
        if context.rank == 0:
            with socket.create_server(("", 0)) as probe:
                store.set("port", str(probe.getsockname()[1]))
        chosen = store.wait("port", ARRIVAL_SECONDS)
    except StoreLost as error:
        raise LaunchFailed(f"the store of torchrun's agent at {address}:{port} is lost: {error}") from error
    if chosen is None:
        raise LaunchFailed(f"process 0 sent no port through {address}:{port} within {ARRIVAL_SECONDS:g} s")
    return replace(context, master_port=int(chosen), has_store=False)


def _read_clock(line: _Connection) -> ClockReading:
    readings = []
    for _ in range(PINGS):
        start, begin = time.time(), time.perf_counter()
        line.send("time?")
        there = float(line.receive())
        round_trip = time.perf_counter() - begin
        readings.append(ClockReading(there - (start + round_trip / 2), round_trip))
    return min(readings, key=lambda reading: reading.round_trip)


def _plain(address: str) -> str:
    """Convert an IPv4-mapped IPv6 address to IPv4."""
    return address.removeprefix("::ffff:")


# TCP connections between all pairs of nodes, at any port, as the communication libraries need them.
PAIRS = "pairs"
SECONDS, ATTEMPTS = 4.0, 2
PAYLOAD = 64 << 10
"""Bytes in each direction: more than one packet, so that packets too large for a switch are detected."""
SLOW_FACTOR, SLOW_SECONDS = 10.0, 0.005
"""A slow pair has a round trip that exceeds the median by this factor and by these seconds."""
_THREADS = 16


class Echo:
    """TCP echo server on a free port."""

    def __init__(self) -> None:
        family, both = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections, and end the thread that accepts them."""
        with suppress(OSError):  # not every system wakes accept() in this way
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(1.0)

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.settimeout(SECONDS)
        while data := connection.recv(PAYLOAD):
            connection.sendall(data)


def reach_all(number: int, peers: Mapping[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Connect to each of ``peers`` (node number to address and port) and return the results of ``reach``.

    All nodes do this at once, each starting with the node after it.
    """
    order = sorted(peers, key=lambda peer: (peer < number, peer))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda peer: {"to": peer, **reach(*peers[peer])}, order))


def reach(address: str, port: int) -> dict[str, Any]:
    """Return ``seconds`` of a small round trip, or None and ``fault``."""
    fault = ""
    for _ in range(ATTEMPTS):
        try:
            with socket.create_connection((address, port), timeout=SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _round_trip(connection, PAYLOAD)
                return {"seconds": min(_round_trip(connection, 64) for _ in range(5)), "fault": ""}
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            fault = f"no answer within {SECONDS:g} s" if silent else error.strerror or str(error)
    return {"seconds": None, "fault": fault, "port": port}


def _round_trip(connection: socket.socket, size: int) -> float:
    start, left = time.perf_counter(), size
    connection.sendall(b"." * size)
    while left:
        data = connection.recv(left)
        if not data:
            raise ConnectionError("the connection was closed")
        left -= len(data)
    return time.perf_counter() - start


def judge_pairs(nodes: Sequence[NodeState], results: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Judge the results of ``reach_all``, given by node number."""
    by_number = {node.number: node for node in nodes}
    times = [each["seconds"] for attempts in results.values() for each in attempts if each["seconds"] is not None]
    usual = median_high(times) if times else 0.0
    for number, attempts in sorted(results.items()):
        for each in sorted(attempts, key=lambda one: one["to"]):
            here, there = by_number[number], by_number[each["to"]]
            where = f"{here.name} → {there.name}"
            if each["seconds"] is None:
                message = f"{here.address} cannot connect to {there.address}, port {each['port']}: {each['fault']}"
                remedy = "open TCP ports 1024 and above between the two nodes (firewall, security group)"
                yield Finding(PAIRS, BREAKS, where, message, f"{remedy}, or exclude one of them")
            elif each["seconds"] > max(SLOW_FACTOR * usual, usual + SLOW_SECONDS):
                message = f"a round trip takes {1e3 * each['seconds']:.1f} ms; the median is {1e3 * usual:.2f} ms"
                remedy = f"check the network path: run tracepath {there.address} on {here.name}"
                yield Finding(PAIRS, WARNS, where, message, remedy)
