"""Number of training sequences in a dataset, and in a run's use of it. Reads .idx files only.

numpy, whose import takes longer than a plan, is imported when a dataset is opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_settings import split_weights, validation_sets
from megatron_llama.config.settings import DataConfig

if TYPE_CHECKING:
    from megatron_llama.corpus.blend import BlendTimeline
    from megatron_llama.corpus.indexed_format import Index

SPLITS = ("training", "validation", "test")
"""Splits in the order of ``data.split``."""


def split_range(split: str, number: int, count: int) -> tuple[int, int]:
    """Return the range (end exclusive) of a split in ``count`` sequences, rounded half to even as in megatron-core."""
    shares = [float(share) for share in split.split(",")]
    first, last = (round(sum(shares[:end]) / sum(shares) * count) for end in (number, number + 1))
    return first, last


@dataclass(frozen=True)
class DatasetSplit:
    """Part of a dataset in a split."""

    prefix: str
    index: Index
    first: int
    """First sequence."""
    last: int
    """Last sequence (exclusive)."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.index.tokens(self.first, self.last)

    def samples(self, seq_length: int) -> int:
        """Return the training sequences in an epoch of pretraining; the last label needs one more token."""
        return max(0, self.tokens - 1) // seq_length


def open_split(data: DataConfig, prefix: str, number: int = 0) -> DatasetSplit:
    """Return the part of a dataset in split ``number`` of SPLITS. Raises OSError or ValueError."""
    from megatron_llama.corpus.indexed_format import read_index

    index = read_index(prefix)
    if data.validation_prefixes and number < 2:
        return DatasetSplit(prefix, index, 0, len(index))
    return DatasetSplit(prefix, index, *split_range(data.split, number, len(index)))


def open_splits(data: DataConfig, number: int, name: str | None = None) -> list[DatasetSplit]:
    """Return the part of each dataset in split ``number``, of validation set ``name``, None for all sets.

    Raises OSError or ValueError.
    """
    sets = validation_sets(data) if number == 1 else {}
    prefixes = [path for each, paths in sets.items() if name in (None, each) for path in paths]
    return [open_split(data, prefix, number) for prefix in prefixes or split_weights(data.prefixes)[1]]


def samples_per_epoch(data: DataConfig, number: int = 0) -> int:
    """Return the training sequences of an epoch over split ``number``. Raises OSError or ValueError.

    Pretraining drops the last, incomplete sequence.
    """
    parts = open_splits(data, number)
    if data.kind == "pretrain":
        return sum(part.samples(data.length) for part in parts)
    import numpy as np

    from megatron_llama.corpus.packing import histogram, pack_lengths

    lengths = np.concatenate([part.index.lengths[part.first : part.last] for part in parts])
    if not data.pack:
        return len(lengths)
    # An example of n tokens takes n - 1 positions. The check of the data rejects too long ones.
    return sum(recipe.count for recipe in pack_lengths(histogram(np.clip(lengths - 1, 1, data.length)), data.length))


def planned_blends(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """Return (first sample, weights by prefix) of ``data.prefixes`` and of each entry of ``data.schedule``.

    A dataset that is listed twice counts twice. Raises OSError or ValueError.
    """
    blends = [(0, data.prefixes), *((int(entry["samples"]), entry["prefixes"]) for entry in data.schedule)]
    return [(first, _weights(data, prefixes)) for first, prefixes in blends]


def planned_timeline(data: DataConfig) -> BlendTimeline:
    """Return the training stream of a new run. Raises OSError or ValueError."""
    from megatron_llama.corpus.blend import BlendTimeline

    timeline = BlendTimeline([])
    for first, weights in planned_blends(data):
        timeline = timeline.switched(first, weights)
    return timeline


def validation_timelines(data: DataConfig) -> dict[str, BlendTimeline]:
    """Return the stream of each validation set by name. "" is the second split of the first blend, if there is no set.

    Raises OSError or ValueError.
    """
    from megatron_llama.corpus.blend import BlendTimeline

    sets = validation_sets(data) or {"": data.prefixes}
    return {name: BlendTimeline([]).switched(0, _weights(data, paths)) for name, paths in sets.items()}


def _weights(data: DataConfig, prefixes: Sequence[Any]) -> dict[str, float]:
    """Return the weights by prefix; by default each dataset's sequences, so that an epoch reads each sequence once."""
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
    """Use of one dataset by a new run."""

    prefix: str
    sequences: int
    """Training sequences (fine-tuning: examples) in an epoch."""
    tokens: int
    """Tokens in an epoch."""
    read: int
    """Sequences or examples that the run reads, over all epochs."""
    share: float
    """Share of all sequences that the run reads."""

    @property
    def epochs(self) -> float:
        """Number of epochs over the dataset."""
        return self.read / max(1, self.sequences)


def dataset_usage(data: DataConfig, samples: int) -> tuple[DatasetUsage, ...]:
    """Return the use of each training dataset by a run of ``samples``. Raises OSError or ValueError."""
    usage = []
    if data.kind == "pretrain":
        timeline = planned_timeline(data)
        read = timeline.read(samples)
        for prefix in dict.fromkeys(prefix for segment in timeline.segments for prefix in segment.weights):
            count = open_split(data, prefix).samples(data.length)
            share = read.get(prefix, 0) / max(1, samples)
            usage.append(DatasetUsage(prefix, count, count * data.length, read.get(prefix, 0), share))
        return tuple(usage)
    parts, epochs = open_splits(data, 0), samples / max(1, samples_per_epoch(data))
    examples = sum(part.last - part.first for part in parts)
    for part in parts:
        count = part.last - part.first
        usage.append(DatasetUsage(part.prefix, count, part.tokens, round(count * epochs), count / max(1, examples)))
    return tuple(usage)
