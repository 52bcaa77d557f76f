"""The attention pattern, which kernels, masks, FLOPs and the plan's notes read.

A pattern applies to positions inside one document, so packing does not change a document's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_llama.config.settings import ModelConfig

LARGEST_FLASH_HEAD = 256
"""Largest head dimension of FlashAttention's kernels, which must be a multiple of 8."""

SCORES_AT_ONCE = 1 << 24
"""fp32 scores in memory, at most, while optim.qk_clip computes their maximum: 64 MiB."""

Lengths = tuple[tuple[int, ...], ...]
"""For each sequence of a batch, the lengths of its documents in tokens. Padding at the end counts as a document."""


class Keys(Enum):
    """Visible keys of a range, for query i of the tile."""

    ALL = "all"
    CAUSAL = "causal"
    """Keys 0 to i of the range."""
    WINDOW = "window"
    """``window`` keys of the range, from key i on."""
    GLOBAL = "global"
    """All; the range counts the document's global keys (``Pattern.global_keys``)."""


class KeyRange(NamedTuple):
    """A range of keys that a tile's queries attend to."""

    start: int
    stop: int
    keys: Keys


class Tile(NamedTuple):
    """Queries of a document for one kernel call, and the ranges of keys that they attend to."""

    start: int
    stop: int
    parts: tuple[KeyRange, ...]


@dataclass(frozen=True)
class Pattern:
    """Sparsity of attention in addition to the causal and the document mask; by default none."""

    window: int = 0
    """Tokens that a token attends to, itself included (model.sliding_window). 0: all."""
    block: int = 0
    """Tokens per block of model.sparse_attention. 0: no blocks."""
    local_blocks: int = 0
    """Blocks per group; a token attends to earlier tokens of its group."""
    global_blocks: int = 0
    """Blocks at the end of each earlier group that a token also attends to."""

    @property
    def group(self) -> int:
        """Tokens per group of blocks; 0 without blocks."""
        return self.block * self.local_blocks

    def is_sparse(self, length: int) -> bool:
        """Return whether the pattern masks keys in a document of ``length`` tokens."""
        return bool(0 < self.window < length or 0 < self.group < length and self.global_blocks < self.local_blocks)

    def span(self, length: float) -> float:
        """Return twice the mean number of keys per query in a document, with the query's own key counted by half.

        Attention's FLOPs are proportional to it. Without a pattern it is ``length``.
        """
        if 0 < self.window < length:
            return 2 * self.window - self.window**2 / length
        if 0 < self.group < length:
            whole, rest = divmod(length, self.group)
            tail = self.block * self.global_blocks
            # Whole groups attend to themselves and to the tails of earlier groups, as does the rest at the end.
            scores = whole * self.group**2 + whole * (whole - 1) * self.group * tail + rest**2 + 2 * rest * whole * tail
            return scores / length
        return length

    def keys(self, queries: int) -> int:
        """Return the number of visible keys of a document's first ``queries`` queries, their own keys included."""
        if 0 < self.window < queries:
            return triangle(self.window) + (queries - self.window) * self.window
        if 0 < self.group < queries:
            whole, rest = divmod(queries, self.group)
            tail = self.block * self.global_blocks
            earlier = triangle(whole - 1) * self.group * tail + rest * whole * tail
            return whole * triangle(self.group) + triangle(rest) + earlier
        return triangle(queries)

    def tiles(self, length: int, first: int = 0, end: int | None = None) -> Iterator[Tile]:
        """Yield tiles that compute queries ``first`` to ``end`` of a document of ``length`` tokens.

        They compute few masked keys. Each query is in one tile. Default: all queries.
        """
        for tile in self._tiles(length):
            start, stop = max(tile.start, first), tile.stop if end is None else min(tile.stop, end)
            if (start, stop) == (tile.start, tile.stop):
                yield tile
            elif start < stop:
                parts = (clipped for part in tile.parts for clipped in _clip(part, tile, start, stop))
                yield Tile(start, stop, tuple(parts))

    def _tiles(self, length: int) -> Iterator[Tile]:
        if 0 < self.window < length:
            yield Tile(0, self.window, (KeyRange(0, self.window, Keys.CAUSAL),))
            # A tile of n queries computes n - 1 masked scores per row; small tiles have other overhead.
            step = min(128, max(32, self.window // 4))
            for start in range(self.window, length, step):
                stop = min(start + step, length)
                yield Tile(start, stop, (KeyRange(start - self.window + 1, stop, Keys.WINDOW),))
        elif 0 < self.group < length:
            for start in range(0, length, self.group):
                stop = min(start + self.group, length)
                global_count = start // self.group * self.block * self.global_blocks
                earlier = (KeyRange(0, global_count, Keys.GLOBAL),) if global_count else ()
                yield Tile(start, stop, (KeyRange(start, stop, Keys.CAUSAL), *earlier))
        else:
            yield Tile(0, length, (KeyRange(0, length, Keys.CAUSAL),))

    def global_keys(self, length: int) -> tuple[int, int, int]:
        """Return the document's global keys: (whole groups, first global position in a group, tokens per group)."""
        return (length // self.group if self.group else 0, self.group - self.block * self.global_blocks, self.group)


CAUSAL = Pattern()
"""No sparsity: a token attends to all earlier tokens of its document."""


def triangle(count: int) -> int:
    """Return 1 + 2 + ... + count."""
    return count * (count + 1) // 2


def _clip(part: KeyRange, tile: Tile, start: int, stop: int) -> Iterator[KeyRange]:
    """Yield the ranges of ``part`` for queries ``start`` to ``stop`` of ``tile``."""
    if part.keys is Keys.CAUSAL:
        before = part.start + start - tile.start  # keys of earlier queries of the tile
        if before > part.start:
            yield KeyRange(part.start, before, Keys.ALL)
        yield KeyRange(before, part.stop - (tile.stop - stop), Keys.CAUSAL)
    elif part.keys is Keys.WINDOW:
        yield KeyRange(part.start + start - tile.start, part.stop - (tile.stop - stop), Keys.WINDOW)
    else:
        yield part


def pattern_of(model: ModelConfig) -> Pattern:
    """Return the attention pattern of a model."""
    sparse = model.sparse_attention
    if sparse is None:
        return Pattern(window=model.sliding_window or 0)
    return Pattern(0, sparse.block, sparse.num_local_blocks, sparse.num_global_blocks)


def fits_varlen(pattern: Pattern, dtype: str, head_dim: int) -> bool:
    """Return whether variable-length FlashAttention supports a pattern, dtype (torch's name) and head dimension."""
    return not pattern.group and dtype != "float32" and head_dim <= LARGEST_FLASH_HEAD and head_dim % 8 == 0
