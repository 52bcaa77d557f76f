"""The Chrome trace of a step: torch's profiler's, with the modules and waits of the clock above its operators, and one
process per rank, so that the traces of several ranks can be looked at together. And the step's memory over time, from
the births and deaths of tensors in it."""
from __future__ import annotations

import bisect
import gzip
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.profiler import profile

from megatron_llama.system.files import atomic_open
from megatron_llama.tools.memory_picture import peak_indices
from megatron_llama.topology import AXIS_NAMES, Topology

MODULES, WAITS = "modules", "waits"
"""Names of the clock's rows in a trace."""
BEFORE = "there before the step"


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors on a rank's device over a step."""

    kinds: tuple[str, ...]
    """What they were made in."""
    seconds: Any
    """Since the step began: fp64 array [moments]."""
    bytes: Any
    """Alive then, by kind: int64 array [moments, kinds]."""
    passes: tuple[tuple[float, str], ...]
    """Where each begins: F0 for the first forward pass, B0 for the first backward pass, and the optimizer."""

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return int(self.bytes.sum(axis=1).max())


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
    process = step["pid"]
    for event in events:
        if event.get("pid") == process:
            event["pid"] = topology.rank
    named = f"rank {topology.rank} ({', '.join(f'{axis} {topology.place[axis]}' for axis in AXIS_NAMES)})"
    events.append({"ph": "M", "name": "process_name", "pid": topology.rank, "tid": 0, "args": {"name": named}})
    events += [_event(topology.rank, begin, duration, zone) for begin, duration, zone in spans if duration > 0]
    with atomic_open(folder / f"trace.rank{topology.rank}.json.gz") as file:
        file.write(gzip.compress(json.dumps(trace).encode(), compresslevel=5))
    return memory_of(events, spans)


def _event(rank: int, begin: float, duration: float, zone: Zone) -> dict[str, Any]:
    name = zone.wait or " ".join(filter(None, (zone.phase, zone.module)))
    row = WAITS if zone.wait else MODULES
    return {"ph": "X", "cat": row, "name": name, "pid": rank, "tid": row, "ts": begin, "dur": duration}


def memory_of(events: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float, Zone]]) -> Memory | None:
    """Bytes by what made them. Of a machine with an accelerator, the accelerator's."""
    changes = [event for event in events if event.get("name") == "[memory]"]
    if not changes or not spans:
        return None
    kind_of_device = max(change["args"]["Device Type"] for change in changes)  # the CPU's is 0
    changes = sorted((c for c in changes if c["args"]["Device Type"] == kind_of_device), key=lambda c: c["ts"])
    begins = [begin for begin, _, _ in spans]
    kinds, owner = {BEFORE: 0}, dict[int, str]()
    rows = np.zeros((len(changes), 2), np.int64)  # (number of the kind, bytes more)
    for row, change in zip(rows, changes, strict=True):
        size, address = change["args"]["Bytes"], change["args"]["Addr"]
        if size > 0:
            owner[address] = _kind(spans[max(0, bisect.bisect_right(begins, change["ts"]) - 1)][2])
        kind = owner.pop(address, BEFORE) if size < 0 else owner[address]
        row[:] = kinds.setdefault(kind, len(kinds)), size
    steps = np.zeros((len(rows), len(kinds)), np.int64)
    steps[np.arange(len(rows)), rows[:, 0]] = rows[:, 1]
    alive = steps.cumsum(axis=0)
    # Counted from where the profiler began, tensors of before that die in the step would make it negative.
    first = changes[0]["args"]
    alive[:, 0] += max(first["Total Allocated"] - first["Bytes"], -int(alive[:, 0].min()))
    chosen = peak_indices(alive.sum(axis=1))
    seconds = np.array([(change["ts"] - begins[0]) / 1e6 for change in changes])
    return Memory(tuple(kinds), seconds[chosen], alive[chosen], tuple(_passes(spans)))


def _passes(spans: Sequence[tuple[float, float, Zone]]) -> Iterator[tuple[float, str]]:
    counts: Counter[str] = Counter()
    last = ""
    for begin, _, zone in spans:
        if zone.phase != last and zone.phase in (FORWARD, BACKWARD, OPTIMIZER):
            letter = zone.phase[0].upper()
            yield (begin - spans[0][0]) / 1e6, letter if zone.phase == OPTIMIZER else f"{letter}{counts[letter]}"
            counts[letter] += 1
        last = zone.phase


def _kind(zone: Zone) -> str:
    """Forward passes by the part of the block, since that is what stays for the backward pass."""
    if zone.phase != FORWARD:
        return "backward pass" if zone.phase == BACKWARD else zone.phase
    parts = zone.module.split(".")
    if parts[0] != "layers":
        return {"lm_head": "forward: logits and loss", "": "forward: logits and loss"}.get(
            parts[0], "forward: embedding, norm"
        )
    if len(parts) == 2:
        return "forward: gathered weights, residual sums"
    return "forward: norms" if parts[2].endswith("layernorm") else f"forward: {parts[2]}"


# A rank's time, every moment of which belongs to one zone: a pass of a module, a wait, the optimizer, the rest.


FORWARD, BACKWARD, NORM, OPTIMIZER, REST = "forward", "backward", "gradient norm", "optimizer", "rest"


class Zone(NamedTuple):
    """What a rank is doing."""

    phase: str
    module: str = ""
    """In forward and backward: the module's name in its chunk, "" for the chunk itself."""
    wait: str = ""
    """What it waits for: the axis and kind of a collective, such as "tp all_reduce"."""


class Clock:
    """Charges time to zones. Only one thread at a time may use it: autograd's runs while the main one waits."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """``settle`` waits until the device has done what it was given; without that, time would go to whichever zone
        happens to wait."""
        self._settle = settle
        self._since = 0.0
        self.zone = Zone(REST)
        self.seconds: dict[Zone, float] = defaultdict(float)
        self.visits: dict[Zone, int] = defaultdict(int)
        self.moves: list[tuple[float, Zone]] | None = None
        """When each zone was entered, seconds on ``time.perf_counter``; None unless wanted."""

    def start(self) -> None:
        """Time counts from here on."""
        self._settle()
        self.zone, self._since = Zone(REST), time.perf_counter()
        if self.moves is not None:
            self.moves.append((self._since, self.zone))

    def move(self, zone: Zone) -> Zone:
        """``zone`` begins; returns the one that ends."""
        self._settle()
        now, left = time.perf_counter(), self.zone
        self.seconds[left] += now - self._since
        self.visits[zone] += 1
        self.zone, self._since = zone, now
        if self.moves is not None:
            self.moves.append((now, zone))
        return left

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """The present zone, in which a wait for ``name`` lasts as long as the context."""
        return self.inside(self.zone._replace(wait=name))

    @contextmanager
    def inside(self, zone: Zone) -> Iterator[None]:
        """``zone`` for as long as the context lasts."""
        left = self.move(zone)
        try:
            yield
        finally:
            self.move(left)
