"""From easy to difficult: which samples a curriculum draws, as a function of the position in the data and nothing else.

Each level of difficulty adds the units (``corpus/difficulty_index.py``) that become allowed with it: a group. Within a
level all groups so far are drawn from in proportion to their sizes, evenly, and each goes on where it stood; a group
that has been drawn whole is shuffled anew and drawn again. So no sample is more difficult than its step allows, all
that are allowed are equally likely, and from the last level on every one is seen once before any is seen twice, up to
one pass of its group. That is DeepSpeed's sampler (its groups are called clusters) with even turns instead of dice.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from megatron_llama.corpus.epochs import DatasetSplit
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Order
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import SequenceCut, difficulties_at, first_steps, indexed_metrics

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Level:
    """Difficulties that hold from a sample on, up to the next level."""

    samples: int
    """Consumed samples with which it begins, always the first of a step."""
    difficulties: Mapping[str, int]
    """By metric."""


def levels_of(plan: Plan, past: Sequence[Level] = ()) -> tuple[Level, ...]:
    """The levels of a run, none without a curriculum; where it goes on from a checkpoint, behind its ``past``."""
    start, data = plan.start, plan.config.data
    found = [level for level in past if level.samples < start.samples]
    for step in first_steps(plan.config, start.step + 1):
        level = Level(plan.batches.after(step - 1).samples, difficulties_at(data, step))
        if not found or found[-1].difficulties != level.difficulties:
            found.append(level)
    return tuple(found)


def level_at(levels: Sequence[Level], samples: int) -> Level:
    """The level of the step that begins when ``samples`` are consumed."""
    return levels[max(0, bisect.bisect_right(levels, samples, key=lambda level: level.samples) - 1)]


def grade(
    metrics: Sequence[CurriculumMetric], levels: Sequence[Level], measured: Mapping[str, DifficultyIndex]
) -> np.ndarray:
    """The number of the first level that allows each unit by all metrics, int64 [units]; len(levels) for none."""
    grades: np.ndarray | None = None
    for metric in metrics:
        found = measured[metric.metric]
        bounds = np.array([level.difficulties[metric.metric] for level in levels])
        values = found.values
        if metric.difficulty_type == PERCENTILE:
            values, bounds = found.ranks, len(values) * bounds // metric.highest - 1
        first = np.searchsorted(bounds, values, side="left")
        grades = first if grades is None else np.maximum(grades, first)
    assert grades is not None, "there is a metric with an index"
    return grades


@dataclass(frozen=True)
class _Stretch:
    """The draws of one level."""

    first: int
    """Its first draw."""
    groups: np.ndarray
    """The groups that are drawn from."""
    before: np.ndarray
    """Draws of each of all groups before the level, int64."""
    blend: Blend
    """Whose turn it is, among ``groups``."""


class Turns:
    """Which group draw n takes from, and how many that group had given before: in constant time at any n."""

    def __init__(self, firsts: Sequence[int], sizes: Sequence[int]) -> None:
        """``firsts``: the draw with which each level begins, ascending from 0; equal ones where no draw is made.
        ``sizes``: of the group that each level adds, the first above 0."""
        drawn, due = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes))
        offsets = np.arange(1, len(sizes) + 1) * _GOLDEN % 1  # so that groups of equal size don't come all at once
        self._stretches: list[_Stretch] = []
        for level, first in enumerate(firsts):
            if self._stretches:
                last = self._stretches[-1]
                draws = first - last.first
                drawn, due = last.before.copy(), due + draws * self._shares(last, sizes)
                drawn[last.groups] += last.blend.counts(draws)
                if not draws:
                    self._stretches.pop()
            groups = np.array([number for number, size in enumerate(sizes[: level + 1]) if size])
            # A group that is behind its share comes sooner, so that many short levels are as fair as one.
            behind = (due - drawn)[groups]
            phases = np.maximum(0.0, offsets[groups] - behind)
            blend = Blend([float(sizes[number]) for number in groups], phases.tolist())
            self._stretches.append(_Stretch(first, groups, drawn, blend))

    @staticmethod
    def _shares(stretch: _Stretch, sizes: Sequence[int]) -> np.ndarray:
        shares = np.zeros(len(sizes))
        shares[stretch.groups] = stretch.blend.shares
        return shares

    def at(self, draw: int) -> tuple[int, int]:
        """(group, which of its draws) of a draw."""
        place = bisect.bisect_right(self._stretches, draw, key=lambda stretch: stretch.first) - 1
        stretch = self._stretches[max(0, place)]
        place, count = stretch.blend.at(draw - stretch.first)
        group = int(stretch.groups[place])
        return group, int(stretch.before[group]) + count

    def drawn(self, draws: int) -> np.ndarray:
        """How often each group is drawn from in the first ``draws``, int64 [groups]."""
        place = bisect.bisect_right(self._stretches, draws, key=lambda stretch: stretch.first) - 1
        stretch = self._stretches[max(0, place)]
        found = stretch.before.copy()
        found[stretch.groups] += stretch.blend.counts(draws - stretch.first)
        return found


class Graded:
    """Samples as lists of units, from easy to difficult: an ``Order`` of packing.py, and of pretraining's units."""

    def __init__(self, grades: np.ndarray, firsts: Sequence[int], order_of: Callable[[np.ndarray, int], Order]) -> None:
        """``grades`` of ``grade``; ``firsts``: the draw with which each level begins; ``order_of`` makes the order of a
        group from its units and number. The first level must allow a unit."""
        count = len(firsts)
        ends = np.searchsorted(np.sort(grades), np.arange(count + 1), side="right")
        by_grade = np.argsort(grades, kind="stable")
        self.groups = np.split(by_grade, ends[:-1])[:count]
        """The units that each level adds, in their own order."""
        self.left_out = len(grades) - int(sum(map(len, self.groups)))
        """Units that no level allows."""
        self._orders = [order_of(units, number) if len(units) else None for number, units in enumerate(self.groups)]
        self._first = firsts[0]
        self.turns = Turns([first - firsts[0] for first in firsts], [len(order or ()) for order in self._orders])

    def __len__(self) -> int:
        """Samples in a pass over all that the last level allows."""
        return sum(len(order) for order in self._orders if order is not None)

    def told(self, name: str, end: int) -> str:
        """What a run that ends before sample ``end`` draws of it, for the user."""
        sizes = [len(order or ()) for order in self._orders]
        drawn = self.turns.drawn(max(0, end - self._first))
        often = max(count / size for count, size in zip(drawn, sizes, strict=True) if size)
        left_out = f", {self.left_out:,} are too difficult for all of them" if self.left_out else ""
        return (
            f"data: a curriculum over {name}: {sizes[0]:,} samples at first, {sum(sizes):,} at the end{left_out}; "
            f"the run sees the easiest {often:.2g} times\n"
        )

    def examples(self, index: int) -> list[int]:
        """The units of sample ``index``, counted as ``firsts`` are."""
        group, number = self.turns.at(index - self._first)
        order = self._orders[group]
        assert order is not None, "an empty group has no turn"
        return [int(unit) for unit in self.groups[group][order.examples(number)]]


