"""The Chrome trace of a step: torch's profiler's, with the modules and waits of the clock above its operators, and one
process per rank, so that the traces of several ranks can be looked at together. And the step's memory over time, from
the births and deaths of tensors in it."""

from __future__ import annotations

import bisect
import gzip
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile

from megatron_llama.system.files import atomic_open
from megatron_llama.topology import Topology
from megatron_llama.train.profile.clock import BACKWARD, FORWARD, Zone

MODULES, WAITS = "modules", "waits"
"""Names of the clock's rows in a trace."""
BEFORE = "there before the step"
MOST_POINTS = 1500
"""Of memory over time; each is the highest of those that it stands for."""


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on a rank's device over a step."""

    kinds: tuple[str, ...]
    """What they were made in."""
    seconds: list[float]
    """Since the step began."""
    bytes: list[tuple[int, ...]]
    """At each of these moments, by kind."""
    marks: list[tuple[float, str]]
    """When each pass begins: forward, backward or optimizer."""

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return max(map(sum, self.bytes))


def step_name(number: int) -> str:
    """The name of the range in the trace that is the step."""
    return f"step {number}"


def finish_trace(
    profiler: profile, folder: Path, topology: Topology, moves: Sequence[tuple[float, Zone]], number: int
) -> Memory | None:
    """Writes ``trace.rankN.json.gz``; returns the memory of the step, None where nothing was made. Raises OSError."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    step = next(event for event in events if event.get("name") == step_name(number) and event.get("ph") == "X")
    shift = step["ts"] - moves[0][0] * 1e6  # from the clock's seconds to the trace's microseconds
    ends = [begin for begin, _ in moves[1:]]
    spans = [(begin * 1e6 + shift, (end - begin) * 1e6, zone) for (begin, zone), end in zip(moves, ends, strict=False)]
    for event in events:
        if event.get("pid") == step["pid"]:
            event["pid"] = topology.rank
    named = f"rank {topology.rank} (tp {topology.tp_rank}, pp {topology.pp_rank}, dp {topology.dp_rank})"
    events.append({"ph": "M", "name": "process_name", "pid": topology.rank, "tid": 0, "args": {"name": named}})
    events += [_event(topology.rank, begin, duration, zone) for begin, duration, zone in spans if duration > 0]
    with atomic_open(folder / f"trace.rank{topology.rank}.json.gz") as file:
        file.write(gzip.compress(json.dumps(trace).encode(), compresslevel=5))
    return _memory(events, spans)


def _event(rank: int, begin: float, duration: float, zone: Zone) -> dict[str, Any]:
    name = zone.wait or " ".join(filter(None, (zone.phase, zone.module)))
    row = WAITS if zone.wait else MODULES
    return {"ph": "X", "cat": row, "name": name, "pid": rank, "tid": row, "ts": begin, "dur": duration}


def _memory(events: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float, Zone]]) -> Memory | None:
    """Bytes by what made them. Of a machine with an accelerator, the accelerator's."""
    changes = [event for event in events if event.get("name") == "[memory]"]
    if not changes or not spans:
        return None
    kind_of_device = max(change["args"]["Device Type"] for change in changes)  # the CPU's is 0
    changes = sorted((c for c in changes if c["args"]["Device Type"] == kind_of_device), key=lambda c: c["ts"])
    begins = [begin for begin, _, _ in spans]
    owner: dict[int, str] = {}
    alive: dict[str, int] = {BEFORE: changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]}
    points: list[tuple[float, dict[str, int]]] = []
    for change in changes:
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        at = bisect.bisect_right(begins, change["ts"]) - 1
        if size > 0:
            owner[address] = kind = _kind(spans[max(at, 0)][2])
        else:
            kind = owner.pop(address, BEFORE)
        alive[kind] = alive.get(kind, 0) + size
        points.append(((change["ts"] - begins[0]) / 1e6, dict(alive)))
    return _thinned(points, tuple(alive), spans)


def _thinned(
    points: Sequence[tuple[float, dict[str, int]]], kinds: tuple[str, ...], spans: Sequence[tuple[float, float, Zone]]
) -> Memory:
    every = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + every] for start in range(0, len(points), every)]
    chosen = [max(group, key=lambda point: sum(point[1].values())) for group in groups]
    # Tensors that were there before the step and die in it: the CPU's profiler counts from where it began.
    low = min(0, *(alive.get(BEFORE, 0) for _, alive in chosen))
    rows = [tuple(alive.get(kind, 0) - low * (kind == BEFORE) for kind in kinds) for _, alive in chosen]
    marks: list[tuple[float, str]] = []
    for begin, _, zone in spans:
        if not marks or marks[-1][1] != zone.phase:
            marks.append(((begin - spans[0][0]) / 1e6, zone.phase))
    return Memory(kinds, [seconds for seconds, _ in chosen], rows, marks)


def _kind(zone: Zone) -> str:
    """Forward passes by the part of the block, since that is what stays for the backward pass."""
    if zone.phase != FORWARD:
        return "backward pass" if zone.phase == BACKWARD else zone.phase
    parts = zone.module.split(".")
    if parts[0] != "layers":
        return {"lm_head": "forward: logits and loss", "": "forward: logits and loss"}.get(
            parts[0], "forward: the rest"
        )
    inner = parts[2] if len(parts) > 2 else "the rest"
    return "forward: norms" if inner.endswith("layernorm") else f"forward: {inner}"
