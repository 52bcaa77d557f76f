"""Profile the steps of ``trainer.profile`` on every rank; the first rank writes the result."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from megatron_llama.data.prefetch import Prefetcher
from megatron_llama.devices import Device
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.rank_work import rank_work
from megatron_llama.tools.profile.modules import ModuleClock, RankProfile
from megatron_llama.tools.profile.report import write_profile
from megatron_llama.tools.profile.trace import NORM, OPTIMIZER, Clock, Zone, finish_trace, step_name
from megatron_llama.topology import Topology
from megatron_llama.train.waits import AXES, DATA, WAIT_METRICS, trace_waits

FOLDER = "profile"
"""Subfolder of the run folder."""


@dataclass
class _Step:
    """A profiled step of this rank."""

    number: int
    clock: Clock
    modules: ModuleClock
    memory: MemoryTimeline | None = None


class StepProfiler:
    """Step observer of the training loop; does nothing in steps that are not profiled.

    All steps of ``trainer.profile`` are timed. The last one is also traced by torch's profiler, which slows it down, so
    its times are excluded if there are other steps.
    """

    def __init__(
        self, plan: Plan, topology: Topology, device: Device, model: ParallelModel, optimizer: Optimizer
    ) -> None:
        self.plan, self.topology, self.device, self.model, self.optimizer = plan, topology, device, model, optimizer
        self.first, self.last = plan.config.trainer.profile or (0, -1)
        self._steps: list[_Step] = []

    @contextmanager
    def step(self, number: int, batches: Prefetcher) -> Iterator[dict[str, float]]:
        """Profile step ``number`` if selected, which is collective; its metrics are set at the end of the context."""
        metrics: dict[str, float] = {}
        if not self.first <= number <= self.last:
            yield metrics
            return
        clock = Clock(self.device.synchronize_stream)
        compiled = self.model.compiler is not None
        step = _Step(number, clock, ModuleClock(self.model.chunks, clock, compiled=compiled))
        with self._tracing(step) if number == self.last else ExitStack(), self._timing(step, batches):
            yield metrics
        self._steps.append(step)
        metrics.update(self._waits(clock))
        if number == self.last:
            self._finish()

    @contextmanager
    def _timing(self, step: _Step, batches: Prefetcher) -> Iterator[None]:
        clock, model = step.clock, self.model
        calls = ((batches, "at", DATA), (self.optimizer, "gradient_norm", NORM), (self.optimizer, "update", OPTIMIZER))
        with ExitStack() as stack:
            for owner, method, name in calls:
                stack.enter_context(patch.object(owner, method, clock.inside(Zone(name))(getattr(owner, method))))
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
        with _report_write_errors():
            step.memory = finish_trace(profiler, self._folder, self.topology, step.clock.moves, step.number)

    def _waits(self, clock: Clock) -> dict[str, float]:
        """Return the mean seconds of waits over ranks (collective)."""
        seconds_by_name: dict[str, float] = defaultdict(float)
        for zone, seconds in clock.seconds.items():
            seconds_by_name[zone.wait.partition(" ")[0] if zone.wait else zone.phase] += seconds
        mean = torch.tensor([seconds_by_name[name] for name in (DATA, *AXES)], device=self.model.device)
        dist.all_reduce(mean)
        return dict(zip(WAIT_METRICS, (mean / self.plan.world_size).tolist(), strict=True))

    def _finish(self) -> None:
        """Gather the profiles; the first rank writes them."""
        phase.enter("writing the profile", phase.PATIENT)
        ranks = gather_objects(self.rank_profile())
        if self.topology.is_logger:
            with _report_write_errors():
                write_profile(self.plan, ranks, self._folder)

    def rank_profile(self) -> RankProfile:
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
                forward, backward = work.flops(
                    *(self._visible_counts(number, timed) if self._drops_tokens(name) else (tokens, pairs))
                )
                flops[name] = forward // count, backward // count
        return RankProfile(
            rank=topology.rank,
            place=topology.place,
            steps=[step.number for step in timed],
            traced=self.last,
            seconds={zone: spent / count for zone, spent in seconds.items()},
            visits={zone: count_of_visits / count for zone, count_of_visits in visits.items()},
            flops=flops,
            memory=self._steps[-1].memory,
        )

    def _drops_tokens(self, module: str) -> bool:
        """Return whether random-LTD drops tokens in the layer of a module."""
        layer = module.split(".")[1] if module.startswith("layers.") else "-1"
        return self.plan.random_ltd is not None and int(layer) in self.plan.random_ltd.layers

    def _visible_counts(self, chunk: int, steps: list[_Step]) -> tuple[int, int]:
        """Return the tokens in the layers of random-LTD and the expected number of their pairs."""
        assert self.plan.random_ltd is not None
        subsets = [(self.plan.random_ltd.retained(step.number), step.modules) for step in steps]
        tokens = sum(subset.share * modules.tokens[chunk] for subset, modules in subsets)
        pairs = sum(subset.pairs(modules.tokens[chunk], modules.pairs[chunk]) for subset, modules in subsets)
        return round(tokens), round(pairs)

    @property
    def _folder(self) -> Path:
        return self.plan.run_dir / FOLDER


@contextmanager
def _report_write_errors() -> Iterator[None]:
    """Report write errors without stopping the run."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(f"cannot write the profile: {error}\n")