@dataclass(frozen=True)
class GradedStretches:
    """Pretraining's samples by a curriculum, read as those of an ``Epoch`` are."""

    order: Graded
    first_unit: int
    """Of the split."""
    seq_length: int

    def text(self, dataset: IndexedDataset, sample: int) -> tuple[np.ndarray, list[int]]:
        """The seq_length + 1 tokens of a sample, int64, and how many of them come from each document."""
        unit = self._unit(sample)
        first, last, start = documents_of(dataset.index, unit, self.seq_length)
        ends = np.cumsum(dataset.index.lengths[first : last + 1], dtype=np.int64) - start
        ends[-1] = self.seq_length + 1
        lengths = np.diff(ends, prepend=0)
        return read_unit(dataset, unit, self.seq_length).astype(np.int64), lengths[lengths > 0].tolist()

    def place(self, dataset: IndexedDataset, sample: int, position: int) -> tuple[int, int]:
        """(document, token of it) of a position in a sample's text."""
        token = self._unit(sample) * self.seq_length + position
        width = dataset.index.dtype.itemsize
        document = int(np.searchsorted(dataset.index.pointers, token * width, side="right")) - 1
        return document, token - int(dataset.index.pointers[document]) // width

    def _unit(self, sample: int) -> int:
        return self.first_unit + self.order.examples(sample)[0]


