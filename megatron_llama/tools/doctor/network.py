"""Each node's network interfaces and addresses: which one gloo and an accelerator's library would take, and what leads
them astray."""
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
from pathlib import Path
from statistics import median_high
from typing import Any

from megatron_llama.launch.environment import ProcessContext, address_of_interface, addresses_of, is_loopback
from megatron_llama.launch.rendezvous import check_first_address, listen, wait_until_reachable
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, WARNS, Finding, Node, majority

INTERFACES = "interfaces"
GLOO = "GLOO_SOCKET_IFNAME"
"""Gloo carries checkpoints' agreements on every device, and all of a CPU's collectives."""
_SYSTEM = Path("/sys/class/net")


def observe_interfaces(variable: str) -> dict[str, Any]:
    """Interfaces, what the host's own name means, and the variables that choose an interface; ``variable`` is the
    device's."""
    name = socket.gethostname()
    own: list[str] = []
    with suppress(OSError):
        own = addresses_of(name)
    found = {}
    for _, interface in socket.if_nameindex():
        found[interface] = {
            "address": address_of_interface(interface),
            "mtu": _number(interface, "mtu"),
            "megabits": _number(interface, "speed"),
            "up": _read(interface, "operstate") != "down",
        }
    asked = {key: os.environ[key] for key in dict.fromkeys((GLOO, variable)) if os.environ.get(key)}
    return {"host": name, "own": own, "interfaces": found, "asked": asked}


