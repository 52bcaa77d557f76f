"""What a worker does with a block: lines to texts, texts to tokens, and an account of every line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from data_prep.lib.blocks import Block, Slots, segment_lines
from data_prep.lib.json_lines import BadLine, parse_line, parse_text
from data_prep.lib.sources import Source
from megatron_llama.data.indexed_format import token_dtype
from megatron_llama.text.encoders import Encoder, check_same

# One document in this many is encoded by the reference too, when a faster encoder does the work.
CHECK_EVERY = 256
CHECK_MAX_CHARACTERS = 50_000
# Of a bad line, as much goes to the quarantine file.
KEEP_BAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """What is the same for all blocks of a run."""

    sources: Sequence[Source]
    keys: Sequence[str]
    append_eod: bool
    max_line: int
    """bytes"""


@dataclass(frozen=True)
class BadRecord:
    """A line that was not taken."""

    segment: int
    """place of its segment in the block"""
    line: int
    """lines before it in the segment"""
    reason: str
    detail: str
    size: int
    """bytes; for a line that is too long, at least that many"""
    complete: bool
    """whether `raw` is all of it"""
    raw: bytes
    """at most its first KEEP_BAD_BYTES bytes"""


@dataclass
class Result:
    """A block's documents as they go into the files, one entry per JSON key, and the account of its lines."""

    number: int
    tokens: list[bytes]
    lengths: list[bytes]
    """int32 per document, 0 for one without tokens"""
    documents_read: int = 0
    text_bytes: int = 0
    """size of the lines"""
    lines: list[int] = field(default_factory=list)
    """lines in each segment, blank ones too"""
    bad: list[BadRecord] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """records that were taken, but changed: how, and how many"""
    learned: int = 0
    """of a fine-tuning set: tokens with loss"""


class BlockEncoder:
    """Encodes blocks; lives in a worker."""

    def __init__(self, job: Job, encoder: Encoder, slots: Slots) -> None:
        self.job = job
        self.encoder = encoder
        self.slots = slots
        self.dtype = token_dtype(encoder.vocab_size)
        self.eod = encoder.eod if job.append_eod else None

    def run(self, block: Block) -> Result:
        """Encodes a block.

        Raises:
            UserError: a source can't be read any more.
            MachineError: the fast encoder was caught giving other ids than the reference.
        """
        result = Result(block.number, [], [])
        documents: list[list[str]] = []
        for place, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            lines = segment_lines(segment, source, self.slots, self.job.max_line)
            result.lines.append(len(lines))
            for number, line in enumerate(lines):
                if not source.is_text and (not line or line.isspace()):
                    continue
                result.documents_read += 1
                result.text_bytes += len(line)
                texts = self._texts(line, source.is_text)
                if isinstance(texts, BadLine):
                    raw = line[:KEEP_BAD_BYTES]
                    complete = len(raw) == len(line) <= self.job.max_line
                    bad = BadRecord(place, number, texts.reason, texts.detail, len(line), complete, raw)
                    result.bad.append(bad)
                else:
                    documents.append(texts)
        for key in range(len(self.job.keys)):
            self._encode_key([texts[key] for texts in documents], block.number, result)
        return result

    def _texts(self, line: bytes, is_text: bool) -> list[str] | BadLine:
        if len(line) > self.job.max_line:
            return BadLine("line_too_long", f"more than {self.job.max_line:,} bytes")
        if not is_text:
            return parse_line(line, self.job.keys)
        text = parse_text(line)
        return text if isinstance(text, BadLine) else text * len(self.job.keys)

    def _encode_key(self, texts: list[str], seed: int, result: Result) -> None:
        checked = seed % CHECK_EVERY if self.encoder.is_fast else -1
        parts = []
        for number, text in enumerate(texts):
            ids = self._encode(text)
            if number % CHECK_EVERY == checked and len(text) <= CHECK_MAX_CHARACTERS:
                check_same(self.encoder, text, np.asarray(ids))
            parts.append(ids)
        lengths = np.fromiter((len(ids) for ids in parts), dtype="<i4", count=len(parts))
        if self.eod is not None:
            lengths += lengths > 0
        tokens = np.empty(int(lengths.sum(dtype=np.int64)), dtype=self.dtype)
        position = 0
        for ids in parts:
            if len(ids):
                end = position + len(ids)
                tokens[position:end] = ids
                if self.eod is not None:
                    tokens[end] = self.eod
                    end += 1
                position = end
        result.tokens.append(tokens.tobytes())
        result.lengths.append(lengths.tobytes())

    def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            ids: Sequence[int] = self.encoder.encode(text)
        except Exception:
            # a fast encoder may refuse what the reference takes; the reference's own errors go up
            if not self.encoder.is_fast:
                raise
            ids = self.encoder.reference(text)
        return ids
