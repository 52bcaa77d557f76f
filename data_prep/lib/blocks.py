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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data_prep.lib.columnar import part_lines, part_sizes
from data_prep.lib.json_lines import BOM
from data_prep.lib.sources import Source, check_unchanged, read_pieces
from megatron_llama.system.errors import UserError


@dataclass(frozen=True)
class Position:
    """How far the input is done: all sources before `source`, and that one up to `offset`, counted as in Segment."""

    source: int = 0
    offset: int = 0


START = Position()


@dataclass(frozen=True)
class Segment:
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
class Block:
    """What one worker does at a time. Most have one segment; small files travel together."""

    number: int
    segments: list[Segment]


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
    begin: Position,
    slots: Slots,
    max_line: int,
    block_bytes: int,
    until: Position | None = None,
) -> Iterator[Block]:
    """All blocks from `begin` on, or up to `until`, in order. Waits for a free slot before each unpacked block.

    `until` is at the begin of a source that is one stream or one text, never inside.

    Raises:
        UserError: a source has changed since it was found, or a compressed one is damaged or cut off.
    """
    number = 0
    waiting: list[Segment] = []
    waiting_bytes = 0
    until = until or Position(len(sources))
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
                yield Block(number, waiting)
                number, waiting, waiting_bytes = number + 1, [], 0
            waiting.append(segment)
            waiting_bytes += segment.size
            if not on_disk:
                yield Block(number, waiting)
                number, waiting, waiting_bytes = number + 1, [], 0
    if waiting:
        yield Block(number, waiting)


def _cut_plain(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[Segment]:
    """Byte ranges from ``offset`` to ``end``, or to the file's end; a text is one."""
    if source.is_text or not source.size:
        if offset < max(1, source.size):
            yield Segment(index, 0, max(1, source.size), disk_end=source.size, size=source.size)
        return
    last = source.size if end is None else end
    for start in range(offset, last, block_bytes):
        stop = min(start + block_bytes, last)
        yield Segment(index, start, stop, disk_end=stop, size=stop - start)


def _cut_parts(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[Segment]:
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
        yield Segment(index, start, stop, disk_end=source.size * done // total, size=size)
        start = stop


def _cut_stream(source: Source, index: int, offset: int, slots: Slots, max_line: int) -> Iterator[Segment]:
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


def _unpacked(index: int, start: int, end: int, data: bytes, slots: Slots, disk: int) -> Segment:
    if len(data) > slots.size:
        return Segment(index, start, end, inline=data, disk_end=disk)
    slot = slots.free.get()
    if slot is None:
        raise InterruptedError  # the run is over: the thread that waits here must end
    slots.put(slot, data)
    return Segment(index, start, end, slot=slot, length=len(data), disk_end=disk)


def segment_lines(segment: Segment, source: Source, slots: Slots, max_line: int) -> list[bytes]:
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


def _read_range(source: Source, segment: Segment, max_line: int) -> bytes:
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
