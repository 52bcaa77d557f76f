"""Cut the input into ordered blocks of a few MiB, which workers read and encode.

A plain file is cut by byte range: the worker of [start, end) reads the lines that start in it. Parquet and Arrow are
cut by row groups or record batches. Any other file (compressed, a JSON array, CSV) is a stream that this process
unpacks, cuts after line feeds and sends to the workers. The output does not depend on the cuts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from data_prep.lib.input_readers import Source, check_unchanged, read_chunks
from data_prep.lib.parquet_csv import part_lines, part_sizes
from data_prep.lib.record_formats import BOM
from megatron_llama.system.errors import UserError
from megatron_llama.system.object_store import RemotePath, is_url


@dataclass(frozen=True)
class BlockPosition:
    """Position in the input: all sources before ``source``, and ``offset`` in it, in units of BlockSegment."""

    source: int = 0
    offset: int = 0


START = BlockPosition()
InputRange = tuple[BlockPosition, BlockPosition]
"""Input range [begin, end)."""


@dataclass(frozen=True)
class BlockSegment:
    """Range of one source: the lines that start in [start, end), in unpacked bytes.

    For Parquet and Arrow, the row groups or batches [start, end).
    """

    source: int
    start: int
    end: int
    data: bytes | None = None
    """Unpacked bytes of a stream; None: the worker reads the file."""
    disk_end: int = 0
    """Bytes on disk up to the segment's end, for the progress bar."""
    size: int = 0
    """Approximate bytes that a worker reads."""


@dataclass(frozen=True)
class TextBlock:
    """Unit of work of a worker. Small files share a block."""

    number: int
    segments: list[BlockSegment]


