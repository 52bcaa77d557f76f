"""Blends: the dataset, and its sample, of sample n, as a function of weights and n in constant time and memory.

The j-th sample of dataset i has the key (j + phase i) / share i; the blend contains all samples in the order of their
keys. Below a key t, a dataset has share i · t samples, up to one, so any part of the blend is computed without the part
before it. After n samples no dataset deviates from its share of n by more than 1 + share i · datasets / 2. The phases
(i + 1/2) / datasets interleave datasets of equal weight. The module opens no file and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

WINDOW = 1024
"""Width of a sorted window in keys, which is about the number of its samples."""
CACHED_WINDOWS = 4


class Blend:
    """Samples of several datasets in the proportion of ``weights``, each above 0."""

    def __init__(self, weights: Sequence[float], phases: Sequence[float] | None = None) -> None:
        """Use ``phases`` (each at least 0) instead of the default; datasets with smaller phases come earlier."""
        total = math.fsum(weights)
        self.shares = [weight / total for weight in weights]
        self._phases = phases or [(number + 0.5) / len(weights) for number in range(len(weights))]
        self._window = lru_cache(CACHED_WINDOWS)(self._sort)

    def at(self, number: int) -> tuple[int, int]:
        """Return (dataset, its sample) of sample ``number``, all counted from 0."""
        window = self._find(number)
        place = number - window.first
        return int(window.datasets[place]), int(window.samples[place])

    def counts(self, number: int) -> list[int]:
        """Return the number of samples of each dataset among the first ``number``."""
        window = self._find(number)
        inside = np.bincount(window.datasets[: number - window.first], minlength=len(self.shares))
        return [before + int(count) for before, count in zip(window.before, inside, strict=True)]

    def _below(self, dataset: int, key: float) -> int:
        """Return the number of a dataset's samples with a smaller key, up to rounding.

        It is monotonic in the key, so each sample is in exactly one window.
        """
        return max(0, math.ceil(key * self.shares[dataset] - self._phases[dataset]))

    def _find(self, number: int) -> _Window:
        """Return the window that contains sample ``number``."""
        place = number // WINDOW
        while True:
            window = self._window(place)
            if window.first <= number < window.first + len(window.datasets):
                return window
            place += 1 if number >= window.first else -1

    def _sort(self, place: int) -> _Window:
        """Return the window of keys from place · WINDOW on."""
        keys, datasets, samples = [], [], []
        before = [self._below(dataset, place * WINDOW) for dataset in range(len(self.shares))]
        for dataset, (phase, share) in enumerate(zip(self._phases, self.shares, strict=True)):
            numbers = np.arange(before[dataset], self._below(dataset, (place + 1) * WINDOW))
            keys.append((numbers + phase) / share)
            datasets.append(np.full(len(numbers), dataset))
            samples.append(numbers)
        order = np.argsort(np.concatenate(keys), kind="stable")  # equal keys: the first dataset first
        return _Window(before, sum(before), np.concatenate(datasets)[order], np.concatenate(samples)[order])


@dataclass(frozen=True)
class _Window:
    """A sorted part of a blend."""

    before: list[int]
    """Samples of each dataset before the window."""
    first: int
    """Number of the first sample."""
    datasets: np.ndarray
    """Dataset of each sample, int64 [samples]."""
    samples: np.ndarray
    """Number of each sample in its dataset, int64 [samples]."""


EPOCHS, MEGATRON = "epochs", "megatron"
"""Orders of samples: each epoch shuffled separately, or all epochs of a run shuffled together (Megatron-LM's)."""


@dataclass(frozen=True)
class BlendSegment:
    """Part of the stream with one blend; it ends where the next segment begins."""

    first: int
    """Number of the first sample."""
    weights: Mapping[str, float]
    """Weights by the datasets' prefixes."""
    starts: Mapping[str, int]
    """Samples of each dataset that were read before the segment, over all epochs; also of datasets that only other
    segments use."""
    order: str = EPOCHS
    shuffled: int | None = None
    """With order MEGATRON: number of samples that megatron-core shuffled together."""


class BlendTimeline:
    """Datasets and samples of a run's stream, over all segments."""

    def __init__(self, segments: Sequence[BlendSegment]) -> None:
        self.segments = tuple(segments)
        self._blends = [Blend(list(segment.weights.values())) for segment in segments]

    def segment_of(self, number: int) -> int:
        """Return the index of the segment that contains sample ``number``."""
        return max(i for i, segment in enumerate(self.segments) if segment.first <= number)

    def at(self, number: int) -> tuple[str, int]:
        """Return (prefix, number of the dataset's sample over all epochs) of sample ``number``."""
        index = self.segment_of(number)
        segment = self.segments[index]
        dataset, sample = self._blends[index].at(number - segment.first)
        prefix = list(segment.weights)[dataset]
        return prefix, segment.starts.get(prefix, 0) + sample

    def read(self, number: int) -> dict[str, int]:
        """Return the samples of each dataset among the first ``number``, by prefix.

        In a segment of order MEGATRON the counts are approximate, off by up to two samples per epoch.
        """
        return self._counts(self.segment_of(max(0, number - 1)), number)

    def before(self, number: int) -> dict[str, int]:
        """Return ``read`` as the segment of sample ``number`` counts, which may have another sequence length."""
        return self._counts(self.segment_of(number), number)

    def _counts(self, index: int, number: int) -> dict[str, int]:
        segment, blend = self.segments[index], self._blends[index]
        counts = zip(segment.weights, blend.counts(number - segment.first), strict=True)
        return {**segment.starts, **{prefix: segment.starts.get(prefix, 0) + count for prefix, count in counts}}

    def switched(self, first: int, weights: Mapping[str, float]) -> BlendTimeline:
        """Return this timeline up to sample ``first``, then a blend of these weights; datasets keep their positions."""
        before = [segment for segment in self.segments if segment.first < first]
        return BlendTimeline([*before, BlendSegment(first, dict(weights), self.read(first) if before else {})])

    def up_to(self, number: int) -> BlendTimeline:
        """Return the timeline without segments that begin after the first ``number`` samples."""
        return BlendTimeline([segment for segment in self.segments if segment.first < max(number, 1)])


def same_shares(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether two blends have the same datasets in the same proportion."""
    totals = math.fsum(one.values()), math.fsum(other.values())
    return one.keys() == other.keys() and all(
        math.isclose(one[prefix] / totals[0], other[prefix] / totals[1], rel_tol=1e-9) for prefix in one
    )


def segments_from_json(stored: Sequence[Mapping[str, Any]]) -> list[BlendSegment]:
    """Return the segments from the JSON of ``dataclasses.asdict``."""
    return [BlendSegment(**segment) for segment in stored]
