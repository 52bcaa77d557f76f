"""Which dataset sample n of a blend comes from, and which of that dataset's samples it is: a function of the weights
and n alone, in constant time and memory at any n. Numbers only: no file is opened, and nothing imports torch.

The j-th sample of dataset i has the key (j + phase i) / share i; the blend is all samples in the order of their keys.
Below a key t a dataset has share i · t samples, up to one, so any stretch of the blend is found without what comes
before it, and after n samples no dataset is further from its share of n than 1 + share i · datasets / 2. The phases
(i + 1/2) / datasets keep datasets of equal weight from taking their turns all at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

WINDOW = 1024
"""Width in keys, that is about as many samples, of what is sorted at a time."""
KEPT_WINDOWS = 4


class Blend:
    """Samples of several datasets in the proportion of ``weights``, each above 0."""

    def __init__(self, weights: Sequence[float], phases: Sequence[float] | None = None) -> None:
        """``phases`` other than the ones above, each at least 0: a dataset with a smaller one comes sooner."""
        total = math.fsum(weights)
        self.shares = [weight / total for weight in weights]
        self._phases = phases or [(number + 0.5) / len(weights) for number in range(len(weights))]
        self._window = lru_cache(KEPT_WINDOWS)(self._sort)

    def at(self, number: int) -> tuple[int, int]:
        """(dataset, which of its samples) of sample ``number``, all counted from 0."""
        window = self._find(number)
        place = number - window.first
        return int(window.datasets[place]), int(window.samples[place])

    def counts(self, number: int) -> list[int]:
        """How many of the first ``number`` samples come from each dataset."""
        window = self._find(number)
        inside = np.bincount(window.datasets[: number - window.first], minlength=len(self.shares))
        return [before + int(count) for before, count in zip(window.before, inside, strict=True)]

    def _below(self, dataset: int, key: float) -> int:
        """How many of a dataset's samples have a smaller key, to rounding. It never falls as the key rises, so windows
        neither share a sample nor lose one."""
        return max(0, math.ceil(key * self.shares[dataset] - self._phases[dataset]))

    def _find(self, number: int) -> _Window:
        """The window that sample ``number`` lies in: that of its number, or one nearby."""
        place = number // WINDOW
        while True:
            window = self._window(place)
            if window.first <= number < window.first + len(window.datasets):
                return window
            place += 1 if number >= window.first else -1

    def _sort(self, place: int) -> _Window:
        """The samples with keys from place · WINDOW on."""
        keys, datasets, samples = [], [], []
        before = [self._below(dataset, place * WINDOW) for dataset in range(len(self.shares))]
        for dataset, (phase, share) in enumerate(zip(self._phases, self.shares, strict=True)):
            own = np.arange(before[dataset], self._below(dataset, (place + 1) * WINDOW))
            keys.append((own + phase) / share)
            datasets.append(np.full(len(own), dataset))
            samples.append(own)
        order = np.argsort(np.concatenate(keys), kind="stable")  # equal keys: the dataset that is named first
        return _Window(before, sum(before), np.concatenate(datasets)[order], np.concatenate(samples)[order])


@dataclass(frozen=True)
class _Window:
    """A stretch of a blend."""

    before: list[int]
    """Samples of each dataset before it."""
    first: int
    """Its first sample."""
    datasets: np.ndarray
    """int64 [samples], the dataset of each."""
    samples: np.ndarray
    """int64 [samples], which of its dataset's samples each is."""


EPOCHS, MEGATRON = "epochs", "megatron"
"""Orders of samples: each epoch of a dataset for itself; or all epochs of a run together, as old runs have them."""


@dataclass(frozen=True)
class BlendSegment:
    """A stretch of the stream that is one blend, up to where the next segment begins."""

    first: int
    """Its first sample."""
    weights: Mapping[str, float]
    """By the datasets' prefixes."""
    starts: Mapping[str, int]
    """How many samples of each dataset, those of epochs before included, were read before the segment; also of datasets
    that it does not use, which may come back."""
    order: str = EPOCHS
    shuffled: int | None = None
    """With order MEGATRON: the samples that megatron-core shuffled together, all those of the run then."""


class BlendTimeline:
    """Which sample of which dataset sample n is, over all segments of a run."""

    def __init__(self, segments: Sequence[BlendSegment]) -> None:
        self.segments = tuple(segments)
        self._blends = [Blend(list(segment.weights.values())) for segment in segments]

    def segment_of(self, number: int) -> int:
        """The number of the segment that sample ``number`` belongs to."""
        return max(i for i, segment in enumerate(self.segments) if segment.first <= number)

    def at(self, number: int) -> tuple[str, int]:
        """(prefix, which of the dataset's samples over all epochs) of sample ``number``."""
        which = self.segment_of(number)
        segment = self.segments[which]
        dataset, sample = self._blends[which].at(number - segment.first)
        prefix = list(segment.weights)[dataset]
        return prefix, segment.starts.get(prefix, 0) + sample

    def read(self, number: int) -> dict[str, int]:
        """How many samples of each dataset are among the first ``number``, by prefix; of a blend in the old order,
        by its weights, which is right up to a sample or two an epoch."""
        return self._counts(self.segment_of(max(0, number - 1)), number)

    def before(self, number: int) -> dict[str, int]:
        """``read``, as the segment of sample ``number`` counts: with sequences of another length it counts anew."""
        return self._counts(self.segment_of(number), number)

    def _counts(self, which: int, number: int) -> dict[str, int]:
        segment, blend = self.segments[which], self._blends[which]
        counts = zip(segment.weights, blend.counts(number - segment.first), strict=True)
        return {**segment.starts, **{prefix: segment.starts.get(prefix, 0) + count for prefix, count in counts}}

    def switched(self, first: int, weights: Mapping[str, float]) -> BlendTimeline:
        """This timeline up to sample ``first``, then a blend of these weights, in which every dataset goes on where it
        stood."""
        before = [segment for segment in self.segments if segment.first < first]
        return BlendTimeline([*before, BlendSegment(first, dict(weights), self.read(first) if before else {})])

    def up_to(self, number: int) -> BlendTimeline:
        """Without the segments that had not begun after the first ``number`` samples."""
        return BlendTimeline([segment for segment in self.segments if segment.first < max(number, 1)])


def same_shares(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether two blends are the same: the same datasets in the same proportion."""
    totals = math.fsum(one.values()), math.fsum(other.values())
    return one.keys() == other.keys() and all(
        math.isclose(one[prefix] / totals[0], other[prefix] / totals[1], rel_tol=1e-9) for prefix in one
    )


def segments_from_json(stored: Sequence[Mapping[str, Any]]) -> list[BlendSegment]:
    """The segments that ``dataclasses.asdict`` turned into JSON."""
    return [BlendSegment(**segment) for segment in stored]
