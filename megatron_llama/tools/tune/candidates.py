"""Candidate settings of a run on a target, with their forecasts.

Settings that break a rule or cannot fit are rejected and counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_llama.arch.parameters import can_cut
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.problems import format_value
from megatron_llama.config.settings import RECOMPUTE, Config
from megatron_llama.config.settings_table import get
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.derive import derive_optimizer
from megatron_llama.plan.memory import SURE, stage_footprints
from megatron_llama.plan.resolve import change_settings
from megatron_llama.plan.stage_split import split_evenly
from megatron_llama.tools.tune.target import Target
from megatron_llama.topology import AXIS_NAMES, Grid

WORTH_TRYING = ("none", "elementwise", "full")
"""Candidates of trainer.recompute. With fused attention, selective saves no less memory than elementwise."""
LARGEST_MICRO_BATCH = 64
MOST_VIRTUAL = 8
SHORTEST_PART = 1024
"""Tokens of a sequence on a rank, below which context parallelism is not tried for the throughput."""
NOT_TRIED = (
    f"tp x cp across nodes, cp below {SHORTEST_PART:,} tokens per rank, vpp above {MOST_VIRTUAL} or with unbalanced "
    f"stages, micro_batch_size above {LARGEST_MICRO_BATCH}, recompute=selective, pipeline_layers"
)
"""Valid settings that no search tries, for the output."""
_TUNED = ("tp", "cp", "pp", "vpp", "dp", "zero", "shard_group", "micro_batch_size", "recompute")
TUNED = tuple(f"trainer.{name}" for name in _TUNED)
"""Tuned settings, in the order of the table. Settings that change the result are never tuned; sp follows from tp."""


@dataclass(frozen=True)
class Candidate:
    """Settings of a run, and their forecast."""

    settings: Mapping[str, Any] = field(compare=False)
    ranks: int
    peak: int
    """Peak bytes of the heaviest rank."""
    states: int
    """Bytes of weights, gradients and optimizer states on that rank. Their forecast is exact."""
    first_peak: int
    """Peak bytes of rank 0, which reports its memory."""
    first_states: int
    """Bytes of states on rank 0."""
    required_bytes: int
    """Bytes on a device or host (``Target.required_bytes``)."""
    seconds: float
    """Seconds of a step."""
    key: str
    """The settings as command-line overrides, without null values."""

    def grown_peak(self, scale: float) -> float:
        """Return the peak bytes of the heaviest rank with activations and buffers multiplied by ``scale``."""
        return self.states + scale * (self.peak - self.states)

    def fits_on(self, target: Target, scale: float = 1.0) -> bool:
        """Return whether the forecast fits on a target, with activations and buffers multiplied by ``scale``."""
        return target.required_bytes(self.grown_peak(scale), self.ranks) <= target.usable_bytes

    @property
    def sort_key(self) -> tuple[float, int, int, int]:
        """Sort key: forecast seconds, then recomputation, ZeRO stage and memory."""
        settings = self.settings
        recompute = RECOMPUTE.index(settings["trainer.recompute"])
        return round(self.seconds, 6), recompute, settings["trainer.zero"], self.required_bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """Sizes of the tuned axes."""
        return tuple(value for axis in AXIS_NAMES if (value := self.settings.get(f"trainer.{axis}")) is not None)


@dataclass
class CandidateSpace:
    """Candidates of a search, and rejected settings."""

    candidates: list[Candidate] = field(default_factory=list)
    """Settings that may fit, fastest first."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of rejected settings by reason."""
    problems: list[Problem] = field(default_factory=list)
    """Shortest list of problems among the settings that break a rule, to report if no candidate is left."""

    @property
    def total(self) -> int:
        """Number of candidates and rejected settings."""
        return len(self.candidates) + self.rejected.total()


