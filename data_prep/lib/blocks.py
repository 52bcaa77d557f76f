"""Cutting the input into blocks of a few MiB that any worker can take, in a fixed order.

A plain file is cut by byte range: the worker that gets [start, end) reads the lines that begin in it, to their ends.
Parquet and Arrow are cut by their own parts. Any other file (compressed, one JSON array, .csv) is one stream, unpacked
once, here, into slots of memory shared with the workers, and cut after line feeds. Where the cuts fall never shows in
the output, which is all blocks joined in order.
"""

from __future__ import annotations

import mmap
import os
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from data_prep.lib.encoders import Encoder, check_same
from data_prep.lib.job import BadRecord, BlockResult, ChatFormat, PrepareJob
from data_prep.lib.parquet_csv import bad_columns, part_lines, part_sizes
from data_prep.lib.records import BOM, parse_line, parse_object, parse_text, parse_turns
from data_prep.lib.sources import Source, check_unchanged, read_pieces
from megatron_llama.corpus.indexed_format import MASK_DTYPE, token_dtype
from megatron_llama.system.errors import UserError
from megatron_llama.text.chat_template import encode_spans
from megatron_llama.text.conversation import RecordError, Template, labelled_turns


@dataclass(frozen=True)
class BlockPosition:
    """How far the input is done: all sources before `source`, and that one up to `offset`, counted as in Segment."""

    source: int = 0
    offset: int = 0


START = BlockPosition()


@dataclass(frozen=True)
class BlockSegment:
    """A part of one source: the lines that begin in [start, end), offsets counted in unpacked bytes of lines; of a
    source in parts, the parts [start, end)."""

    source: int
    start: int
    end: int
    slot: int | None = None
    """where the bytes are, if they were unpacked already; None: the worker reads the file"""
    length: int = 0
    """bytes in the slot"""
    inline: bytes | None = None
    """the bytes themselves, where they are more than a slot holds"""
    disk_end: int = 0
    """bytes of the source on disk up to the segment's end; for the progress bar"""
    size: int = 0
    """about how many bytes a worker has to read"""


@dataclass(frozen=True)
class TextBlock:
    """What one worker does at a time. Most have one segment; small files travel together."""

    number: int
    segments: list[BlockSegment]


@dataclass
class Slots:
    """Memory shared with forked workers, for unpacked blocks."""

    count: int
    size: int
    free: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(-1, self.count * self.size)
        for slot in range(self.count):
            self.free.put(slot)

    def put(self, slot: int, data: bytes) -> None:
        """Fills a slot."""
        self.memory[slot * self.size : slot * self.size + len(data)] = data

    def get(self, slot: int, length: int) -> bytes:
        """A slot's bytes."""
        return self.memory[slot * self.size : slot * self.size + length]


def cut_blocks(
    sources: Sequence[Source],
    begin: BlockPosition,
    slots: Slots,
    max_line: int,
    block_bytes: int,
    until: BlockPosition | None = None,
) -> Iterator[TextBlock]:
    """All blocks from `begin` on, or up to `until`, in order. Waits for a free slot before each unpacked block.

    `until` is at the begin of a source that is one stream or one text, never inside.

    Raises:
        UserError: a source has changed since it was found, or a compressed one is damaged or cut off.
    """
    number = 0
    waiting: list[BlockSegment] = []
    waiting_bytes = 0
    until = until or BlockPosition(len(sources))
    for index in range(begin.source, until.source + (until.offset > 0)):
        source = sources[index]
        check_unchanged(source)
        offset = begin.offset if index == begin.source else 0
        end = until.offset if index == until.source else None
        if source.is_stream:
            segments = _cut_stream(source, index, offset, slots, max_line)
        elif source.in_parts:
            segments = _cut_parts(source, index, offset, end, block_bytes)
        else:
            segments = _cut_plain(source, index, offset, end, block_bytes)
        for segment in segments:
            # an unpacked block holds a slot and goes out at once; what is on disk can wait for company
            on_disk = segment.slot is None and segment.inline is None
            if waiting and (not on_disk or waiting_bytes + segment.size > block_bytes):
                yield TextBlock(number, waiting)
                number, waiting, waiting_bytes = number + 1, [], 0
            waiting.append(segment)
            waiting_bytes += segment.size
            if not on_disk:
                yield TextBlock(number, waiting)
                number, waiting, waiting_bytes = number + 1, [], 0
    if waiting:
        yield TextBlock(number, waiting)


