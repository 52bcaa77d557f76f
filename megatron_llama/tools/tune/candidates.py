"""Settings that could be run on a target, with their forecast: those that break a rule or can't fit are counted by
the reason and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_llama.arch.shapes import can_cut
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.fields import get
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import RECOMPUTE, Config
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.derive import derive_optimizer
from megatron_llama.plan.memory import SURE, stage_footprints
from megatron_llama.plan.resolve import change_settings
from megatron_llama.tools.tune.target import Target
from megatron_llama.topology import AXIS_NAMES, Grid

WORTH_TRYING = ("none", "elementwise", "full")
"""Of trainer.recompute: selective keeps no less than elementwise where attention keeps no scores."""
LARGEST_MICRO_BATCH = 64
MOST_VIRTUAL = 8
TUNED = (
    "trainer.tp",
    "trainer.pp",
    "trainer.vpp",
    "trainer.dp",
    "trainer.zero",
    "trainer.shard_group",
    "trainer.micro_batch_size",
    "trainer.recompute",
)
"""The settings that are tuned, in the order of the table. The model, the global batch and all that changes the result
stay as they are; sequence parallelism follows from tp."""


@dataclass(frozen=True)
class Candidate:
    """Settings of a run, and what is forecast of it."""

    settings: Mapping[str, Any] = field(compare=False)
    ranks: int
    peak: int
    """Bytes of the heaviest rank."""
    states: int
    """Those of them that are weights, gradients and optimizer states, which the forecast knows exactly."""
    first_peak: int
    """Bytes of the first rank, which is the one that reports."""
    first_states: int
    needs: int
    """Bytes of a device or host (``Target.needs``)."""
    seconds: float
    """Of a step."""
    key: str
    """The settings as they are typed."""

    def grown_peak(self, scale: float) -> float:
        """Bytes of the heaviest rank if activations and buffers take ``scale`` times what is forecast."""
        return self.states + scale * (self.peak - self.states)

    @property
    def order(self) -> tuple[float, int, int, int]:
        """The fastest first; of equals, as far as the forecast can tell, the one with the least extra work."""
        settings = self.settings
        again = RECOMPUTE.index(settings["trainer.recompute"])
        return round(self.seconds, 6), again, settings["trainer.zero"], self.needs

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes that are tuned."""
        return tuple(value for axis in AXIS_NAMES if (value := self.settings.get(f"trainer.{axis}")) is not None)


@dataclass
class CandidateSpace:
    """What a search has looked at."""

    candidates: list[Candidate] = field(default_factory=list)
    """Those that may fit, the fastest first."""
    dropped: Counter[str] = field(default_factory=Counter)
    """How many were left out, by the reason."""
    broken: list[Problem] = field(default_factory=list)
    """Of those that broke a rule the shortest list of problems: what is wrong with all where none is left."""

    @property
    def looked_at(self) -> int:
        """All of them."""
        return len(self.candidates) + self.dropped.total()


