"""Report slow ranks and faults of their devices during training, and the collective in which each rank waits.

Ranks wait for each other, so all have the same step time. The work time of a rank is the step time minus its waits. It
is gathered once per window, at the end of a step, when the host waits for the device anyway. The fault counters of the
rank's device are gathered with it.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama import event_hook
from megatron_llama.devices import Device
from megatron_llama.devices.base import FAULT_METRICS, FaultCounts
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.train.metrics import MetricsLogger
from megatron_llama.train.waits import trace_waits

WINDOW_STEPS = 10
"""Steps per comparison, which uses the median work time: a single slow step does not count."""
SLOW, EVEN = 1.5, 1.2
"""Work time relative to the peers: above SLOW a rank becomes a straggler, below EVEN it stops being one."""
WINDOWS = 2
"""Consecutive windows above SLOW that make a straggler."""
LEAST_SHARE = 0.01
"""Least work time, as a share of the step: a collective next to a computation counts as a wait."""
HISTORY = 20
"""Past windows of a rank without peers to which it is compared."""
FAULT_SECONDS = 60.0
"""Least time between two reads of a device's fault counters. They are read at the end of a window."""


@dataclass
class Verdict:
    """Comparison of all ranks."""

    slowest: int
    """Rank with the highest ratio."""
    ratio: float
    """Its work time divided by the expected time."""
    started: list[int] = field(default_factory=list)
    """Ranks that became stragglers."""
    ended: list[int] = field(default_factory=list)
    """Ranks that stopped being stragglers."""


class Stragglers:
    """Finds slow ranks from the work times of all ranks. Deterministic: all ranks get the same verdict."""

    def __init__(self, stages: Sequence[int]) -> None:
        """``stages``: pipeline stage of each rank. Ranks of a stage are peers, with equal work."""
        self._peers = [
            [other for other, other_stage in enumerate(stages) if other_stage == stage and other != rank]
            for rank, stage in enumerate(stages)
        ]
        self._in_a_row, self.slow = [0] * len(stages), [False] * len(stages)
        self._history: list[list[float]] = [[] for _ in stages]

    def update(self, busy: Sequence[float]) -> Verdict:
        """Compare the ranks. ``busy``: work time of each rank, in seconds."""
        ratios = [seconds / max(self.expected(rank, busy), 1e-9) for rank, seconds in enumerate(busy)]
        slowest = max(range(len(busy)), key=lambda rank: ratios[rank])
        verdict = Verdict(slowest, ratios[slowest])
        for rank, ratio in enumerate(ratios):
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if ratio > SLOW else 0
            if not self.slow[rank] and self._in_a_row[rank] >= WINDOWS:
                self.slow[rank] = True
                verdict.started.append(rank)
            elif self.slow[rank] and ratio < EVEN:
                self.slow[rank] = False
                verdict.ended.append(rank)
            if ratio <= SLOW:
                self._history[rank] = [*self._history[rank], busy[rank]][-HISTORY:]
        return verdict

    def expected(self, rank: int, busy: Sequence[float]) -> float:
        """Return the expected work time: the median of the peers (without peers: of the rank's history)."""
        if peers := self._peers[rank]:
            return median(busy[other] for other in peers)
        return median(self._history[rank] or [busy[rank]])


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) spans: collectives of several streams overlap."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


class FaultWatch:
    """Fault counts of all ranks' devices, of which each rank reads its own."""

    def __init__(self, read: Callable[[], FaultCounts] | None, world: int) -> None:
        """``read``: reads the counters of this rank's device; None: no counters."""
        self.read, self._read_at = read, -math.inf
        self._local = FaultCounts()
        self._known = [FaultCounts()] * world
        self.metrics: dict[str, float] = {}
        """Sums over all ranks, from the first fault on."""

    def local(self) -> FaultCounts:
        """Return the counts of this rank's device at the last read."""
        now = time.perf_counter()
        if self.read is not None and now >= self._read_at + FAULT_SECONDS:
            self._local, self._read_at = self.read(), now
        return self._local

    def update(self, counts: Sequence[FaultCounts]) -> list[int]:
        """Return the ranks whose counts have changed since the last call. ``counts``: of all ranks."""
        changed = [rank for rank, each in enumerate(counts) if each != self._known[rank]]
        if changed:
            self._known = list(counts)
            self.metrics = {name: sum(getattr(each, name) for each in counts) for name in FAULT_METRICS}
        return changed

    def describe(self, rank: int) -> str:
        """Describe the faults of a rank's device."""
        corrected, uncorrected, xids, last = self._known[rank]
        texts = {f"{corrected} ECC corrected": corrected, f"{uncorrected} ECC uncorrected": uncorrected}
        return ", ".join(text for text, count in (texts | {f"{xids} Xid ({last})": xids}).items() if count)


