"""Logs of the runtime: one per process, one line per call. ``runtime/*.cpp`` write the lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.cuda.in_process import STEP_END, STEP_START


@dataclass(frozen=True)
class Call:
    """A line of a log: time of a monotonic clock in seconds, thread, name of the call, fields."""

    seconds: float
    thread: int
    name: str
    fields: dict[str, str]

    @classmethod
    def parse(cls, line: str) -> Call:
        seconds, thread, name, *pairs = line.split(" ")
        return cls(float(seconds), int(thread), name, dict(pair.split("=", 1) for pair in pairs if "=" in pair))

    def number(self, field: str) -> int:
        return int(self.fields[field], 0)


@dataclass(frozen=True)
class ProcessLog:
    """The calls of a process, in their order."""

    rank: int
    calls: tuple[Call, ...]

    @classmethod
    def read(cls, path: Path) -> ProcessLog:
        calls = tuple(map(Call.parse, path.read_text().splitlines()))
        return cls(calls[0].number("rank"), calls[1:])

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    @cached_property
    def steps(self) -> dict[int, list[Call]]:
        """The calls of each training step, without logging and saving after the step."""
        steps: dict[int, list[Call]] = {}
        current: list[Call] = []
        for call in self.calls:
            if call.name == "MARK" and call.fields.get("event") == STEP_START:
                current = steps[call.number("step")] = []
            elif call.name == "MARK" and call.fields.get("event") == STEP_END:
                current = []
            current.append(call)
        return steps


def read_logs(prefix: Path) -> list[ProcessLog]:
    """Return the logs of all processes of a run that called the runtime, by rank."""
    paths = sorted(prefix.parent.glob(f"{prefix.name}.*[0-9]"))
    logs = [ProcessLog.read(path) for path in paths]
    return sorted((log for log in logs if log.calls), key=lambda log: log.rank)


def counts(calls: list[Call]) -> dict[str, object]:
    """Count launches, matrix multiplications by shape, collectives with bytes, waits of the host and copies."""
    gemms = Counter(f"{c.fields['batches']}x{c.fields['shape']}:{c.fields['types']}" for c in calls if c.name == "GEMM")
    copies = Counter(f"{c.fields['from']} to {c.fields['to']}" for c in calls if c.name == "COPY")
    collectives: dict[str, list[int]] = {}
    for call in calls:
        if call.name == "NCCL" and "bytes" in call.fields:
            total = collectives.setdefault(f"{call.fields['name']} of {call.fields['size']}", [0, 0])
            total[0] += 1
            total[1] += call.number("bytes")
    return {
        "launches": sum(call.name == "KERNEL" for call in calls),
        "gemms": dict(sorted(gemms.items())),
        "collectives": {name: {"calls": n, "bytes": size} for name, (n, size) in sorted(collectives.items())},
        "waits": sum(call.name == "SYNC" for call in calls),
        "copies": dict(sorted(copies.items())),
    }