def group_seed(seed: int, group: int) -> int:
    """What shuffles a group, other than what shuffles without a curriculum (packing.py seeds with 32 + 32 bits)."""
    return seed + (group + 1 << 32)


def cut_sample(sample: Mapping[str, torch.Tensor], cut: SequenceCut | None) -> list[Mapping[str, torch.Tensor]]:
    """A sample as the pieces that its step trains on."""
    if cut is None:
        return [sample]
    pieces: list[Mapping[str, torch.Tensor]] = []
    for begin in range(0, cut.tokens, cut.length):
        piece = {key: values[begin : begin + cut.length] for key, values in sample.items() if values.dim()}
        if "num_tokens" in sample:
            piece["num_tokens"] = (sample["num_tokens"] - begin).clamp(0, cut.length)
        pieces.append(piece)
    return pieces


def build_graded(
    plan: Plan,
    parts: Sequence[DatasetSplit],
    levels: Sequence[Level],
    firsts: Sequence[int],
    order_of: Callable[[np.ndarray, int], Order],
) -> Graded:
    """The samples of some datasets, numbered on from one to the next, in the order of the plan's curriculum.

    ``firsts``: which of their samples each level begins with. Raises ConfigError for an index that is missing or does
    not fit, and where the first level allows nothing.
    """
    data = plan.config.data
    seq_length = data.length if data.kind == "pretrain" else None
    metrics, measured, problems = indexed_metrics(data), dict[str, DifficultyIndex](), list[Problem]()
    for metric in metrics:
        found = []
        for part in parts:
            folder = index_folder(part.prefix, metric.metric, seq_length, metric.index)
            try:
                whole = open_difficulty_index(folder, part.prefix)
            except (OSError, ValueError) as error:
                flag = "" if seq_length is None else f" --seq-length {seq_length}"
                flag += f" --output {metric.index}" if metric.index else ""
                command = f"run python data_prep/analyze.py {part.prefix} --metric {metric.metric}{flag}"
                problems.append(Problem(SECTION, metric.metric, str(error), command))
                continue
            found.append(whole.part(*unit_range(part.index, part.first, part.last, seq_length)))
        if len(found) == len(parts):
            measured[metric.metric] = found[0] if len(parts) == 1 else concatenate(found)
    if problems:
        raise ConfigError(problems)
    grades = grade(metrics, levels, measured)
    used = bisect.bisect_right(firsts, firsts[0]) - 1  # levels before it draw nothing here
    if not (grades <= used).any():
        measures = {name: found.values for name, found in measured.items() if len(found.values)}
        least = ", ".join(f"{name} is {values.min():g} or more" for name, values in measures.items())
        at = ", ".join(f"{name} {value}" for name, value in levels[used].difficulties.items())
        names = " and ".join(part.prefix for part in parts)
        rule = f"no sample of {names} is as easy as the curriculum begins ({at})" + (f": {least}" if least else "")
        raise ConfigError([Problem(SECTION, None, rule, "write a larger min_difficulty, or the first of difficulty")])
    return Graded(np.maximum(grades - used, 0), firsts[used:], order_of)


def levels_to_json(levels: Sequence[Level]) -> list[Any]:
    """As a checkpoint keeps them."""
    return [[level.samples, dict(level.difficulties)] for level in levels]


def levels_from_json(stored: Sequence[Any]) -> tuple[Level, ...]:
    """What ``levels_to_json`` made."""
    return tuple(Level(samples, difficulties) for samples, difficulties in stored)
