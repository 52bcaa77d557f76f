"""How many training sequences a dataset makes, and how many of them a run reads. Reads .idx files only.

Numpy, which takes longer to import than a plan takes to make, is imported where a dataset is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_settings import split_weights
from megatron_llama.config.settings import DataConfig

if TYPE_CHECKING:
    from megatron_llama.corpus.blend import BlendTimeline
    from megatron_llama.corpus.indexed_format import Index

SPLITS = ("training", "validation", "test")
"""In the order of ``data.split``."""


def split_range(split: str, number: int, count: int) -> tuple[int, int]:
    """First and last (exclusive) of ``count`` sequences in a split, bounds rounded half to even as in megatron-core."""
    shares = [float(share) for share in split.split(",")]
    first, last = (round(sum(shares[:end]) / sum(shares) * count) for end in (number, number + 1))
    return first, last


@dataclass(frozen=True)
class DatasetSplit:
    """What a split takes of a dataset."""

    prefix: str
    index: Index
    first: int
    """Its first sequence."""
    last: int
    """The sequence after its last."""

    @property
    def tokens(self) -> int:
        """Tokens of its sequences."""
        return self.index.tokens(self.first, self.last)

    def samples(self, seq_length: int) -> int:
        """Training sequences in an epoch of pretraining: documents follow each other, and the last label needs one
        token more."""
        return max(0, self.tokens - 1) // seq_length


def open_split(data: DataConfig, prefix: str, number: int = 0) -> DatasetSplit:
    """What split ``number`` of SPLITS takes of a dataset. Raises OSError or ValueError."""
    from megatron_llama.corpus.indexed_format import read_index

    index = read_index(prefix)
    if data.validation_prefixes and number < 2:
        return DatasetSplit(prefix, index, 0, len(index))
    return DatasetSplit(prefix, index, *split_range(data.split, number, len(index)))


def open_splits(data: DataConfig, number: int) -> list[DatasetSplit]:
    """What split ``number`` takes of each of its datasets. Raises OSError or ValueError."""
    prefixes = [str(prefix) for prefix in data.validation_prefixes] if number == 1 else []
    return [open_split(data, prefix, number) for prefix in prefixes or split_weights(data.prefixes)[1]]


def samples_per_epoch(data: DataConfig, number: int = 0) -> int:
    """Training sequences in which every document of split ``number`` is seen once. Raises OSError or ValueError.

    Pretraining drops the last, incomplete one.
    """
    parts = open_splits(data, number)
    if data.kind == "pretrain":
        return sum(part.samples(data.length) for part in parts)
    import numpy as np

    from megatron_llama.corpus.packing import histogram, pack_lengths

    lengths = np.concatenate([part.index.lengths[part.first : part.last] for part in parts])
    if not data.pack:
        return len(lengths)
    # An example of n tokens takes n - 1 positions. Too long ones are refused when the data is checked.
    positions = np.clip(lengths - 1, 1, data.length)
    return sum(recipe.count for recipe in pack_lengths(histogram(positions), data.length))


def planned_blends(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """(first sample, weight of each dataset by prefix) of ``data.prefixes`` and each entry of ``data.schedule``.

    A dataset that is named twice counts twice. Raises OSError or ValueError.
    """
    blends = [(0, data.prefixes), *((int(entry["samples"]), entry["prefixes"]) for entry in data.schedule)]
    return [(first, _weights(data, prefixes)) for first, prefixes in blends]


def planned_timeline(data: DataConfig, number: int = 0) -> BlendTimeline:
    """The stream of a run that starts anew: which sample of which dataset sample n is. Validation (split ``number`` 1)
    is on the first blend. Raises OSError or ValueError."""
    from megatron_llama.corpus.blend import BlendTimeline

    timeline = BlendTimeline([])
    for first, weights in planned_blends(data)[: 1 if number else None]:
        timeline = timeline.switched(first, weights)
    return timeline


def _weights(data: DataConfig, prefixes: Sequence[Any]) -> dict[str, float]:
    """Weights by prefix. Where none are given, each dataset's sequences in an epoch: an epoch reads each once."""
    weights, paths = split_weights(prefixes)
    if not weights and len(set(paths)) == 1:
        weights = [1.0] * len(paths)  # without opening it
    elif not weights:
        weights = [float(max(1, open_split(data, path).samples(data.length))) for path in paths]
    total: Counter[str] = Counter()
    for path, weight in zip(paths, weights, strict=True):
        total[path] += weight  # type: ignore[assignment]
    return dict(total)


@dataclass(frozen=True)
class DatasetUsage:
    """What a run that starts anew reads of one dataset."""

    prefix: str
    sequences: int
    """Training sequences in an epoch; for fine-tuning sets, examples."""
    tokens: int
    """Of those, in an epoch."""
    read: int
    """Sequences or examples that the run reads, over all epochs."""
    share: float
    """Of all that the run reads."""

    @property
    def epochs(self) -> float:
        """How often the run goes through the dataset."""
        return self.read / max(1, self.sequences)


def dataset_usage(data: DataConfig, samples: int) -> tuple[DatasetUsage, ...]:
    """What a run of ``samples`` reads of each training dataset. Raises OSError or ValueError."""
    found = []
    if data.kind == "pretrain":
        timeline = planned_timeline(data)
        read = timeline.read(samples)
        for prefix in dict.fromkeys(prefix for segment in timeline.segments for prefix in segment.weights):
            count = open_split(data, prefix).samples(data.length)
            share = read.get(prefix, 0) / max(1, samples)
            found.append(DatasetUsage(prefix, count, count * data.length, read.get(prefix, 0), share))
        return tuple(found)
    parts, epochs = open_splits(data, 0), samples / max(1, samples_per_epoch(data))
    examples = sum(part.last - part.first for part in parts)
    for part in parts:
        count = part.last - part.first
        found.append(DatasetUsage(part.prefix, count, part.tokens, round(count * epochs), count / max(1, examples)))
    return tuple(found)