def _cut_plain(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[BlockSegment]:
    """Byte ranges from ``offset`` to ``end``, or to the file's end; a text is one."""
    if source.is_text or not source.size:
        if offset < max(1, source.size):
            yield BlockSegment(index, 0, max(1, source.size), disk_end=source.size, size=source.size)
        return
    last = source.size if end is None else end
    for start in range(offset, last, block_bytes):
        stop = min(start + block_bytes, last)
        yield BlockSegment(index, start, stop, disk_end=stop, size=stop - start)


def _cut_parts(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[BlockSegment]:
    """Row groups or record batches from ``offset`` to ``end``, or to the file's end."""
    sizes = part_sizes(source.file, source.kind)
    last = max(1, len(sizes)) if end is None else end
    total = max(1, sum(sizes))
    start, done = offset, sum(sizes[:offset])
    while start < last:
        stop, size = start + 1, sum(sizes[start : start + 1])
        while stop < last and size + sizes[stop] <= block_bytes:
            size += sizes[stop]
            stop += 1
        done += size
        # a source without parts still passes, so that the position moves behind it
        yield BlockSegment(index, start, stop, disk_end=source.size * done // total, size=size)
        start = stop


def _cut_stream(source: Source, index: int, offset: int, slots: Slots, max_line: int) -> Iterator[BlockSegment]:
    """Unpacks a source and cuts it after the last line feed that fits a slot; bytes before `offset` are dropped.

    Of a line longer than `max_line` only `max_line + 1` bytes are kept, enough for the worker to refuse it.
    """
    held: list[bytes] = []  # since the last cut
    size = tail = 0  # bytes in `held`; bytes in it after the last line feed
    start = position = 0  # unpacked offsets: of `held`'s begin, of the end of what was read
    dropping = False  # inside the rest of a line that is too long
    disk = 0
    for piece, disk in read_pieces(source):
        position += len(piece)
        if position <= offset:
            start = position
            continue
        if start < offset:
            piece, start = piece[-(position - offset) :], offset
        feed = -1 if source.is_text else piece.rfind(b"\n")
        if dropping:
            if feed < 0:
                continue
            line_end = piece.index(b"\n") + 1
            end = position - len(piece) + line_end
            yield _unpacked(index, start, end, b"".join(held) + b"\n", slots, disk)
            held, size, start, piece, dropping = [], 0, end, piece[line_end:], False
            feed -= line_end
        held.append(piece)
        size += len(piece)
        tail = tail + len(piece) if feed < 0 else len(piece) - feed - 1
        if feed >= 0 and size >= slots.size:
            data = b"".join(held)
            for cut in _cuts(data, slots.size):
                end = position - len(data) + cut
                yield _unpacked(index, start, end, data[cut - (end - start) : cut], slots, disk)
                start = end
            held, size = [data[len(data) - (position - start) :]], position - start
        if tail > max_line:
            data = b"".join(held)
            held, dropping = [data[: size - tail + max_line + 1]], True
            size, tail = len(held[0]), 0
    data = b"".join(held)
    if data or start == 0:
        # an empty source still passes, so that the position moves behind it
        yield _unpacked(index, start, max(position, 1), data, slots, disk)


def _cuts(data: bytes, limit: int) -> Iterator[int]:
    """Ends of parts of `data` after line feeds, each at most `limit` bytes long where its lines allow that."""
    start = 0
    while len(data) - start >= limit:
        cut = data.rfind(b"\n", start, start + limit) + 1 or data.find(b"\n", start + limit) + 1
        if not cut:
            return
        yield cut
        start = cut


def _unpacked(index: int, start: int, end: int, data: bytes, slots: Slots, disk: int) -> BlockSegment:
    if len(data) > slots.size:
        return BlockSegment(index, start, end, inline=data, disk_end=disk)
    slot = slots.free.get()
    if slot is None:
        raise InterruptedError  # the run is over: the thread that waits here must end
    slots.put(slot, data)
    return BlockSegment(index, start, end, slot=slot, length=len(data), disk_end=disk)


def segment_lines(segment: BlockSegment, source: Source, slots: Slots, max_line: int) -> list[bytes]:
    """The lines that begin in the segment (for a text source: the whole file as one), without line feeds.

    Lines longer than `max_line` bytes come as `max_line + 1` bytes. A byte-order mark at the source's start is gone.

    Raises:
        UserError: the file can't be read any more.
    """
    if segment.inline is not None:
        data = segment.inline
    elif segment.slot is not None:
        data = slots.get(segment.slot, segment.length)
    elif source.in_parts:
        return [line[: max_line + 1] for line in part_lines(source.file, source.kind, segment.start, segment.end)]
    else:
        data = _read_range(source, segment, max_line)
    if segment.start == 0:
        data = data.removeprefix(BOM)
    if source.is_text:
        return [data]
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _read_range(source: Source, segment: BlockSegment, max_line: int) -> bytes:
    """From the first line that begins in the segment to the end of the last."""
    try:
        with open(source.file, "rb", buffering=0) as file:
            if source.is_text:
                return file.read(min(source.size, max_line + 1))
            before = min(1, segment.start)
            data = os.pread(file.fileno(), segment.end - segment.start + before, segment.start - before)
            if before:
                # the line that runs across `start` belongs to the segment before, unless it ends exactly there
                first = data.find(b"\n") + 1
                if not first or first == len(data):
                    return b""
                data = data[first:]
            pieces = [data]
            position, tail = segment.end, len(data) - data.rfind(b"\n") - 1
            while pieces[-1][-1:] not in (b"\n", b"") and tail <= max_line:
                piece = os.pread(file.fileno(), 1 << 18, position)
                end = piece.find(b"\n") + 1
                piece = piece[:end] if end else piece
                pieces.append(piece)
                position, tail = position + len(piece), tail + len(piece)
    except OSError as error:
        raise UserError(f"can't read {source.path}: {error.strerror}") from None
    return b"".join(pieces)


# What a worker does with a block: lines to documents, documents to tokens, and an account of every line.


# One document in this many is encoded by the reference too, when a faster encoder does the work.
CHECK_EVERY = 256
CHECK_MAX_CHARACTERS = 50_000
# What is wrong with one record must not end a run that leaves bad records out.
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
Document = TypeVar("Document")


class BlockEncoder(ABC, Generic[Document]):
    """Encodes blocks; lives in a worker."""

    def __init__(self, job: PrepareJob, encoder: Encoder, slots: Slots) -> None:
        self.job, self.encoder, self.slots = job, encoder, slots
        self.dtype = token_dtype(encoder.tokenizer.size)

    def run(self, block: TextBlock) -> BlockResult:
        """Encodes a block.

        Raises:
            UserError: a source can't be read any more.
            MachineError: the fast encoder was caught giving other ids than the reference.
        """
        result = BlockResult()
        documents: list[Document] = []
        max_line = self.job.max_line
        for position, segment in enumerate(block.segments):
            source = self.job.sources[segment.source]
            begins_with_header = segment.start == 0 and self.job.is_table(segment.source)
            lines = segment_lines(segment, source, self.slots, max_line)
            result.lines.append(len(lines))
            for number, line in enumerate(lines):
                if number == 0 and begins_with_header:
                    continue
                if not source.is_text and (not line or line.isspace()):
                    continue
                result.documents_read += 1
                result.text_bytes += len(line)
                try:
                    if len(line) > max_line:
                        raise RecordError("line_too_long", f"more than {max_line:,} bytes")
                    if source.kind == "csv" and (wrong := bad_columns(line)):
                        raise RecordError("bad_columns", wrong)
                    documents.append(self.parse(line, segment, result))
                except RecordError as bad:
                    raw = line[: BadRecord.KEEP_BAD_BYTES]
                    complete = len(raw) == len(line) <= max_line  # a longer line was cut where it was read
                    record = BadRecord(position, number, bad.reason, bad.detail, len(line), complete, raw)
                    result.bad.append(record)
        lines, line = [], b""  # their texts are enough
        self.write(documents, block, result)
        return result

    @abstractmethod
    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> Document:
        """A line of a segment to a document. Raises Bad."""

    @abstractmethod
    def write(self, documents: list[Document], block: TextBlock, result: BlockResult) -> None:
        """Adds the block's documents to its result, one entry of tokens and lengths for each output."""


class TextEncoder(BlockEncoder[list[str]]):
    """For pretraining: a document is its texts, one for each JSON key."""

    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> list[str]:
        if self.job.sources[segment.source].is_text:
            return [parse_text(line)] * len(self.job.keys)
        return parse_line(line, self.job.keys)

    def write(self, documents: list[list[str]], block: TextBlock, result: BlockResult) -> None:
        eod = self.encoder.tokenizer.end if self.job.append_eod else None
        checked = block.number % CHECK_EVERY if self.encoder.is_fast else -1
        end = b"" if eod is None else np.array(eod, dtype=self.dtype).tobytes()
        for key in range(len(self.job.keys)):
            parts: list[bytes] = []
            lengths = np.zeros(len(documents), dtype="<i4")
            for number, texts in enumerate(documents):
                ids: Any = self._encode(texts[key])
                if number % CHECK_EVERY == checked and len(texts[key]) <= CHECK_MAX_CHARACTERS:
                    check_same(self.encoder, texts[key], np.asarray(ids))
                texts[key] = ""  # of a block that is one long line, memory is what there is least of
                ids = np.asarray(ids, dtype=self.dtype)
                if len(ids):
                    lengths[number] = len(ids) + (eod is not None)
                    parts += (ids.tobytes(), end)
            ids = ()
            result.tokens.append(b"".join(parts))
            result.lengths.append(lengths.tobytes())

    def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            return self.encoder.encode(text)
        except Exception:
            # a fast encoder may refuse what the reference takes; the reference's own errors go up
            if not self.encoder.is_fast:
                raise
            return self.encoder.reference(text)


class ExampleEncoder(BlockEncoder[tuple[list[int], list[bool]]]):
    """For fine-tuning: a document is (ids, whether each is learned); the two outputs are tokens and masks."""

    def __init__(self, job: PrepareJob, encoder: Encoder, slots: Slots, chat: ChatFormat) -> None:
        super().__init__(job, encoder, slots)
        self.chat = chat

    def parse(self, line: bytes, segment: BlockSegment, result: BlockResult) -> tuple[list[int], list[bool]]:
        try:
            kind = self.job.sources[segment.source].kind
            asked = self.chat.labelled if kind in ("csv", "parquet", "arrow") else None
            example, notes = self._example(line, self.chat.columns.get(segment.source), asked)
        except _FAULTS as error:
            raise RecordError("broken_record", f"{type(error).__name__}: {error}") from None
        result.notes.update(notes)
        return example

    def _example(
        self, line: bytes, columns: Sequence[str] | None, asked: Template | None
    ) -> tuple[tuple[list[int], list[bool]], list[str]]:
        """((ids, mask), notes) of a line; ``columns`` of a table's, ``asked`` of a row that is asked. Raises Bad."""
        chat = self.chat
        notes: list[str] = []
        if asked is not None:
            record = parse_object(line)
            texts = {name: "" if record.get(name) is None else str(record[name]) for name in asked.fields}
            turns = labelled_turns([*texts], [*texts.values()], asked)
        elif columns is None:
            turns, notes = parse_turns(parse_object(line), chat.format)
        else:
            assert chat.labelled is not None, "sft.py asks for a template where there are tables"
            values = parse_text(line).removesuffix("\r").split("\t")
            turns = labelled_turns(columns, values, chat.labelled)
        if chat.own_template:
            for turn in turns:
                found = next((name for name in chat.tokenizer.control_tokens if name in turn.text), None)
                if found is not None:
                    raise RecordError("control_token", f"the {turn.role}'s text holds {found}")
        ids, learn = encode_spans(chat.pieces(turns), chat.tokenizer, parse_special=chat.own_template)
        if chat.add_bos and chat.tokenizer.bos is not None:
            ids, learn = [chat.tokenizer.bos, *ids], [False, *learn]
        if len(ids) > chat.max_tokens:
            if not chat.truncate:
                raise RecordError("too_long", f"it has {len(ids)} tokens, and {chat.max_tokens} fit")
            ids, learn = ids[: chat.max_tokens], learn[: chat.max_tokens]
            if not any(learn[1:]):
                raise RecordError("answer_cut_off", f"its first {chat.max_tokens} tokens hold nothing of an answer")
            notes.append("cut to the sequence's length")
        if not any(learn[1:]):
            raise RecordError("no_assistant_turn", "the template leaves nothing of the answer")
        if chat.train_on_inputs:
            learn = [True] * len(ids)
        return (ids, learn), notes

    def write(self, documents: list[tuple[list[int], list[bool]]], block: TextBlock, result: BlockResult) -> None:
        lengths = np.array([len(ids) for ids, _ in documents], dtype="<i4").tobytes()
        ids = [number for numbers, _ in documents for number in numbers]
        learn = [mark for _, marks in documents for mark in marks]
        result.learned = sum(learn)
        result.tokens += [np.array(ids, dtype=self.dtype).tobytes(), np.array(learn, dtype=MASK_DTYPE).tobytes()]
        result.lengths += [lengths, lengths]