class Tuner:
    """A config whose settings are to be found, on a target."""

    def __init__(
        self, config: Config, fixed: Mapping[str, Any], target: Target, extra: Mapping[str, Any] | None = None
    ) -> None:
        """``kept`` are the tuned settings that the user has given, which stay as they are; ``more`` are others that all
        candidates have, and that are written with them."""
        self.config, self.fixed, self.target, self.extra = config, fixed, target, dict(extra or {})
        derived = change_settings(config, {})
        derive_optimizer(derived)  # once: to resolve the schedule takes most of the time of a plan
        self._optim = derived.optim

    def plan(self, settings: Mapping[str, Any], ranks: int) -> Plan:
        """The plan of some settings. Raises ConfigError."""
        return resolve(change_settings(self.config, settings, self._optim), ranks, exists=lambda path: True)

    def candidate(self, settings: Mapping[str, Any], ranks: int) -> Candidate:
        """Their forecast. Raises ConfigError."""
        plan = self.plan(settings, ranks)
        stages = stage_footprints(plan)
        first, most = stages[0], max(stages, key=lambda stage: stage.total)
        return Candidate(
            settings,
            ranks,
            most.total,
            most.states,
            first.total,
            first.states,
            self.target.needs(most.total, ranks),
            self.target.seconds(plan, ranks),
            typed_settings(settings),
        )

    def enumerate(
        self, *, memory_factor: float = SURE, progress: Callable[[int], None] = lambda done: None
    ) -> CandidateSpace:
        """All candidates that may fit: those of which ``sure`` times the forecast does. ``progress`` is told how many
        have been looked at."""
        found = CandidateSpace()
        for ranks in self.target.worlds():
            for layout in self.layouts(ranks):
                self._with_micro_batches(found, layout, ranks, memory_factor)
                progress(found.looked_at)
        found.candidates.sort(key=lambda each: each.order)
        return found

    def _with_micro_batches(
        self, found: CandidateSpace, layout: Mapping[str, Any], ranks: int, memory_factor: float
    ) -> None:
        """Adds a layout with each micro batch, up to the first that does not fit: larger ones need more."""
        sizes = self._options("trainer.micro_batch_size", self._micro_batches(layout["trainer.dp"]))
        for number, size in enumerate(sizes):
            try:
                each = self.candidate({**layout, "trainer.micro_batch_size": size, **self.extra}, ranks)
            except ConfigError as error:
                found.dropped[f"breaks a rule of {error.problems[0].field}"] += 1
                if not found.broken or len(error.problems) < len(found.broken):
                    found.broken = list(error.problems)
                continue
            if memory_factor * each.needs > self.target.room:
                found.dropped["does not fit"] += len(sizes) - number
                return
            found.candidates.append(each)

    def _options(self, name: str, options: Iterable[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else list(options)

    def layouts(self, ranks: int) -> Iterator[dict[str, Any]]:
        """Every setting but the micro batch; what can't be is left out where that is plain to see."""
        layers, given = self.config.model.num_hidden_layers, Grid.of(self.config.trainer)
        # What the ranks of a node share over its fast links; over slower ones tp is never worth it.
        inside = self.target.per_node if self.target.host else self.target.device.per_node
        for tp in self._options("trainer.tp", (n for n in _divisors(ranks) if n <= inside and self._cuts(n))):
            if ranks % tp:
                continue
            for pp in self._options("trainer.pp", (n for n in _divisors(ranks // tp) if n <= layers)):
                grid = given.resized(tp=tp, pp=pp)
                dp = grid.with_world(ranks).sizes["dp"]
                if ranks % grid.block or self.fixed.get("trainer.dp", dp) != dp:
                    continue
                yield from self._with_schedules(tp, pp, dp)

    def _cuts(self, tp: int) -> bool:
        return can_cut(self.config.model, tp)

    def _with_schedules(self, tp: int, pp: int, dp: int) -> Iterator[dict[str, Any]]:
        """A grid with its virtual stages, ZeRO stages, groups and recomputation."""
        layers = self.config.model.num_hidden_layers
        virtual = [v for v in range(1, MOST_VIRTUAL + 1) if v == 1 or (pp > 1 and layers % (pp * v) == 0)]
        zero = [0, 1, 2, 3] if dp > 1 else [self.config.trainer.zero]
        for vpp in self._options("trainer.vpp", virtual):
            for stage in self._options("trainer.zero", zero):
                for group in self._options("trainer.shard_group", self._groups(tp, dp, stage)):
                    for recompute in self._options("trainer.recompute", WORTH_TRYING):
                        values = (tp, pp, vpp, dp, stage, group, recompute)
                        names = (name for name in TUNED if name != "trainer.micro_batch_size")
                        yield dict(zip(names, values, strict=True))

    def _groups(self, tp: int, dp: int, zero: int) -> Iterator[int | None]:
        """Sharding over all copies, or over those of one node."""
        yield None
        inside = self.target.device.per_node // tp
        if zero and 1 < inside < dp and dp % inside == 0 and self.target.nodes > 1:
            yield inside

    def _micro_batches(self, dp: int) -> Iterator[int]:
        share = self.config.trainer.global_batch_size // dp
        sizes = [self.config.trainer.global_batch_size, *(size for _, size in self.config.trainer.batch_schedule)]
        for size in range(1, min(share, LARGEST_MICRO_BATCH) + 1):
            if all(each % (size * dp) == 0 for each in sizes):
                yield size


def fixed_settings(config: Config, words: list[str]) -> dict[str, Any]:
    """The tuned settings that a command line gives: they stay as they are, but for null."""
    named = {word.partition("=")[0] for word in words}
    found = {name: get(config, name) for name in TUNED if name in named}
    return {name: value for name, value in found.items() if value is not None}


def typed_settings(settings: Mapping[str, Any]) -> str:
    """As they are typed; what is null is left out."""
    return " ".join(f"{name}={format_value(value)}" for name, value in settings.items() if value is not None)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)
