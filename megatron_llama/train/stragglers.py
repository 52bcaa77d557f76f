"""Tells of a slow rank while the run goes on, and in which collective a rank waits.

All ranks take equally long over a step, because they wait for one another; so what counts is how long each one works:
the step less its waits. That is gathered behind a step of every window, where the host waits for the device anyway.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import Device
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.train.metrics import MetricsLogger
from megatron_llama.train.waits import trace_waits

WINDOW_STEPS = 10
"""Steps between two looks; the median of their times counts, so that a single slow step is nobody's fault."""
SLOW, EVEN = 1.5, 1.2
"""A rank becomes a straggler that works so many times as long as its peers, and stops being one below the other."""
WINDOWS = 2
"""Looks in a row that make it one."""
REMEMBERED = 20


@dataclass
class Verdict:
    """One look at all ranks."""

    slowest: int
    """The rank that works longest, against its peers."""
    ratio: float
    """Its time over theirs."""
    begun: list[int] = field(default_factory=list)
    """Ranks that have become stragglers with this look."""
    ended: list[int] = field(default_factory=list)
    """Ranks that no longer are."""


class Stragglers:
    """Who is slow, from the seconds that each rank works in a step. Pure: all ranks come to the same verdict."""

    def __init__(self, stages: Sequence[int]) -> None:
        """``stages``: each rank's pipeline stage. Its peers have the same layers and as much to do."""
        self._peers = [
            [other for other, its in enumerate(stages) if its == stage and other != rank]
            for rank, stage in enumerate(stages)
        ]
        self._in_a_row, self.slow = [0] * len(stages), [False] * len(stages)
        self._history: list[list[float]] = [[] for _ in stages]

    def look(self, busy: Sequence[float]) -> Verdict:
        """``busy``: seconds of every rank."""
        ratios = [seconds / max(self.expected(rank, busy), 1e-9) for rank, seconds in enumerate(busy)]
        slowest = max(range(len(busy)), key=lambda rank: ratios[rank])
        verdict = Verdict(slowest, ratios[slowest])
        for rank, ratio in enumerate(ratios):
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if ratio > SLOW else 0
            if not self.slow[rank] and self._in_a_row[rank] >= WINDOWS:
                self.slow[rank] = True
                verdict.begun.append(rank)
            elif self.slow[rank] and ratio < EVEN:
                self.slow[rank] = False
                verdict.ended.append(rank)
            if ratio <= SLOW:
                self._history[rank] = [*self._history[rank], busy[rank]][-REMEMBERED:]
        return verdict

    def expected(self, rank: int, busy: Sequence[float]) -> float:
        """What a rank should need: the median of its peers, or of its own past where it is alone with its stage."""
        if peers := self._peers[rank]:
            return median(busy[other] for other in peers)
        return median(self._history[rank] or [busy[rank]])


class StragglerWatch:
    """What the training loop asks for each step. With one rank it does nothing."""

    def __init__(self, plan: Plan, device: Device, model: ParallelModel) -> None:
        self._device, self._model, self._world = device, model, plan.world_size
        self._stragglers = Stragglers([plan.grid.at(rank)["pp"] for rank in range(plan.world_size)])
        self._waits: list[tuple[Any, Any]] = []
        self._window: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees every collective for as long as the run trains."""
        if self._world == 1:
            yield
            return
        # Inside compiled blocks only a profiled step looks, which is slower.
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
        """Around a step, at whose end the device has been waited for."""
        self._waits.clear()
        start = time.perf_counter()
        yield
        waited = sum(self._device.elapsed_seconds(*marks) for marks in self._waits)
        self._window.append(time.perf_counter() - start - waited)

    def after_step(self, step: int, metrics: dict[str, float], logger: MetricsLogger | None) -> None:
        """At the end of a window a collective: adds its metrics, and tells of who has become slow."""
        if self._world == 1 or len(self._window) < WINDOW_STEPS:
            return
        mine = torch.tensor([median(self._window)], dtype=torch.float32, device=self._model.device)
        self._window.clear()
        gathered = torch.empty(self._world, dtype=torch.float32, device=self._model.device)
        dist.all_gather_into_tensor(gathered, mine)
        busy = gathered.tolist()
        verdict = self._stragglers.look(busy)
        metrics |= {"slowest_rank": verdict.slowest, "slowest_rank_ratio": verdict.ratio}
        if verdict.begun or verdict.ended:  # on all ranks alike
            hosts: list[Any] = [None] * self._world
            dist.all_gather_object(hosts, socket.gethostname())
            if logger is not None:
                logger.print_lines([*self._lines(step, verdict, busy, hosts)])

    def _lines(self, step: int, verdict: Verdict, busy: Sequence[float], hosts: Sequence[str]) -> Iterator[str]:
        for rank in verdict.begun:
            expected = self._stragglers.expected(rank, busy)
            yield (
                f"step {step}: rank {rank} on {hosts[rank]} is slow: it works {busy[rank]:.3g} s of a step, "
                f"{busy[rank] / expected:.1f} times as long as its peers ({expected:.3g} s), and all wait for it"
            )
        for rank in verdict.ended:
            yield f"step {step}: rank {rank} on {hosts[rank]} is as fast as its peers again"
