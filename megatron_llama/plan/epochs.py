"""How many training sequences a dataset makes, and how many of them a run reads. Reads .idx files only.

Numpy, which takes longer to import than a plan takes to make, is imported where a dataset is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.config.data_prefixes import named_paths, weights_and_paths
from megatron_llama.config.settings import DataConfig

if TYPE_CHECKING:
    from megatron_llama.data.blend import Timeline

SPLITS = ("training", "validation", "test")
"""In the order of ``data.split``."""


def split_range(split: str, number: int, count: int) -> tuple[int, int]:
    """First and last (exclusive) of ``count`` sequences in a split, bounds rounded half to even as in megatron-core."""
    shares = [float(share) for share in split.split(",")]
    first, last = (round(sum(shares[:end]) / sum(shares) * count) for end in (number, number + 1))
    return first, last


def parts_of(data: DataConfig, number: int) -> list[tuple[str, tuple[int, int]]]:
    """(prefix, range of its sequences) of each dataset in split ``number`` of SPLITS. Raises OSError or ValueError."""
    from megatron_llama.data.indexed_format import read_index

    prefixes = weights_and_paths(data.prefixes)[1]
    if data.validation_prefixes and number < 2:
        prefixes = [str(prefix) for prefix in data.validation_prefixes] if number else prefixes
        return [(prefix, (0, len(read_index(prefix)))) for prefix in prefixes]
    return [(prefix, split_range(data.split, number, len(read_index(prefix)))) for prefix in prefixes]


def samples_per_epoch(data: DataConfig, number: int = 0) -> int:
    """Training sequences in which every document of split ``number`` is seen once. Raises OSError or ValueError.

    Pretraining drops the last, incomplete one.
    """
    if data.kind == "pretrain":
        return sum(sequences(data, prefix, number) for prefix in weights_and_paths(data.prefixes)[1])
    import numpy as np

    from megatron_llama.data.indexed_format import read_index
    from megatron_llama.data.packing import histogram, recipes

    lengths = np.concatenate(
        [read_index(prefix).lengths[first:last] for prefix, (first, last) in parts_of(data, number)]
    )
    if not data.pack:
        return len(lengths)
    # An example of n tokens takes n - 1 positions. Too long ones are refused when the data is checked.
    positions = np.clip(lengths - 1, 1, data.seq_length)
    return sum(recipe.count for recipe in recipes(histogram(positions), data.seq_length))


def planned_blends(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """(first sample, weight of each dataset by prefix) of ``data.prefixes`` and each entry of ``data.schedule``.

    A dataset that is named twice counts twice. Raises OSError or ValueError.
    """
    blends = [(0, data.prefixes), *((int(entry["samples"]), entry["prefixes"]) for entry in data.schedule)]
    return [(first, _weights(data, prefixes)) for first, prefixes in blends]


def planned_timeline(data: DataConfig, number: int = 0) -> Timeline:
    """The stream of a run that starts anew: which sample of which dataset sample n is. Validation (split ``number`` 1)
    is on the first blend. Raises OSError or ValueError."""
    from megatron_llama.data.blend import Timeline

    timeline = Timeline([])
    for first, weights in planned_blends(data)[: 1 if number else None]:
        timeline = timeline.switched(first, weights)
    return timeline


def _weights(data: DataConfig, prefixes: Sequence[Any]) -> dict[str, float]:
    """Weights by prefix. Where none are given, each dataset's sequences in an epoch: an epoch reads each once."""
    weights, paths = weights_and_paths(prefixes)
    if not weights and len(set(paths)) == 1:
        weights = [1.0] * len(paths)  # without opening it
    elif not weights:
        weights = [float(max(1, sequences(data, path))) for path in paths]
    total: Counter[str] = Counter()
    for path, weight in zip(paths, weights, strict=True):
        total[path] += weight  # type: ignore[assignment]
    return dict(total)


def sequences(data: DataConfig, prefix: str, number: int = 0) -> int:
    """Training sequences in an epoch of a pretraining dataset: its documents in split ``number`` follow each other, and
    the last label needs one token more. Raises OSError or ValueError."""
    from megatron_llama.data.indexed_format import read_index

    index = read_index(prefix)
    first, last = split_range(data.split, number, len(index))
    return max(0, index.tokens(first, last) - 1) // data.seq_length


@dataclass(frozen=True)
class Reading:
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


def readings(data: DataConfig, samples: int) -> tuple[Reading, ...]:
    """What a run of ``samples`` reads of each training dataset. Raises OSError or ValueError."""
    from megatron_llama.data.indexed_format import read_index

    if data.kind == "pretrain":
        found = []
        read = planned_timeline(data).read(samples)
        for _, prefix in named_paths(data):
            count = sequences(data, prefix)
            share = read.get(prefix, 0) / max(1, samples)
            found.append(Reading(prefix, count, count * data.seq_length, read.get(prefix, 0), share))
        return tuple(dict.fromkeys(found))
    epochs = samples / max(1, samples_per_epoch(data))
    parts = [(prefix, read_index(prefix), span) for prefix, span in parts_of(data, 0)]
    examples = sum(last - first for _, _, (first, last) in parts)
    return tuple(
        Reading(prefix, n, index.tokens(*span), round(n * epochs), n / max(1, examples))
        for prefix, index, span in parts
        for n in (span[1] - span[0],)
    )
