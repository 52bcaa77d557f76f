"""What a dataset holds, as far as a plan must know it: the lengths of its documents, and how many training sequences
they make. Reads .idx files only.

Packing works on the histogram of lengths (best fit, longest first), so it takes as long for a thousand examples as for
a hundred million, and the number of sequences is the same in every epoch: which examples share a sequence changes, the
lengths that go together don't.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_llama.config.limits import weights_and_paths
from megatron_llama.config.settings import DataConfig

if TYPE_CHECKING:
    import numpy as np

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
MASK_SUFFIX = "_mask"
"""What the name of a fine-tuning set's loss masks adds to its own."""
SPLITS = ("training", "validation", "test")


@dataclass(frozen=True)
class Recipe:
    """A kind of packed sequence: the lengths that go into it, and how many such sequences there are."""

    parts: tuple[tuple[int, int], ...]
    """(length, how many examples of it), longest first."""
    count: int


def recipes(lengths: dict[int, int], capacity: int) -> list[Recipe]:
    """Packs {length: how many examples} into sequences of at most ``capacity`` tokens, none split: each example goes
    where it leaves the least room, longest first."""
    room: dict[int, list[Recipe]] = {}  # by the tokens left

    def put(parts: tuple[tuple[int, int], ...], length: int, fit: int, count: int, space: int) -> None:
        if count and fit:
            room.setdefault(space - fit * length, []).append(Recipe((*parts, (length, fit)), count))

    for length in sorted(lengths, reverse=True):
        left = lengths[length]
        assert 0 < length <= capacity, f"an example of {length} tokens does not fit into {capacity}"
        for space in sorted(space for space in room if space >= length):
            fit = space // length  # after one, the same sequence is again the one with the least room
            while left and room[space]:
                kind = room[space].pop()
                full = min(left // fit, kind.count)
                rest = left - full * fit if full < kind.count else 0
                put(kind.parts, length, fit, full, space)
                put(kind.parts, length, rest, 1, space)
                untouched = kind.count - full - bool(rest)
                if untouched:
                    room[space].append(Recipe(kind.parts, untouched))
                left -= full * fit + rest
            if not left:
                break
        fit = capacity // length
        put((), length, fit, left // fit, capacity)
        put((), length, left % fit, 1, capacity)
    return [kind for space in sorted(room) for kind in room[space]]


def document_lengths(prefix: str) -> np.ndarray:
    """Tokens of each sequence of an indexed dataset, int32, memory-mapped; raises OSError or ValueError."""
    import numpy as np

    with open(prefix + ".idx", "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{prefix}.idx is no Megatron index file")
    sequences = HEADER.unpack(head)[3]
    if os.path.getsize(prefix + ".idx") < HEADER.size + 12 * sequences:
        raise ValueError(f"{prefix}.idx is shorter than its header says")
    if not sequences:
        return np.zeros(0, dtype="<i4")
    return np.memmap(prefix + ".idx", dtype="<i4", mode="r", offset=HEADER.size, shape=(sequences,))


def split_range(split: str, number: int, count: int) -> tuple[int, int]:
    """First and last (exclusive) of ``count`` documents in a split; borders are rounded as megatron-core does."""
    shares = [float(share) for share in split.split(",")]
    ends = [sum(shares[:place]) / sum(shares) for place in range(len(shares) + 1)]
    return round(ends[number] * count), round(ends[number + 1] * count)


def parts_of(data: DataConfig, number: int) -> list[tuple[str, tuple[int, int]]]:
    """(prefix, range of its documents) of a split: SPLITS's first is number 0."""
    prefixes = weights_and_paths(data.prefixes)[1]
    if data.validation_prefixes and number < 2:
        prefixes = [str(prefix) for prefix in data.validation_prefixes] if number else prefixes
        return [(prefix, (0, len(document_lengths(prefix)))) for prefix in prefixes]
    return [(prefix, split_range(data.split, number, len(document_lengths(prefix)))) for prefix in prefixes]


def histogram(lengths: Any) -> dict[int, int]:
    """{length: how many} of an array of lengths."""
    import numpy as np

    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def samples_per_epoch(data: DataConfig, number: int = 0) -> int:
    """Sequences in which every document of a split, SPLITS's ``number``, is seen once; raises OSError or ValueError.

    Pretraining drops the last, incomplete one.
    """
    import numpy as np

    lengths = [document_lengths(prefix)[first:last] for prefix, (first, last) in parts_of(data, number)]
    if data.kind == "pretrain":
        return sum(_pretraining_samples(part, data.seq_length) for part in lengths)
    examples = np.concatenate(lengths)
    if not data.pack:
        return len(examples)
    places = np.minimum(examples - 1, data.seq_length)  # what is too long is refused by the one who reads it
    return sum(kind.count for kind in recipes(histogram(np.maximum(places, 1)), data.seq_length))


def epochs_of(data: DataConfig, samples: int) -> float:
    """How often ``samples`` training sequences go through the training split; of a blend with weights, through the
    dataset that is gone through most often. Raises OSError or ValueError."""
    weights = weights_and_paths(data.prefixes)[0]
    if data.kind != "pretrain" or not weights:
        return samples / max(1, samples_per_epoch(data))
    lengths = [document_lengths(prefix)[first:last] for prefix, (first, last) in parts_of(data, 0)]
    sizes = [max(1, _pretraining_samples(part, data.seq_length)) for part in lengths]
    return max(samples * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True))


def _pretraining_samples(lengths: np.ndarray, seq_length: int) -> int:
    """Sequences in documents that follow each other; the last label needs one token more."""
    import numpy as np

    return max(0, int(lengths.sum(dtype=np.int64)) - 1) // seq_length
