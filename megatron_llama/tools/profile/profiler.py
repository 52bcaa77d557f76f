"""Profiles the steps that ``trainer.profile`` names, on every rank, and has the first rank write what was found."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from megatron_llama.data.batches import Prefetcher
from megatron_llama.devices import Device
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.tools.forecast.module_work import rank_work
from megatron_llama.tools.profile.files import write_profile
from megatron_llama.tools.profile.modules import ModuleClock, RankProfile
from megatron_llama.tools.profile.trace import NORM, OPTIMIZER, Clock, Memory, Zone, finish_trace, step_name
from megatron_llama.topology import Topology
from megatron_llama.train.waits import AXES, DATA, WAIT_METRICS, trace_waits

FOLDER = "profile"
"""Inside the run's folder."""


@dataclass
class _Step:
    """A profiled step of this rank."""

    number: int
    clock: Clock
    modules: ModuleClock
    memory: Memory | None = None


class StepProfiler:
    """What the training loop asks for each step; it does nothing in a step that is not profiled.

    All steps of ``trainer.profile`` are timed by the clock. The last one is also traced by torch's profiler, which
    slows it down: where there are others, it is left out of the times.
    """

    def __init__(
        self, plan: Plan, topology: Topology, device: Device, model: ParallelModel, optimizer: Optimizer
    ) -> None:
        self.plan, self.topology, self.device, self.model, self.optimizer = plan, topology, device, model, optimizer
        self.first, self.last = plan.config.trainer.profile or (0, -1)
        self._steps: list[_Step] = []

    @contextmanager
    def step(self, number: int, batches: Prefetcher) -> Iterator[dict[str, float]]:
        """Around step ``number``. A profiled one is a collective; its metrics are there once the context has ended."""
        metrics: dict[str, float] = {}
        if not self.first <= number <= self.last:
            yield metrics
            return
        clock = Clock(self.device.synchronize_stream)
        compiled = self.model.compiler is not None
        step = _Step(number, clock, ModuleClock(self.model.chunks, clock, compiled=compiled))
        with self._tracing(step) if number == self.last else ExitStack(), self._watching(step, batches):
            yield metrics
        self._steps.append(step)
        metrics.update(self._waits(clock))
        if number == self.last:
            self._finish()

    @contextmanager
    def _watching(self, step: _Step, batches: Prefetcher) -> Iterator[None]:
        clock, model = step.clock, self.model
        calls = ((batches, "at", DATA), (self.optimizer, "gradient_norm", NORM), (self.optimizer, "update", OPTIMIZER))
        with ExitStack() as stack:
            for owner, method, name in calls:
                timed = _inside(clock, Zone(name), getattr(owner, method))
                stack.enter_context(patch.object(owner, method, timed))
            stack.enter_context(step.modules.following())
            stack.enter_context(trace_waits(clock.waiting, compiled=model.compiler is not None))
            clock.start()
            yield
            clock.move(clock.zone)

    @contextmanager
    def _tracing(self, step: _Step) -> Iterator[None]:
        step.clock.moves = []
        with profile(activities=supported_activities(), profile_memory=True) as profiler:
            with record_function(step_name(step.number)):
                yield
            self.device.synchronize()
        with _tolerating_full_disks():
            step.memory = finish_trace(profiler, self._folder, self.topology, step.clock.moves, step.number)

    def _waits(self, clock: Clock) -> dict[str, float]:
        """Seconds that the ranks have waited in a step, on average: a collective."""
        found: dict[str, float] = defaultdict(float)
        for zone, seconds in clock.seconds.items():
            found[zone.wait.partition(" ")[0] if zone.wait else zone.phase] += seconds
        mean = torch.tensor([found[name] for name in (DATA, *AXES)], device=self.model.device)
        dist.all_reduce(mean)
        return dict(zip(WAIT_METRICS, (mean / self.plan.world_size).tolist(), strict=True))

    def _finish(self) -> None:
        """Brings the ranks' profiles together; the first rank writes them."""
        phase.enter("writing the profile", phase.PATIENT)
        ranks: list[Any] = [None] * self.plan.world_size
        dist.all_gather_object(ranks, self.of_this_rank())
        if self.topology.is_logger:
            with _tolerating_full_disks():
                write_profile(self.plan, ranks, self._folder)

    def of_this_rank(self) -> RankProfile:
        timed = self._steps[:-1] or self._steps
        topology, count = self.topology, len(timed)
        seconds, visits = Counter[Zone](), Counter[Zone]()
        flops: dict[str, tuple[int, int]] = {}
        for step in timed:
            seconds.update(step.clock.seconds)
            visits.update(step.clock.visits)
        for number, chunk in enumerate(self.model.chunks):
            layers = [int(layer) for layer in chunk.layers]
            tokens = sum(step.modules.tokens[number] for step in timed)
            pairs = sum(step.modules.pairs[number] for step in timed)
            for name, work in rank_work(self.plan, layers, first=chunk.is_first, last=chunk.is_last).items():
                forward, backward = work.flops(*(self._kept(number, timed) if self._drops(name) else (tokens, pairs)))
                flops[name] = forward // count, backward // count
        return RankProfile(
            rank=topology.rank,
            place=topology.place,
            steps=[step.number for step in timed],
            traced=self.last,
            seconds={zone: spent / count for zone, spent in seconds.items()},
            visits={zone: made / count for zone, made in visits.items()},
            flops=flops,
            memory=self._steps[-1].memory,
        )

    def _drops(self, module: str) -> bool:
        """Whether a module is of a layer that sees a part of the tokens."""
        layer = module.split(".")[1] if module.startswith("layers.") else "-1"
        return self.plan.random_ltd is not None and int(layer) in self.plan.random_ltd.layers

    def _kept(self, chunk: int, steps: list[_Step]) -> tuple[int, int]:
        """Tokens that the layers of random-LTD have seen, and the expected number of their pairs."""
        assert self.plan.random_ltd is not None
        found = [(self.plan.random_ltd.retained(step.number), step.modules) for step in steps]
        tokens = sum(kept.share * modules.tokens[chunk] for kept, modules in found)
        pairs = sum(kept.pairs(modules.tokens[chunk], modules.pairs[chunk]) for kept, modules in found)
        return round(tokens), round(pairs)

    @property
    def _folder(self) -> Path:
        return self.plan.run_dir / FOLDER


def _inside(clock: Clock, zone: Zone, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.inside(zone):
            return function(*args, **kwargs)

    return timed


@contextmanager
def _tolerating_full_disks() -> Iterator[None]:
    """A profile is not worth a run."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(f"The profile could not be written: {error}\n")