class StragglerWatch:
    """Measures the ranks' work times, and counts their devices' faults, for the training loop.

    Does nothing with one rank whose device has no fault counters.
    """

    def __init__(self, plan: Plan, device: Device, model: ParallelModel) -> None:
        self._device, self._model, self._world = device, model, plan.world_size
        self._faults = FaultWatch(device.open_fault_counters(), plan.world_size)
        self._steps = 0
        self._stragglers = Stragglers([plan.grid.at(rank)["pp"] for rank in range(plan.world_size)])
        self._waits: list[tuple[Any, Any]] = []
        self._window: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure waits in collectives inside the ``with`` block."""
        if self._world == 1:
            yield
            return
        # compiled=True is slower; only profiled steps use it.
        with trace_waits(self._waiting, compiled=False):
            yield

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        phase.wait_for(name)
        start = self._device.record_event()
        try:
            yield
        finally:
            self._waits.append((start, self._device.record_event()))
            phase.wait_for("")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step. The caller reads its results before its end, which waits for the device."""
        self._waits.clear()
        if self._world == 1:
            yield
            return
        start, origin = time.perf_counter(), self._device.record_event()
        yield
        seconds = time.perf_counter() - start
        since = partial(self._device.elapsed_seconds, origin)
        spans = [(since(start_mark), since(end_mark)) for start_mark, end_mark in self._waits]
        self._window.append(max(seconds - covered_seconds(spans), LEAST_SHARE * seconds))

    def after_step(self, step: int, metrics: dict[str, float], logger: MetricsLogger | None) -> None:
        """At the end of a window, gather work times and faults, add metrics and report them (a collective)."""
        self._steps += 1
        if self._steps % WINDOW_STEPS == 0 and (self._world > 1 or self._faults.read is not None):
            values = [median(self._window or [0.0]), *self._faults.local()]
            self._window.clear()
            local = torch.tensor(values, dtype=torch.float32, device=self._model.device)
            gathered = torch.empty(self._world * len(values), dtype=torch.float32, device=self._model.device)
            dist.all_gather_into_tensor(gathered, local)
            busy, *counts = gathered.view(self._world, -1).T.tolist()
            faulty = self._faults.update([FaultCounts(*map(int, each)) for each in zip(*counts, strict=True)])
            verdict = self._stragglers.update(busy)
            if self._world > 1:
                metrics |= {"slowest_rank": verdict.slowest, "slowest_rank_ratio": verdict.ratio}
            if verdict.started or verdict.ended or faulty:  # equal on all ranks
                hosts = gather_objects(socket.gethostname())
                if logger is not None:
                    lines = [*self._lines(step, verdict, busy, hosts), *self._fault_lines(step, faulty, hosts)]
                    logger.print_lines(lines)
        metrics |= self._faults.metrics

    def _fault_lines(self, step: int, ranks: Sequence[int], hosts: Sequence[str]) -> Iterator[str]:
        for rank in ranks:
            faults = self._faults.describe(rank)
            event_hook.send("device_fault", step=step, rank=rank, on_host=hosts[rank], reason=faults)
            yield f"step {step}: rank {rank} on {hosts[rank]}: device errors: {faults}"

    def _lines(self, step: int, verdict: Verdict, busy: Sequence[float], hosts: Sequence[str]) -> Iterator[str]:
        if slow := verdict.started[: event_hook.MOST_RANKS]:
            on_hosts = [hosts[rank] for rank in slow]
            event_hook.send("straggler", step=step, ranks=slow, on_hosts=on_hosts, ratio=round(verdict.ratio, 2))
        for rank in verdict.started:
            expected = self._stragglers.expected(rank, busy)
            yield (
                f"step {step}: rank {rank} on {hosts[rank]} is slow: works {busy[rank]:.3g} s per step, "
                f"{busy[rank] / expected:.1f} times its peers' {expected:.3g} s"
            )
        for rank in verdict.ended:
            yield f"step {step}: rank {rank} on {hosts[rank]} is as fast as its peers"
