"""Curriculum order: the samples of a curriculum as a function of the position in the data.

Each level of difficulty adds a group: the units (``corpus/difficulty_index.py``) that the level newly allows. Within a
level, samples are drawn from all groups so far in proportion to their sizes, at even intervals. Each group continues at
its position; a finished group is shuffled and drawn again. So no sample is more difficult than its step allows, and all
allowed samples are equally likely. From the last level on, each sample is drawn once before any is drawn twice, up to
one epoch of its group. DeepSpeed's sampler does the same with random draws (its groups are clusters).
"""

from __future__ import annotations

import bisect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.data_settings import PERCENTILE, SECTION, CurriculumMetric
from megatron_llama.corpus.blend import Blend
from megatron_llama.corpus.difficulty_index import (
    DifficultyIndex,
    concatenate,
    documents_of,
    index_folder,
    open_difficulty_index,
    read_unit,
    unit_range,
)
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Order
from megatron_llama.corpus.splits import DatasetSplit
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import SequenceCut, difficulties_at, first_steps, indexed_metrics

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Level:
    """Difficulties that hold from a sample on, up to the next level."""

    samples: int
    """Consumed samples at its first step."""
    difficulties: Mapping[str, int]
    """Largest allowed difficulty by metric."""


def levels_of(plan: Plan, past: Sequence[Level] = ()) -> tuple[Level, ...]:
    """Return the levels of a run, after the ``past`` levels of its checkpoint. Empty without a curriculum."""
    start, data = plan.start, plan.config.data
    levels = [level for level in past if level.samples < start.samples]
    for step in first_steps(plan.config, start.step + 1):
        level = Level(plan.batches.after(step - 1).samples, difficulties_at(data, step))
        if not levels or levels[-1].difficulties != level.difficulties:
            levels.append(level)
    return tuple(levels)


def level_at(levels: Sequence[Level], samples: int) -> Level:
    """Return the level of the step that begins at ``samples`` consumed samples."""
    return levels[max(0, bisect.bisect_right(levels, samples, key=lambda level: level.samples) - 1)]


def grade(
    metrics: Sequence[CurriculumMetric], levels: Sequence[Level], measured: Mapping[str, DifficultyIndex]
) -> np.ndarray:
    """Return the first level that allows each unit by all metrics, int64 [units]; len(levels) if no level does."""
    grades: np.ndarray | None = None
    for metric in metrics:
        measure = measured[metric.metric]
        bounds = np.array([level.difficulties[metric.metric] for level in levels])
        values = measure.values
        if metric.difficulty_type == PERCENTILE:
            values, bounds = measure.ranks, len(values) * bounds // metric.highest - 1
        first = np.searchsorted(bounds, values, side="left")
        grades = first if grades is None else np.maximum(grades, first)
    assert grades is not None, "there is a metric with an index"
    return grades


@dataclass(frozen=True)
class _LevelDraws:
    """Draws of one level."""

    first: int
    """First draw."""
    groups: np.ndarray
    """Numbers of the groups that the level draws from."""
    before: np.ndarray
    """Draws from each group before the level, int64 [all groups]."""
    blend: Blend
    """Order of ``groups``."""