def judge_interfaces(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Variables that name interfaces that are not there, names that lead to the loopback, and slower or odd networks.
    One node alone needs none."""
    if len(nodes) == 1:
        return
    for node in nodes:
        seen = node.seen[INTERFACES]
        usable = {name: each for name, each in seen["interfaces"].items() if each["up"] and each["address"]}
        for variable, text in seen["asked"].items():
            taken = [name for name in usable if matches(text, name, exact=variable == GLOO)]
            outside = [name for name in taken if not is_loopback(usable[name]["address"])]
            if not outside:
                what = f"{variable}={text} chooses {'only the loopback' if taken else 'none of its interfaces'}"
                listed = ", ".join(f"{name} ({each['address']})" for name, each in usable.items())
                good = interface_of_node(node)
                remedy = f"set {variable}={good}, or unset it" if good else _UNSET
                yield Finding(INTERFACES, BREAKS, node.name, f"{what}; it has {listed}", remedy)
        if GLOO not in seen["asked"] and (not seen["own"] or is_loopback(seen["own"][0])):
            meaning = seen["own"][0] if seen["own"] else "nothing"
            what = f"its name {seen['host']} means {meaning} there, where gloo would listen by itself"
            remedy = f"nothing for train.py, which names {interface_of_node(node) or 'the right interface'}; for other"
            yield Finding(INTERFACES, NOTES, node.name, what, f"{remedy} programs correct /etc/hosts")
    for quantity, words in (("mtu", "MTU"), ("megabits", "speed in Mbit/s")):
        values = [_used(node).get(quantity) for node in nodes]
        usual = majority(values)
        for node, value in zip(nodes, values, strict=True):
            if value is not None and usual is not None and value != usual:
                what = f"the {words} of {interface_of_node(node)} is {value}, and elsewhere {usual}"
                remedy = f"ip link set {interface_of_node(node)} mtu {usual}" if quantity == "mtu" else _CABLE
                yield Finding(INTERFACES, WARNS, node.name, what, remedy)


_UNSET = "unset it: train.py finds the interface that leads to the first node"
_CABLE = "look at the cable and the port of the switch, or leave the node out"


def matches(text: str, name: str, *, exact: bool) -> bool:
    """Whether a variable's text chooses an interface: gloo wants its name; the accelerators' libraries take the
    beginnings of names, with ^ before all but those, with = whole names."""
    if exact:
        return name in text.split(",")
    negated, text = text.startswith("^"), text.removeprefix("^")
    whole, text = text.startswith("="), text.removeprefix("=")
    listed = [part for part in text.split(",") if part]
    found = name in listed if whole else any(name.startswith(part) for part in listed)
    return found != negated


def interface_of_node(node: Node) -> str | None:
    """The interface that has the address by which the others know the node."""
    interfaces = node.seen[INTERFACES]["interfaces"].items()
    return next((name for name, each in interfaces if node.address and each["address"] == node.address), None)


def _used(node: Node) -> dict[str, Any]:
    name = interface_of_node(node)
    return node.seen[INTERFACES]["interfaces"][name] if name else {}


def _read(interface: str, name: str) -> str:
    try:
        return (_SYSTEM / interface / name).read_text(encoding="ascii").strip()
    except OSError:  # a virtual interface has no speed
        return ""


def _number(interface: str, name: str) -> int | None:
    text = _read(interface, name)
    return int(text) if text.isdigit() and int(text) > 0 else None


# Where the nodes' first processes meet before anything else runs: lines of JSON, over one connection to the first.
#
# Rendezvous (launch/rendezvous.py) is stricter, needs torch and ends a job whose processes don't all come. Here those
# who do come go on, and who is missing is a finding.


ARRIVAL_SECONDS = 60.0
ANSWER_SECONDS = 120.0
PINGS = 7


@dataclass(frozen=True)
class ClockReading:
    """What the first process found of another's clock."""

    ahead: float
    """Seconds, by the quickest of some answers: its clock less the first one's at half of the round trip."""
    round_trip: float
    """Seconds; the reading is wrong by at most half of it."""


class _Line:
    """One connection: JSON values as sealed lines."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._secret = connection, secret.encode()
        self._file = connection.makefile("rb")

    def send(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.connection.sendall(self._seal(text) + b" " + text + b"\n")

    def receive(self) -> Any:
        """The next value. Raises OSError, also for what was not sent by this job."""
        seal, _, text = self._file.readline().rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(seal, self._seal(text)):
            raise ConnectionError("the connection has ended, or carries what this job has not sent")
        return json.loads(text)

    def _seal(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest().encode()


class Meeting:
    """All processes of one start, or those that have come; a process alone meets itself."""

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.number, self.count = number, count
        self.own_address = ""
        """As the others know this process; the first one's as the way to the others says."""
        self.addresses: list[str] = [""] * count
        """For the first process: the others' addresses."""
        self._lines: dict[int, _Line] = {}
        self._first: _Line | None = None

    @property
    def missing(self) -> list[int]:
        """For the first process: the numbers of who has not come or is lost."""
        return [number for number in range(1, self.count) if number not in self._lines]

    def exchange(self, value: Any) -> list[Any]:
        """Every process gives a value and gets all of them, by number; None for who is missing. Raises OSError where
        the first process is lost."""
        if self._first is not None:
            self._first.send(value)
            answer: list[Any] = self._first.receive()
            return answer
        values: list[Any] = [value, *[None] * (self.count - 1)]
        self._with_each(lambda number, line: values.__setitem__(number, line.receive()))
        self._with_each(lambda _, line: line.send(values))
        return values

    def read_clocks(self) -> list[ClockReading | None]:
        """The first process asks all others for their time; they get an empty list. Raises OSError as ``exchange``."""
        if self._first is not None:
            for _ in range(PINGS):
                self._first.receive()
                self._first.send(time.time())
            return []
        readings: list[ClockReading | None] = [None] * self.count
        self._with_each(lambda number, line: readings.__setitem__(number, _read_clock(line)))
        return readings

    def close(self) -> None:
        """Ends all connections."""
        for line in [*self._lines.values(), *([self._first] if self._first else [])]:
            line.connection.close()

    def _with_each(self, act: Callable[[int, _Line], None]) -> None:
        """Does something with each connection; who fails is lost."""
        for number, line in list(self._lines.items()):
            try:
                act(number, line)
            except (OSError, ValueError):
                line.connection.close()
                del self._lines[number]

    def _gather(self, listener: socket.socket, secret: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._lines) < self.count - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, address = listener.accept()
            except TimeoutError:
                break
            connection.settimeout(min(5.0, seconds))
            line = _Line(connection, secret)
            try:
                number = line.receive()["number"]
            except (OSError, ValueError, TypeError, KeyError):  # a stranger, or somebody who only looked
                connection.close()
                continue
            if isinstance(number, int) and 0 < number < self.count:
                self._lines[number] = line
                self.addresses[number] = _plain(address[0])
                self.own_address = self.addresses[0] = _plain(connection.getsockname()[0])

    @classmethod
    def of(cls, context: ProcessContext | None, secret: str, seconds: float = ARRIVAL_SECONDS) -> Meeting:
        """Meets the other processes of a start; the first one waits for them for so many seconds.

        Raises ConfigError for an address or a port that can't be used, and LaunchFailed where the first process can't
        be reached.
        """
        if context is None or context.world_size == 1:
            return cls()
        meeting = cls(context.rank, context.world_size)
        check_first_address(context)
        if context.has_store:
            context = _beside_store(context)
        if context.rank == 0:
            with listen(context) as listener:
                meeting._gather(listener, secret, seconds)
            return meeting
        wait_until_reachable(context, seconds)
        connection = socket.create_connection((context.master_addr, context.master_port), timeout=ANSWER_SECONDS)
        meeting._first = _Line(connection, secret)
        meeting.own_address = _plain(connection.getsockname()[0])
        meeting._first.send({"number": context.rank})
        return meeting


def _beside_store(context: ProcessContext) -> ProcessContext:
    """torchrun's agent has the port itself; another one, which the first process chooses, stands in the agent's
    store."""
    from torch.distributed import TCPStore

    store = TCPStore(context.master_addr, context.master_port, is_master=False)
    key = f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if context.rank == 0:
        with socket.create_server(("", 0)) as probe:
            store.set(key, str(probe.getsockname()[1]))
    return replace(context, master_port=int(store.get(key)), has_store=False)


def _read_clock(line: _Line) -> ClockReading:
    best: ClockReading | None = None
    for _ in range(PINGS):
        start, begin = time.time(), time.perf_counter()
        line.send("time?")
        there = float(line.receive())
        round_trip = time.perf_counter() - begin
        if best is None or round_trip < best.round_trip:
            best = ClockReading(there - (start + round_trip / 2), round_trip)
    assert best is not None, "PINGS is more than none"
    return best


def _plain(address: str) -> str:
    """An IPv4 address that a socket for both families gives in IPv6's form, in its own."""
    return address.removeprefix("::ffff:")


# Whether every node reaches every other one by TCP at any port, as the ranks' libraries do, and how quickly.


PAIRS = "pairs"
SECONDS, ATTEMPTS = 4.0, 2
PAYLOAD = 64 << 10
"""Bytes there and back: more than a packet, so that one which is too large for some switch on the way is found."""
SLOWER, MORE_SECONDS = 10.0, 0.005
"""A pair is slow whose round trip is both, many times and much more than that of the middle one."""
_THREADS = 16


class Echo:
    """A port on this node, chosen by the system, that sends back what it gets."""

    def __init__(self) -> None:
        family, both = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="echo", daemon=True).start()

    def close(self) -> None:
        """No further connections."""
        self._listener.close()

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


