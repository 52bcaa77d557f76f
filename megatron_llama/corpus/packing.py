"""Examples of sample i of a fine-tuning dataset, as a function of seed and i, independent of the layout.

Sample numbers continue across epochs; each epoch has every example once, in a different order. Packing uses the
histogram of lengths (best fit, longest first), so its time hardly depends on the number of examples. The lengths that
share a sequence, and the number of sequences, are the same in every epoch; the examples differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

CACHED_EPOCHS = 2  # a global batch may extend into the next epoch


@dataclass(frozen=True)
class PackRecipe:
    """Lengths of the examples in a packed sequence, and the number of such sequences."""

    parts: tuple[tuple[int, int], ...]
    """(length, number of examples), longest first."""
    count: int


def pack_lengths(lengths: dict[int, int], capacity: int) -> list[PackRecipe]:
    """Pack {length: number of examples} into sequences of at most ``capacity`` tokens: best fit, longest first."""
    room: dict[int, list[PackRecipe]] = {}  # by free tokens

    def put(parts: tuple[tuple[int, int], ...], length: int, fit: int, count: int, space: int) -> None:
        if count and fit:
            room.setdefault(space - fit * length, []).append(PackRecipe((*parts, (length, fit)), count))

    for length in sorted(lengths, reverse=True):
        left = lengths[length]
        assert 0 < length <= capacity, f"an example of {length} tokens does not fit into {capacity}"
        for space in sorted(space for space in room if space >= length):
            fit = space // length  # after one example, the same sequence still has the least free tokens
            while left and room[space]:
                kind = room[space].pop()
                full = min(left // fit, kind.count)
                rest = left - full * fit if full < kind.count else 0
                put(kind.parts, length, fit, full, space)
                put(kind.parts, length, rest, 1, space)
                untouched = kind.count - full - bool(rest)
                if untouched:
                    room[space].append(PackRecipe(kind.parts, untouched))
                left -= full * fit + rest
            if not left:
                break
        fit = capacity // length
        put((), length, fit, left // fit, capacity)
        put((), length, left % fit, 1, capacity)
    return [kind for space in sorted(room) for kind in room[space]]


def histogram(lengths: np.ndarray) -> dict[int, int]:
    """Return {length: count} of an array of lengths."""
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


class Order(Protocol):
    """Samples as lists of examples."""

    def __len__(self) -> int:
        """Return the samples in an epoch."""
        ...

    def examples(self, index: int) -> list[int]:
        """Return the example numbers of sample ``index``, which may be in any epoch."""
        ...


class Unpacked:
    """Order of samples with one example each."""

    def __init__(self, count: int, seed: int) -> None:
        self._shuffles = _Shuffles(count, seed, stream=0)

    def __len__(self) -> int:
        return self._shuffles.count

    def examples(self, index: int) -> list[int]:
        """Return the example of sample ``index``."""
        epoch, position = divmod(index, len(self))
        return [int(self._shuffles.of(epoch)[position])]


class Packed:
    """Order of samples with several examples each.

    The lengths in a sample are the same in every epoch (``pack_lengths``). The examples of each length and the order of
    the sequences are drawn for each epoch.
    """

    def __init__(self, lengths: np.ndarray, capacity: int, seed: int) -> None:
        """``lengths`` [examples] in tokens, each from 1 to ``capacity``."""
        self._lengths = lengths
        counts = histogram(lengths)
        self._recipes = pack_lengths(counts, capacity)
        self._ends = np.cumsum([recipe.count for recipe in self._recipes])
        # Examples of one length are adjacent in _by_length(); each recipe uses a range of them.
        ascending = sorted(counts)
        before = np.cumsum([0, *(counts[length] for length in ascending)])
        position = dict(zip(ascending, before.tolist(), strict=False))
        self._firsts: list[list[int]] = []
        for recipe in self._recipes:
            self._firsts.append([position[length] for length, _ in recipe.parts])
            for length, fit in recipe.parts:
                position[length] += fit * recipe.count
        self._examples = _Shuffles(len(lengths), seed, stream=0)
        self._sequences = _Shuffles(len(self), seed, stream=1)
        self._by_length = lru_cache(CACHED_EPOCHS)(self._sort)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def examples(self, index: int) -> list[int]:
        """Return the examples of sample ``index``, longest first."""
        epoch, position = divmod(index, len(self))
        sequence = int(self._sequences.of(epoch)[position])
        kind = int(np.searchsorted(self._ends, sequence, side="right"))
        recipe = self._recipes[kind]
        number = sequence - (int(self._ends[kind]) - recipe.count)
        by_length = self._by_length(epoch)
        examples: list[int] = []
        for (_, fit), first in zip(recipe.parts, self._firsts[kind], strict=True):
            examples += by_length[first + number * fit : first + (number + 1) * fit].tolist()
        return examples

    def _sort(self, epoch: int) -> np.ndarray:
        """Return example numbers sorted by length; equal lengths in this epoch's order."""
        shuffled = self._examples.of(epoch)
        return shuffled[np.argsort(self._lengths[shuffled], kind="stable")]


class _Shuffles:
    """Permutations of ``count`` numbers, one per epoch."""

    def __init__(self, count: int, seed: int, stream: int) -> None:
        self.count, self.seed, self.stream = count, seed, stream
        self.of = lru_cache(CACHED_EPOCHS)(self._draw)

    def _draw(self, epoch: int) -> np.ndarray:
        # RandomState, because numpy guarantees that its stream does not change.
        return np.random.RandomState([self.seed % 2**32, self.seed >> 32, epoch, self.stream]).permutation(self.count)
