"""Finds memory that two streams use without an order between them, and waits of the host in a step.

The order of calls comes from the log, as vector clocks. A call of a stream follows earlier calls of that stream, events
that the stream waits for, and all work that the host has waited for. Copies, fills and collectives are in each
log, operators if the run has recorded them (``in_process.ACCESSES``). Two uses of the same bytes, one of which is a
write, must have an order. Memory that was freed and allocated again counts as the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.cuda.log import Call, ProcessLog

Clock = dict[str, int]
BLOCK_BYTES = 512
"""Accesses are compared by blocks of this size, in which torch's allocator places tensors."""


@dataclass(frozen=True)
class Access:
    """A read or write of a range of addresses by a call of a stream."""

    stream: str
    time: int
    writes: bool
    text: str

    def __str__(self) -> str:
        return f"{self.text} on stream {self.stream} ({'write' if self.writes else 'read'})"


@dataclass
class Block:
    """The last accesses of a block of memory: one write, and the reads since then by stream."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


def conflicts(log: ProcessLog) -> list[str]:
    """Return a line for each pair of calls that use the same memory on two streams without an order."""
    order, blocks, lines = Order(log), dict[int, Block](), dict[str, None]()
    for call in log.calls:
        stream, clock = order.add(call)
        if stream is None:
            continue
        for start, size, writes in accesses(call):
            access = Access(stream, clock[stream], writes, describe(call))
            for number in range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES)):
                for earlier in _use(blocks.setdefault(number, Block()), access):
                    if clock.get(earlier.stream, 0) < earlier.time:
                        lines[f"{earlier} and later {access} have no order"] = None
    return list(lines)


def _use(block: Block, access: Access) -> list[Access]:
    """Add an access to a block; return the earlier accesses that must come before it."""
    earlier = [block.write] if block.write else []
    if access.writes:
        earlier += block.reads.values()
        block.write, block.reads = access, {}
    else:
        block.reads[access.stream] = access
    return [other for other in earlier if other.stream != access.stream]


class Order:
    """The order of calls of a process."""

    def __init__(self, log: ProcessLog) -> None:
        self._streams: dict[str, Clock] = {}
        self._events: dict[str, Clock] = {}
        self._communicators: dict[str, Clock] = {}
        self._host: Clock = {}
        launching = {call.thread for call in log.calls if call.name in ("KERNEL", "GEMM", "COPY", "NCCL", "ACCESS")}
        self._threads = launching
        """Threads that use streams. Others only watch: NCCL's watchdog orders no work."""

    def add(self, call: Call) -> tuple[str | None, Clock]:
        """Add a call. Return its stream and clock, or None if it does no work on a stream."""
        if call.name in ("SYNC", "QUERY"):
            self._wait(call)
            return None, {}
        stream = call.fields.get("stream")
        if stream is None:
            return None, {}
        clock = self._streams.setdefault(stream, {})
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        match call.name:
            case "RECORD":
                self._events[call.fields["event"]] = dict(clock)
            case "WAIT":
                _join(clock, self._events.get(call.fields["event"], {}))
            case "NCCL":  # NCCL runs the calls of a communicator in the order of the host
                last = self._communicators.setdefault(call.fields["comm"], {})
                _join(clock, last)
                _join(last, clock)
            case "COPY" if "pageable" in (call.fields["from"], call.fields["to"]):
                _join(self._host, clock)
        return stream, dict(clock)

    def _wait(self, call: Call) -> None:
        """Let all later calls follow the work that the host has waited for, or has found finished."""
        if call.thread not in self._threads or call.fields.get("done") == "0":
            return
        match call.fields["kind"]:
            case "device":
                for clock in self._streams.values():
                    _join(self._host, clock)
            case "stream":
                _join(self._host, self._streams.get(call.fields["stream"], {}))
            case "event":
                _join(self._host, self._events.get(call.fields["event"], {}))


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def accesses(call: Call) -> Iterator[tuple[int, int, bool]]:
    """Return (address, bytes, whether it writes) of the memory that a call uses on the device."""
    for kind in ("read", "written"):
        for text in filter(None, call.fields.get(kind, "").split(";")):
            address, _, size = text.partition(",")
            if address != "(nil)":  # a message of 0 bytes
                yield int(address, 0), int(size or call.fields["bytes"]), kind == "written"


def describe(call: Call) -> str:
    return call.fields.get("name") or call.name.lower()