class Tuner:
    """A config to tune on a target."""

    def __init__(
        self,
        config: Config,
        fixed: Mapping[str, Any],
        target: Target,
        extra: Mapping[str, Any] | None = None,
        *,
        context: bool = False,
    ) -> None:
        """Create a tuner.

        Args:
            fixed: values of tuned settings that the user has set.
            extra: values of other settings, added to each candidate.
            context: whether to try all sizes of context parallelism. Otherwise the config's, and sizes with
                at least ``SHORTEST_PART`` tokens of a sequence on each rank.
        """
        self.config, self.fixed, self.target, self.extra = config, fixed, target, dict(extra or {})
        self.context = context
        derived = change_settings(config, {})
        derive_optimizer(derived)  # once, because resolving the schedule takes most of a plan's time
        self._optim = derived.optim

    def plan(self, settings: Mapping[str, Any], ranks: int) -> Plan:
        """Return the plan of some settings; raise ConfigError if they break a rule."""
        return resolve(change_settings(self.config, settings, self._optim), ranks, exists=lambda path: True)

    def candidate(self, settings: Mapping[str, Any], ranks: int) -> Candidate:
        """Return the forecast of some settings; raise ConfigError if they break a rule."""
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
            self.target.required_bytes(most.total, ranks),
            self.target.seconds(plan, ranks),
            " ".join(f"{name}={format_value(value)}" for name, value in settings.items() if value is not None),
        )

    def enumerate(
        self, *, memory_factor: float = SURE, progress: Callable[[int], None] = lambda done: None
    ) -> CandidateSpace:
        """Return the candidates whose forecast memory, times ``memory_factor``, fits.

        ``progress`` is called with the number of settings so far.
        """
        space = CandidateSpace()
        for ranks in self.target.world_sizes():
            for layout in self.layouts(ranks):
                self._add_micro_batches(space, layout, ranks, memory_factor)
                progress(space.total)
        space.candidates.sort(key=lambda each: each.sort_key)
        return space

    def _add_micro_batches(
        self, space: CandidateSpace, layout: Mapping[str, Any], ranks: int, memory_factor: float
    ) -> None:
        """Add a layout with each micro batch size up to the first that does not fit."""
        sizes = self._options("trainer.micro_batch_size", self._micro_batches(layout))
        for number, size in enumerate(sizes):
            try:
                each = self.candidate({**layout, "trainer.micro_batch_size": size, **self.extra}, ranks)
            except ConfigError as error:
                space.rejected[f"breaks a rule of {error.problems[0].field}"] += 1
                if not space.problems or len(error.problems) < len(space.problems):
                    space.problems = list(error.problems)
                continue
            if memory_factor * each.required_bytes > self.target.usable_bytes:
                space.rejected["does not fit"] += len(sizes) - number
                return
            space.candidates.append(each)

    def _options(self, name: str, options: Iterable[Any]) -> list[Any]:
        return [self.fixed[name]] if name in self.fixed else list(options)

    def layouts(self, ranks: int) -> Iterator[dict[str, Any]]:
        """Yield the settings without the micro batch size, without grids that are obviously invalid."""
        layers, given = self.config.model.num_hidden_layers, Grid.of(self.config.trainer)
        # tp stays within a node: over slower links it is never the fastest.
        inside = self.target.per_node if self.target.is_host else self.target.device.per_node
        sizes = (size for size in _divisors(ranks) if size <= inside and can_cut(self.config.model, size))
        for tp in (size for size in self._options("trainer.tp", sizes) if ranks % size == 0):
            for pp in self._options("trainer.pp", (n for n in _divisors(ranks // tp) if n <= layers)):
                for cp in self._options("trainer.cp", self._contexts(ranks // (tp * pp), inside // tp)):
                    grid = given.resized(tp=tp, pp=pp, cp=cp)
                    dp = grid.with_world(ranks).sizes["dp"]
                    if ranks % grid.ranks_per_replica or self.fixed.get("trainer.dp", dp) != dp:
                        continue
                    yield from self._with_schedules(tp, cp, pp, dp)

    def _contexts(self, ranks: int, inside: int) -> Iterable[int]:
        """Return the sizes of context parallelism to try, within a node."""
        sizes = [size for size in _divisors(ranks) if size <= max(1, inside)]
        if self.context:
            return sizes
        given, length = self.config.trainer.cp, self.config.data.seq_length or 0
        return [size for size in sizes if size == given or length >= size * SHORTEST_PART]

    def _with_schedules(self, tp: int, cp: int, pp: int, dp: int) -> Iterator[dict[str, Any]]:
        """Yield a grid with each choice of virtual stages, ZeRO stage, shard group and recomputation."""
        virtual = [v for v in range(1, MOST_VIRTUAL + 1) if v == 1 or (pp > 1 and self._is_balanced(pp, v))]
        zero = [0, 1, 2, 3] if dp * cp > 1 else [self.config.trainer.zero]
        for vpp in self._options("trainer.vpp", virtual):
            for stage in self._options("trainer.zero", zero):
                for group in self._options("trainer.shard_group", self._groups(tp, cp * dp, stage)):
                    for recompute in self._options("trainer.recompute", WORTH_TRYING):
                        values = (tp, cp, pp, vpp, dp, stage, group, recompute)
                        names = (name for name in TUNED if name != "trainer.micro_batch_size")
                        yield dict(zip(names, values, strict=True))

    def _is_balanced(self, pp: int, vpp: int) -> bool:
        """Return whether no stage gets more layers in ``vpp`` chunks than in one."""
        layers = self.config.model.num_hidden_layers
        if layers < pp * vpp:
            return False
        chunks = split_evenly(layers, pp * vpp)
        return max(sum(chunks[stage::pp]) for stage in range(pp)) <= -(-layers // pp)

    def _groups(self, tp: int, replicas: int, zero: int) -> Iterator[int | None]:
        """Yield the shard groups: all ranks with the same weights (None), or the ranks of one node."""
        yield None
        inside = self.target.device.per_node // tp
        if zero and 1 < inside < replicas and replicas % inside == 0 and self.target.nodes > 1:
            yield inside

    def _micro_batches(self, layout: Mapping[str, Any]) -> Iterator[int]:
        dp = layout["trainer.dp"]
        # Virtual stages need whole rounds of pp micro batches. A fixed number of them is checked by the rules.
        is_interleaved = layout["trainer.vpp"] > 1 and "trainer.vpp" not in self.fixed
        unit = dp * layout["trainer.pp"] if is_interleaved else dp
        share = self.config.trainer.global_batch_size // unit
        sizes = [self.config.trainer.global_batch_size, *(size for _, size in self.config.trainer.batch_schedule)]
        for size in range(1, min(share, LARGEST_MICRO_BATCH) + 1):
            if all(each % (size * unit) == 0 for each in sizes):
                yield size


def fixed_settings(config: Config, overrides: list[str]) -> dict[str, Any]:
    """Return the tuned settings that a command line sets to a value other than null."""
    names = {text.partition("=")[0] for text in overrides}
    values = {name: get(config, name) for name in TUNED if name in names}
    return {name: value for name, value in values.items() if value is not None}


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)
