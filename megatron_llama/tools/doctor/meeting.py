"""Where the nodes' first processes meet before anything else runs: lines of JSON, over one connection to the first.

Rendezvous (launch/rendezvous.py) is stricter, needs torch and ends a job whose processes don't all come. Here those who
do come go on, and who is missing is a finding.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.rendezvous import check_first_address, listen, wait_until_reachable

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
