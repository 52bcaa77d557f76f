"""Chrome trace and memory of a step.

The trace of torch's profiler gets rows for the modules and waits of ``Clock``, and one process per rank, so that traces
of several ranks can be viewed together. Memory over time comes from its allocation events.
"""

from __future__ import annotations

import bisect
import gzip
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.profiler import profile

from megatron_llama.system.files import atomic_open
from megatron_llama.tools.figures import MemoryTimeline, peak_indices
from megatron_llama.tools.measured_steps import BACKWARD, FORWARD
from megatron_llama.topology import AXIS_NAMES, Topology

MODULES, WAITS = "modules", "waits"
"""Row names of the clock in a trace."""
BEFORE = "allocated before the step"
GPU_PROCESSES = 1_000_000
"""Added to the process numbers of GPUs in a trace, once per rank: more than there are ranks."""


def step_name(number: int) -> str:
    """Return the name of the step's range in the trace."""
    return f"step {number}"


def renumber(events: Sequence[dict[str, Any]], process: int, rank: int) -> None:
    """Give the events of ``process`` the number of the rank, and events of each GPU another number.

    torch numbers GPUs from 0, as ranks.
    """
    for event in events:
        if event.get("pid") == process:
            event["pid"] = rank
        elif isinstance(event.get("pid"), int):
            event["pid"] += GPU_PROCESSES * (rank + 1)


def finish_trace(
    profiler: profile, folder: Path, topology: Topology, moves: Sequence[tuple[float, Zone]], number: int
) -> MemoryTimeline | None:
    """Write ``trace.rankN.json.gz``; return the memory of the step, None without allocations. Raises OSError."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    step = next(event for event in events if event.get("name") == step_name(number) and event.get("ph") == "X")
    shift = step["ts"] - moves[0][0] * 1e6  # converts seconds of the clock to microseconds of the trace
    ends = [begin for begin, _ in moves[1:]]
    spans = [(begin * 1e6 + shift, (end - begin) * 1e6, zone) for (begin, zone), end in zip(moves, ends, strict=False)]
    renumber(events, step["pid"], topology.rank)
    process_name = f"rank {topology.rank} ({', '.join(f'{axis} {topology.place[axis]}' for axis in AXIS_NAMES)})"
    events.append({"ph": "M", "name": "process_name", "pid": topology.rank, "tid": 0, "args": {"name": process_name}})
    for begin, duration, zone in spans:
        name, row = zone.wait or f"{zone.phase} {zone.module}".rstrip(), WAITS if zone.wait else MODULES
        event = {"ph": "X", "cat": row, "name": name, "pid": topology.rank, "tid": row, "ts": begin, "dur": duration}
        events += [event] if duration > 0 else []
    with atomic_open(folder / f"trace.rank{topology.rank}.json.gz") as file:
        file.write(gzip.compress(json.dumps(trace).encode(), compresslevel=5))
    return memory_of(events, spans)


def memory_of(events: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float, Zone]]) -> MemoryTimeline | None:
    """Return live bytes by origin, of the accelerator if there is one, else of the CPU."""
    changes = [event for event in events if event.get("name") == "[memory]"]
    if not changes or not spans:
        return None
    kind_of_device = max(change["args"]["Device Type"] for change in changes)  # 0 is CPU
    changes = sorted((c for c in changes if c["args"]["Device Type"] == kind_of_device), key=lambda c: c["ts"])
    begins = [begin for begin, _, _ in spans]
    kinds, owner = {BEFORE: 0}, dict[int, str]()
    rows = np.zeros((len(changes), 2), np.int64)  # (index of the kind, difference in bytes)
    for row, change in zip(rows, changes, strict=True):
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        if size > 0:
            owner[address] = _kind(spans[max(0, bisect.bisect_right(begins, change["ts"]) - 1)][2])
        kind = owner.pop(address, BEFORE) if size < 0 else owner[address]
        row[:] = kinds.setdefault(kind, len(kinds)), size
    steps = np.zeros((len(rows), len(kinds)), np.int64)
    steps[np.arange(len(rows)), rows[:, 0]] = rows[:, 1]
    alive = steps.cumsum(axis=0)
    # Tensors that existed before the profiler and are freed in the step would make the count negative.
    first = changes[0]["args"]
    alive[:, 0] += max(first["Total Allocated"] - first["Bytes"], -int(alive[:, 0].min()))
    chosen = peak_indices(alive.sum(axis=1))
    milliseconds = np.array([(change["ts"] - begins[0]) / 1000 for change in changes])
    return MemoryTimeline(tuple(kinds), milliseconds[chosen], alive[chosen], tuple(_passes(spans)))


def _passes(spans: Sequence[tuple[float, float, Zone]]) -> Iterator[tuple[float, str]]:
    counts: Counter[str] = Counter()
    last = ""
    for begin, _, zone in spans:
        if zone.phase != last and zone.phase in (FORWARD, BACKWARD, OPTIMIZER):
            letter = zone.phase[0].upper()
            yield (begin - spans[0][0]) / 1000, letter if zone.phase == OPTIMIZER else f"{letter}{counts[letter]}"
            counts[letter] += 1
        last = zone.phase


def _kind(zone: Zone) -> str:
    """Return the origin of an allocation; by part of the block in forward, where tensors are saved for backward."""
    if zone.phase != FORWARD:
        return "backward pass" if zone.phase == BACKWARD else zone.phase
    parts = zone.module.split(".")
    if parts[0] != "layers":
        return "forward: logits and loss" if parts[0] in ("lm_head", "") else "forward: embedding, norm"
    if len(parts) == 2:
        return "forward: gathered weights, residual sums"
    return "forward: norms" if parts[2].endswith("layernorm") else f"forward: {parts[2]}"


# Time of a rank, divided into zones: a pass of a module, a wait, the optimizer, the rest.
NORM, OPTIMIZER, REST = "gradient norm", "optimizer", "rest"


class Zone(NamedTuple):
    """Activity of a rank."""

    phase: str
    module: str = ""
    """Name of the module in its chunk in forward and backward; "" for the chunk itself."""
    wait: str = ""
    """Axis and kind of the collective that it waits for, such as "tp all_reduce"."""


class Clock:
    """Clock that attributes time to zones. Not thread-safe; the autograd thread runs while the main thread waits."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        """Args:
        synchronize: Waits for the device, so that its time is attributed to the right zone.
        """
        self._synchronize = synchronize
        self._since = 0.0
        self.zone = Zone(REST)
        self.seconds: dict[Zone, float] = defaultdict(float)
        self.visits: dict[Zone, int] = defaultdict(int)
        self.moves: list[tuple[float, Zone]] | None = None
        """Entries into zones with their ``time.perf_counter``; None: not recorded."""

    def start(self) -> None:
        """Start counting time."""
        self._synchronize()
        self.zone, self._since = Zone(REST), time.perf_counter()
        if self.moves is not None:
            self.moves.append((self._since, self.zone))

    def move(self, zone: Zone) -> Zone:
        """Enter ``zone``; return the previous zone."""
        self._synchronize()
        end, previous = time.perf_counter(), self.zone
        self.seconds[previous] += end - self._since
        self.visits[zone] += 1
        self.zone, self._since = zone, end
        if self.moves is not None:
            self.moves.append((end, zone))
        return previous

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Mark the current zone as waiting for ``name`` inside the context."""
        return self.inside(self.zone._replace(wait=name))

    @contextmanager
    def inside(self, zone: Zone) -> Iterator[None]:
        """Enter ``zone`` inside the context."""
        previous = self.move(zone)
        try:
            yield
        finally:
            self.move(previous)