def reach_all(own: int, peers: Mapping[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """What becomes of a connection to each of ``peers``, by number (address, port): seconds of a round trip, or why
    there is none. All nodes do this at once, each beginning with the one after it."""
    order = sorted(peers, key=lambda number: (number < own, number))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda number: {"to": number, **reach(*peers[number])}, order))


def reach(address: str, port: int) -> dict[str, Any]:
    """One connection: ``seconds`` of a small round trip, or None and ``fault``."""
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


def judge_pairs(nodes: Sequence[Node], results: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """``results``: those of ``reach_all``, by the number of the node that tried."""
    by_number = {node.number: node for node in nodes}
    times = [each["seconds"] for found in results.values() for each in found if each["seconds"] is not None]
    usual = median_high(times) if times else 0.0
    for number, found in sorted(results.items()):
        for each in sorted(found, key=lambda one: one["to"]):
            here, there = by_number[number], by_number[each["to"]]
            where = f"{here.name} → {there.name}"
            if each["seconds"] is None:
                what = f"{here.address} can't connect to {there.address}, port {each['port']}: {each['fault']}"
                remedy = "open TCP between the two at all ports from 1024 up (firewall, security group)"
                yield Finding(PAIRS, BREAKS, where, what, f"{remedy}, or leave one of them out")
            elif each["seconds"] > max(SLOWER * usual, usual + MORE_SECONDS):
                what = f"a round trip takes {1e3 * each['seconds']:.1f} ms, and {1e3 * usual:.2f} ms between most nodes"
                remedy = f"look at the way between them: tracepath {there.address} on {here.name}"
                yield Finding(PAIRS, WARNS, where, what, remedy)
