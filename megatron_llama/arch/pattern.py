"""Which earlier tokens a token sees, described once: for the kernels, the mask, the FLOPs and the plan's notes.

A pattern is about the positions inside one document, so a document sees the same alone and packed beside others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_llama.config.settings import ModelConfig

LARGEST_FLASH_HEAD = 256
"""Widest head of FlashAttention's kernels; its width is a multiple of 8."""


class Keys(Enum):
    """Which keys of a part of a tile are seen."""

    ALL = "all"
    CAUSAL = "causal"
    """The query at place i of the tile sees the keys at places 0 to i."""
    WINDOW = "window"
    """It sees ``window`` keys, from place i on."""
    GLOBAL = "global"
    """All of them; places count among the document's global keys (``Pattern.global_keys``)."""


class KeyRange(NamedTuple):
    """Keys that a tile's queries see, or some of them."""

    start: int
    stop: int
    keys: Keys


class Tile(NamedTuple):
    """Queries of a document that go through the kernel together, and the keys that they see."""

    start: int
    stop: int
    parts: tuple[KeyRange, ...]


@dataclass(frozen=True)
class Pattern:
    """What attention leaves out beside later tokens and other documents; by default nothing."""

    window: int = 0
    """A token sees this many tokens, itself included (model.sliding_window). 0: all."""
    block: int = 0
    """Tokens of a block of model.sparse_attention. 0: no blocks."""
    local_blocks: int = 0
    """A token sees what precedes it in its group of this many blocks."""
    global_blocks: int = 0
    """It also sees this many blocks at the end of each earlier group."""

    @property
    def group(self) -> int:
        """Tokens of a group of blocks; 0 without blocks."""
        return self.block * self.local_blocks

    def is_sparse(self, length: int) -> bool:
        """Whether it makes a difference to a document of ``length`` tokens."""
        return bool(0 < self.window < length or 0 < self.group < length and self.global_blocks < self.local_blocks)

    def span(self, length: float) -> float:
        """Twice the mean number of tokens that a token of a document sees, its own counted by half.

        Without a pattern that is ``length``: attention's work is proportional to it.
        """
        if 0 < self.window < length:
            return 2 * self.window - self.window**2 / length
        if 0 < self.group < length:
            whole, rest = divmod(length, self.group)
            kept = self.block * self.global_blocks
            # Whole groups see themselves, and of the earlier ones what is kept; so does the rest at the end.
            seen = whole * self.group**2 + whole * (whole - 1) * self.group * kept + rest**2 + 2 * rest * whole * kept
            return seen / length
        return length

    def tiles(self, length: int) -> Iterator[Tile]:
        """How to compute a document of ``length`` tokens, without what is left out. Every query is in one tile."""
        if 0 < self.window < length:
            yield Tile(0, self.window, (KeyRange(0, self.window, Keys.CAUSAL),))
            # A tile of n queries computes n - 1 scores a row too many; small tiles are slow for other reasons.
            step = min(128, max(32, self.window // 4))
            for start in range(self.window, length, step):
                stop = min(start + step, length)
                yield Tile(start, stop, (KeyRange(start - self.window + 1, stop, Keys.WINDOW),))
        elif 0 < self.group < length:
            for start in range(0, length, self.group):
                stop = min(start + self.group, length)
                kept = start // self.group * self.block * self.global_blocks
                earlier = (KeyRange(0, kept, Keys.GLOBAL),) if kept else ()
                yield Tile(start, stop, (KeyRange(start, stop, Keys.CAUSAL), *earlier))
        else:
            yield Tile(0, length, (KeyRange(0, length, Keys.CAUSAL),))

    def global_keys(self, length: int) -> tuple[int, int, int]:
        """The document's global keys: (groups that are whole, first of the places that are kept in each, group)."""
        return (length // self.group if self.group else 0, self.group - self.block * self.global_blocks, self.group)


def pattern_of(model: ModelConfig) -> Pattern:
    """The pattern of a model's attention."""
    sparse = model.sparse_attention
    if sparse is None:
        return Pattern(window=model.sliding_window or 0)
    return Pattern(0, sparse.block, sparse.num_local_blocks, sparse.num_global_blocks)


def fits_varlen(pattern: Pattern, dtype: str, head_dim: int) -> bool:
    """Whether FlashAttention over sequences of different lengths takes a pattern, dtype (torch's name) and head."""
    return not pattern.group and dtype != "float32" and head_dim <= LARGEST_FLASH_HEAD and head_dim % 8 == 0
