"""How many training sequences a dataset makes: the length of an epoch. Reads .idx files only.

Numpy, which takes longer to import than a plan takes to make, is imported where a dataset is opened."""

from __future__ import annotations

from megatron_llama.config.data_prefixes import weights_and_paths
from megatron_llama.config.settings import DataConfig

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
        return sum(_pretraining_samples(data, number))
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


def epochs_of(data: DataConfig, samples: int) -> float:
    """How often ``samples`` training sequences go through the training split; of a blend with weights, through the
    dataset that is gone through most often. Raises OSError or ValueError."""
    weights = weights_and_paths(data.prefixes)[0]
    if data.kind != "pretrain" or not weights:
        return samples / max(1, samples_per_epoch(data))
    sizes = _pretraining_samples(data, 0)
    return max(samples * weight / sum(weights) / max(1, size) for weight, size in zip(weights, sizes, strict=True))


def _pretraining_samples(data: DataConfig, number: int) -> list[int]:
    """Of each dataset: sequences in documents that follow each other; the last label needs one token more."""
    from megatron_llama.data.indexed_format import read_index

    return [
        max(0, read_index(prefix).tokens(first, last) - 1) // data.seq_length
        for prefix, (first, last) in parts_of(data, number)
    ]
