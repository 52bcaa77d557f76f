"""The account of a run: every document read is written, empty or skipped, and the sum is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.lib.blocks import Block, Position
from data_prep.lib.job import Result


@dataclass
class KeyCounts:
    """Of one JSON key."""

    written: int = 0
    empty: int = 0
    tokens: int = 0


@dataclass
class Ledger:
    """Counts up to a position in the input."""

    keys: list[KeyCounts]
    position: Position = field(default_factory=Position)
    line: int = 0
    """lines of the current source before the position"""
    documents_read: int = 0
    text_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """by reason"""
    notes: dict[str, int] = field(default_factory=dict)
    """of a fine-tuning set: examples that were taken, but changed, by how"""
    learned: int = 0
    """of a fine-tuning set: tokens with loss"""

    def add(self, block: Block, result: Result) -> None:
        """Takes a block's account in; bad lines have been seen to already."""
        for segment, lines in zip(block.segments, result.lines, strict=True):
            self.line = lines + (self.line if segment.source == self.position.source else 0)
            self.position = Position(segment.source, segment.end)
        self.documents_read += result.documents_read
        self.text_bytes += result.text_bytes
        for record in result.bad:
            self.skipped[record.reason] = self.skipped.get(record.reason, 0) + 1
        for note, count in result.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count
        self.learned += result.learned
        for counts, lengths_bytes in zip(self.keys, result.lengths, strict=True):
            lengths = np.frombuffer(lengths_bytes, dtype="<i4")
            filled = int(np.count_nonzero(lengths))
            counts.written += filled
            counts.empty += len(lengths) - filled
            counts.tokens += int(lengths.sum(dtype=np.int64))
        self.check()

    def add_ledger(self, other: Ledger) -> None:
        """Takes the account of another part of the same input in; position and lines stay."""
        self.documents_read += other.documents_read
        self.text_bytes += other.text_bytes
        self.learned += other.learned
        for mine, theirs in ((self.skipped, other.skipped), (self.notes, other.notes)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        for counts, more in zip(self.keys, other.keys, strict=True):
            counts.written += more.written
            counts.empty += more.empty
            counts.tokens += more.tokens
        self.check()

    def line_before(self, block: Block, index: int, result: Result) -> int:
        """Lines of a segment's source before that segment of a block not yet added."""
        source = block.segments[index].source
        before = self.line if source == self.position.source else 0
        return before + sum(
            lines
            for segment, lines in zip(block.segments[:index], result.lines[:index], strict=True)
            if segment.source == source
        )

    @property
    def documents_skipped(self) -> int:
        return sum(self.skipped.values())

    @property
    def tokens(self) -> int:
        """Of all keys."""
        return sum(counts.tokens for counts in self.keys)

    def check(self) -> None:
        """No document may be lost."""
        for counts in self.keys:
            accounted = counts.written + counts.empty + self.documents_skipped
            assert self.documents_read == accounted, f"{self.documents_read} documents read, {accounted} accounted for"

    @staticmethod
    def from_json(data: dict[str, Any]) -> Ledger:
        """From the journal, which holds it as ``dataclasses.asdict`` does."""
        keys = [KeyCounts(**counts) for counts in data["keys"]]
        return Ledger(**{**data, "keys": keys, "position": Position(**data["position"])})