class GroupSchedule:
    """Group of each draw, and the number of earlier draws from that group. Lookup takes constant time."""

    def __init__(self, firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """Create a schedule.

        Args:
            firsts: first draw of each level, ascending from 0; equal for levels without draws.
            sizes: size of the group that each level adds; the first must be above 0.
        """
        drawn, due = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes))
        offsets = np.arange(1, len(sizes) + 1) * _GOLDEN % 1  # so that groups of equal size alternate
        self._levels: list[_LevelDraws] = []
        for level, first in enumerate(firsts):
            if self._levels:
                last = self._levels[-1]
                draws = first - last.first
                drawn, due = last.before.copy(), due.copy()
                due[last.groups] += draws * np.array(last.blend.shares)
                drawn[last.groups] += last.blend.counts(draws)
                if not draws:
                    self._levels.pop()
            groups = np.array([number for number, size in enumerate(sizes[: level + 1]) if size])
            # A group behind its share is drawn sooner, so that many short levels keep the proportions.
            phases = np.maximum(0.0, offsets[groups] - (due - drawn)[groups])
            blend = Blend([float(sizes[number]) for number in groups], phases.tolist())
            self._levels.append(_LevelDraws(first, groups, drawn, blend))

    def at(self, draw: int) -> tuple[int, int]:
        """Return (group, number of earlier draws from the group) of a draw."""
        level = self._level_of(draw)
        index, count = level.blend.at(draw - level.first)
        group = int(level.groups[index])
        return group, int(level.before[group]) + count

    def drawn(self, draws: int) -> np.ndarray:
        """Return the numbers of draws from each group among the first ``draws``, int64 [groups]."""
        level = self._level_of(draws)
        counts = level.before.copy()
        counts[level.groups] += level.blend.counts(draws - level.first)
        return counts

    def _level_of(self, draw: int) -> _LevelDraws:
        return self._levels[max(0, bisect.bisect_right(self._levels, draw, key=lambda level: level.first) - 1)]


class Graded:
    """``Order`` (packing.py) from easy to difficult. A sample is a list of units."""

    def __init__(self, grades: np.ndarray, firsts: Sequence[int], order_of: Callable[[np.ndarray, int], Order]) -> None:
        """Create an order. The first level must allow a unit.

        Args:
            grades: result of ``grade``.
            firsts: first draw of each level.
            order_of: returns the order of a group from its units and its number.
        """
        count = len(firsts)
        ends = np.searchsorted(np.sort(grades), np.arange(count + 1), side="right")
        self.groups = np.split(np.argsort(grades, kind="stable"), ends[:-1])[:count]
        """Units that each level adds, in their original order."""
        self.num_excluded = len(grades) - int(sum(map(len, self.groups)))
        """Units that no level allows."""
        self._orders = [order_of(units, number) if len(units) else None for number, units in enumerate(self.groups)]
        self._first = firsts[0]
        sizes = [len(order or ()) for order in self._orders]
        self.schedule = GroupSchedule([first - firsts[0] for first in firsts], sizes)

    def __len__(self) -> int:
        """Samples in one epoch of the last level."""
        return sum(len(order) for order in self._orders if order is not None)

    def format_summary(self, name: str, end: int) -> str:
        """Format the draws of a run that ends before sample ``end``."""
        sizes = [len(order or ()) for order in self._orders]
        drawn = self.schedule.drawn(max(0, end - self._first))
        epochs = max(count / size for count, size in zip(drawn, sizes, strict=True) if size)
        excluded = f", {self.num_excluded:,} excluded as too difficult" if self.num_excluded else ""
        return (
            f"data: curriculum over {name}: {sizes[0]:,} samples at the start, {sum(sizes):,} at the end{excluded}; "
            f"easiest samples drawn {epochs:.2g} times\n"
        )

    def examples(self, index: int) -> list[int]:
        """Return the units of sample ``index``, which counts as ``firsts``."""
        group, number = self.schedule.at(index - self._first)
        order = self._orders[group]
        assert order is not None, "empty groups are never drawn"
        return [int(unit) for unit in self.groups[group][order.examples(number)]]