def cut_blocks(
    sources: Sequence[Source], begin: BlockPosition, max_line: int, block_bytes: int, until: BlockPosition | None = None
) -> Iterator[TextBlock]:
    """Yield the blocks from ``begin`` to ``until`` (default: the end) in order.

    Args:
        until: In a stream or a text file, only its start.

    Raises:
        UserError: A source has changed, or a compressed source is damaged or truncated.
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
            segments = _cut_stream(source, index, offset, max_line, block_bytes)
        elif source.in_parts:
            segments = _cut_parts(source, index, offset, end, block_bytes)
        else:
            segments = _cut_plain(source, index, offset, end, block_bytes)
        for segment in segments:
            if waiting and waiting_bytes + segment.size > block_bytes:
                yield TextBlock(number, waiting)
                number, waiting, waiting_bytes = number + 1, [], 0
            waiting.append(segment)
            waiting_bytes += segment.size
    if waiting:
        yield TextBlock(number, waiting)


def _cut_plain(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[BlockSegment]:
    """Yield byte ranges from ``offset`` to ``end`` (default: the file's end); a text file is one range."""
    if source.is_text or not source.size:
        if offset < max(1, source.size):
            yield BlockSegment(index, 0, max(1, source.size), disk_end=source.size, size=source.size)
        return
    last = source.size if end is None else end
    for start in range(offset, last, block_bytes):
        stop = min(start + block_bytes, last)
        yield BlockSegment(index, start, stop, disk_end=stop, size=stop - start)


def _cut_parts(source: Source, index: int, offset: int, end: int | None, block_bytes: int) -> Iterator[BlockSegment]:
    """Yield ranges of row groups or record batches from ``offset`` to ``end`` (default: the file's end)."""
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
        # yield empty sources too, so that the position advances past them
        yield BlockSegment(index, start, stop, disk_end=source.size * done // total, size=size)
        start = stop


def _cut_stream(source: Source, index: int, offset: int, max_line: int, block_bytes: int) -> Iterator[BlockSegment]:
    """Unpack a source from ``offset`` and cut it after the last line feed in each ``block_bytes``.

    Lines longer than ``max_line`` are truncated to ``max_line + 1`` bytes, so that the worker rejects them.
    """
    held: list[bytes] = []  # chunks since the last cut
    size = tail = 0  # bytes in `held`; bytes after its last line feed
    start = position = 0  # unpacked offsets of the start of `held` and of the end of the data read
    dropping = False  # in the remainder of a line that is too long
    disk = 0
    for chunk, disk in read_chunks(source):
        position += len(chunk)
        if position <= offset:
            start = position
            continue
        if start < offset:
            chunk, start = chunk[-(position - offset) :], offset
        feed = -1 if source.is_text else chunk.rfind(b"\n")
        if dropping:
            if feed < 0:
                continue
            line_end = chunk.index(b"\n") + 1
            end = position - len(chunk) + line_end
            yield _unpacked(index, start, end, b"".join(held) + b"\n", disk)
            held, size, start, chunk, dropping = [], 0, end, chunk[line_end:], False
            feed -= line_end
        held.append(chunk)
        size += len(chunk)
        tail = tail + len(chunk) if feed < 0 else len(chunk) - feed - 1
        if feed >= 0 and size >= block_bytes:
            data = b"".join(held)
            for cut in _cuts(data, block_bytes):
                end = position - len(data) + cut
                yield _unpacked(index, start, end, data[cut - (end - start) : cut], disk)
                start = end
            held, size = [data[len(data) - (position - start) :]], position - start
        if tail > max_line:
            data = b"".join(held)
            held, dropping = [data[: size - tail + max_line + 1]], True
            size, tail = len(held[0]), 0
    data = b"".join(held)
    if data or start == 0:
        # yield empty sources too, so that the position advances past them
        yield _unpacked(index, start, max(position, 1), data, disk)


def _cuts(data: bytes, limit: int) -> Iterator[int]:
    """Yield cut positions after line feeds, at most ``limit`` bytes apart unless a line is longer."""
    start = 0
    while len(data) - start >= limit:
        cut = data.rfind(b"\n", start, start + limit) + 1 or data.find(b"\n", start + limit) + 1
        if not cut:
            return
        yield cut
        start = cut


def _unpacked(index: int, start: int, end: int, data: bytes, disk: int) -> BlockSegment:
    return BlockSegment(index, start, end, data, disk_end=disk, size=len(data))


def segment_lines(segment: BlockSegment, source: Source, max_line: int) -> list[bytes]:
    """Return the lines that start in the segment (a text file is one line), without line feeds.

    Lines longer than ``max_line`` bytes are truncated to ``max_line + 1``. A byte-order mark is removed.

    Raises:
        UserError: The file is no longer readable.
    """
    if source.in_parts:
        return [line[: max_line + 1] for line in part_lines(source.file, source.kind, segment.start, segment.end)]
    data = segment.data if segment.data is not None else _read_range(source, segment, max_line)
    if segment.start == 0:
        data = data.removeprefix(BOM)
    if source.is_text:
        return [data]
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


@contextmanager
def _pread(source: Source) -> Iterator[Callable[[int, int], bytes]]:
    """Yield a function that reads (size, position) of a file or an object."""
    if is_url(source.file):
        remote = RemotePath(source.file)
        yield lambda size, position: remote.read_bytes(position, min(position + size, source.size))
        return
    with open(source.file, "rb", buffering=0) as file:
        yield partial(os.pread, file.fileno())


def _read_range(source: Source, segment: BlockSegment, max_line: int) -> bytes:
    """Read from the first line that starts in the segment to the end of the last one."""
    try:
        with _pread(source) as pread:
            if source.is_text:
                return pread(min(source.size, max_line + 1), 0)
            before = min(1, segment.start)
            data = pread(segment.end - segment.start + before, segment.start - before)
            if before:
                # A line that spans `start` belongs to the previous segment.
                first = data.find(b"\n") + 1
                if not first or first == len(data):
                    return b""
                data = data[first:]
            chunks = [data]
            position, tail = segment.end, len(data) - data.rfind(b"\n") - 1
            while chunks[-1][-1:] not in (b"\n", b"") and tail <= max_line:
                chunk = pread(1 << 18, position)
                end = chunk.find(b"\n") + 1
                chunk = chunk[:end] if end else chunk
                chunks.append(chunk)
                position, tail = position + len(chunk), tail + len(chunk)
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror}") from None
    return b"".join(chunks)
