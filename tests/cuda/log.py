"""Logs of the runtime: one per process, one line per call. ``runtime/*.cpp`` write the lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cuda.in_process import STEP_END, STEP_START

KERNELS = {
    "Triton": ("triton_",),
    "attention": ("flash_", "fmha"),
    "foreach": ("multi_tensor_apply",),
    "matmul": ("gemm", "gemv", "cutlass"),
    "concatenation": ("CatArray",),
    "cast or copy": ("copy_kernel",),
    "fill": ("FillFunctor", "arange"),
    "index": ("index", "gather", "scatter", "embedding"),
    "reduction": ("reduce_kernel", "softmax", "layer_norm", "rms_norm"),
    "elementwise": ("elementwise",),
}
"""Classes of kernels: parts of their mangled names. The first class that matches counts."""


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
    logs = [ProcessLog.read(path) for path in sorted(prefix.parent.glob(f"{prefix.name}.*[0-9]"))]
    return sorted((log for log in logs if log.calls), key=lambda log: log.rank)


def kernel_class(name: str) -> str:
    return next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "other")


def counts(calls: list[Call]) -> dict[str, Any]:
    """Count launches by class, GEMMs by shape, collectives with their bytes, waits of the host, and copies."""
    gemms = Counter(f"{c.fields['batches']}x{c.fields['shape']}:{c.fields['types']}" for c in calls if c.name == "GEMM")
    copies = Counter(f"{c.fields['from']} to {c.fields['to']}" for c in calls if c.name == "COPY")
    kernels = Counter(kernel_class(call.fields["name"]) for call in calls if call.name == "KERNEL")
    collectives: dict[str, list[int]] = {}
    for call in calls:
        if call.name == "NCCL" and "bytes" in call.fields:
            total = collectives.setdefault(f"{call.fields['name']} of {call.fields['size']}", [0, 0])
            total[0] += 1
            total[1] += call.number("bytes")
    return {
        "launches": dict(sorted(kernels.items())),
        "gemms": dict(sorted(gemms.items())),
        "collectives": {name: {"calls": n, "bytes": size} for name, (n, size) in sorted(collectives.items())},
        "waits": sum(call.name == "SYNC" for call in calls),
        "copies": dict(sorted(copies.items())),
    }


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any], name: str = "") -> list[str]:
    """Return a line for each count that differs: its name, the expected and the actual count."""
    lines: list[str] = []
    for key in sorted({*expected, *actual}):
        before, after = expected.get(key, 0), actual.get(key, 0)
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            lines += differences(before or {}, after or {}, f"{name}{key}: ")
        elif before != after:
            lines.append(f"{name}{key}: {before} expected, {after} counted")
    return lines