@dataclass(frozen=True)
class GradedSequences:
    """Pretraining samples in the curriculum's order, with the interface of ``Epoch``."""

    order: Graded
    first_unit: int
    """First unit of the split."""
    seq_length: int

    def text(self, dataset: IndexedDataset, sample: int) -> tuple[np.ndarray, list[int]]:
        """Return the seq_length + 1 tokens of a sample, int64, and the number of tokens from each document."""
        unit = self._unit(sample)
        first, last, start = documents_of(dataset.index, unit, self.seq_length)
        ends = np.cumsum(dataset.index.lengths[first : last + 1], dtype=np.int64) - start
        ends[-1] = self.seq_length + 1
        lengths = np.diff(ends, prepend=0)
        return read_unit(dataset, unit, self.seq_length).astype(np.int64), lengths[lengths > 0].tolist()

    def place(self, dataset: IndexedDataset, sample: int, position: int) -> tuple[int, int]:
        """Return (document, token of the document) of a position in a sample."""
        token = self._unit(sample) * self.seq_length + position
        width = dataset.index.dtype.itemsize
        document = int(np.searchsorted(dataset.index.pointers, token * width, side="right")) - 1
        return document, token - int(dataset.index.pointers[document]) // width

    def _unit(self, sample: int) -> int:
        return self.first_unit + self.order.examples(sample)[0]


def group_seed(seed: int, group: int) -> int:
    """Return a group's seed, distinct from the seeds without a curriculum (packing.py seeds with 32 + 32 bits)."""
    return seed + (group + 1 << 32)


def cut_sample(sample: Mapping[str, torch.Tensor], cut: SequenceCut | None) -> list[Mapping[str, torch.Tensor]]:
    """Cut a sample into the sequences of its step."""
    if cut is None:
        return [sample]
    parts: list[Mapping[str, torch.Tensor]] = []
    for begin in range(0, cut.tokens, cut.length):
        part = {key: values[begin : begin + cut.length] for key, values in sample.items() if values.dim()}
        if "num_tokens" in sample:
            part["num_tokens"] = (sample["num_tokens"] - begin).clamp(0, cut.length)
        parts.append(part)
    return parts


def build_graded(
    plan: Plan,
    parts: Sequence[DatasetSplit],
    levels: Sequence[Level],
    firsts: Sequence[int],
    order_of: Callable[[np.ndarray, int], Order],
) -> Graded:
    """Build the curriculum's order of datasets, whose samples are numbered consecutively.

    ``firsts`` are the first samples of the levels.

    Raises:
        ConfigError: an index is missing or does not fit, or the first level allows no sample.
    """
    data = plan.config.data
    seq_length = data.length if data.kind == "pretrain" else None
    metrics, measured, problems = indexed_metrics(data), dict[str, DifficultyIndex](), list[Problem]()
    for metric in metrics:
        metric_parts = []
        for part in parts:
            try:
                folder = index_folder(part.prefix, metric.metric, seq_length, metric.index)
                full = open_difficulty_index(folder, part.prefix)
            except (OSError, ValueError) as error:
                flag = "" if seq_length is None else f" --seq-length {seq_length}"
                flag += f" --output {shlex.quote(metric.index)}" if metric.index else ""
                command = f"run python data_prep/analyze.py {shlex.quote(part.prefix)} --metric {metric.metric}{flag}"
                problems.append(Problem(SECTION, metric.metric, str(error), command))
                continue
            metric_parts.append(full.part(*unit_range(part.index, part.first, part.last, seq_length)))
        if len(metric_parts) == len(parts):
            measured[metric.metric] = metric_parts[0] if len(parts) == 1 else concatenate(metric_parts)
    if problems:
        raise ConfigError(problems)
    grades = grade(metrics, levels, measured)
    used = bisect.bisect_right(firsts, firsts[0]) - 1  # earlier levels have no draws
    if not (grades <= used).any():
        measures = {name: measure.values for name, measure in measured.items() if len(measure.values)}
        least = ", ".join(f"{name} is {values.min():g} or more" for name, values in measures.items())
        at = ", ".join(f"{name} {value}" for name, value in levels[used].difficulties.items())
        names = " and ".join(part.prefix for part in parts)
        rule = f"no sample of {names} is easy enough for the curriculum's first level ({at})"
        rule += f": {least}" if least else ""
        fix = "write a larger min_difficulty, or a larger first value of difficulty"
        raise ConfigError([Problem(SECTION, None, rule, fix)])
    return Graded(np.maximum(grades - used, 0), firsts[used:], order_of)
