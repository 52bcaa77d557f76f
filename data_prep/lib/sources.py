"""An input file, and its records as lines of bytes, whatever its format and compression.

What a file is, its first bytes say: RedPajama's common_crawl is zstd although its names end in .json.gz. The name is
asked only where the bytes can't tell, for .csv and text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from data_prep.lib.parquet_csv import is_columnar, part_lines, part_sizes, row_lines
from data_prep.lib.records import BOM, element_lines
from megatron_llama.config.data_settings import COLUMNAR_SUFFIXES, COMPRESSION_SUFFIXES, CSV_SUFFIXES, strip_compression
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import atomic_open

PIECE_BYTES = 1 << 17
LARGEST_PART = 1 << 28
"""Unpacked bytes of a row group that a worker may take whole; a file with a larger one is read as one stream."""
UNITS = {"text": "file", "array": "record", "csv": "row", "parquet": "row", "arrow": "row"}
_NOT_READ = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x04\x22\x4d\x18": "lz4: unpack it, or pack it with zstd",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Obj\x01": "an Avro file: write it as parquet",
}
_POINTER = b"version https://git-lfs"
_HEAD_BYTES = 32


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    size: int
    """bytes on disk"""
    mtime_ns: int
    compression: str
    """"", "gzip", "zstd", "xz" or "bz2" """
    kind: str = "lines"
    """"lines": a record a line; "text": the whole file is one document; "array": one JSON array; "csv"; "parquet";
    "arrow". Records of the last four are read as JSON lines."""
    in_parts: bool = False
    """of parquet and arrow: whether workers take its parts on their own"""
    stored_at: str | None = None
    """of a pipe: the file that took its bytes"""

    @property
    def is_text(self) -> bool:
        """Whether the whole file is one document."""
        return self.kind == "text"

    @property
    def is_array(self) -> bool:
        """Whether the file is one JSON array."""
        return self.kind == "array"

    @property
    def is_stream(self) -> bool:
        """Whether its lines can only be found from its beginning on."""
        return not self.in_parts and (bool(self.compression) or self.kind not in ("lines", "text"))

    @property
    def file(self) -> str:
        """What to open; ``path`` is what to call it."""
        return self.stored_at or self.path

    @property
    def unit(self) -> str:
        """What its records are called in messages."""
        return UNITS.get(self.kind, "line")


def inspect(path: str, text_suffixes: tuple[str, ...]) -> Source:
    """What the file is. A pipe is read to its end.

    Raises:
        UserError: it can't be read, is no kind of file that is read here, or is damaged in a way that shows at once.
    """
    try:
        status = os.stat(path)
        pipe = store_pipe(path) if is_pipe(status) else None
        if pipe is None and not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is neither a file, a folder nor a pipe")
        with open(pipe.path if pipe else path, "rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    what = not_read(head)
    if what and not (strip_compression(path).endswith(text_suffixes) and not head.startswith(_POINTER)):
        raise UserError(f"{path} is {what}")
    compression = compression_of(head)
    kind = _kind(path, head, compression, text_suffixes)
    source = Source(path, status.st_size, status.st_mtime_ns, compression, kind)
    if pipe is not None:
        source = replace(source, mtime_ns=pipe.identity, stored_at=pipe.path)
    if kind in ("parquet", "arrow"):
        source = replace(source, in_parts=max(part_sizes(source.file, kind), default=0) <= LARGEST_PART)
    return source


def _kind(path: str, head: bytes, compression: str, text_suffixes: tuple[str, ...]) -> str:
    """``Source.kind``. Raises UserError where name and first bytes contradict each other."""
    if kind := is_columnar(head):
        return kind
    name = strip_compression(path)
    if name.endswith(COLUMNAR_SUFFIXES):
        if compression:
            raise UserError(f"{path} is compressed as a whole: unpack it; such files compress their own pages")
        raise UserError(f"{path} is cut off, damaged or no such file: it starts with {head[:8]!r}")
    is_json = head.lstrip(BOM + b" \t\r\n")[:1] in (b"{", b"[", b"")
    if not (compression or is_json) and path.lower().endswith(COMPRESSION_SUFFIXES):
        kinds = ", ".join(end[1:] for end in COMPRESSION_SUFFIXES)
        raise UserError(f"{path} is none of {kinds}, whatever its name says: it starts with {head[:8]!r}")
    return "text" if name.endswith(text_suffixes) else "csv" if name.endswith(CSV_SUFFIXES) else "lines"


def not_read(head: bytes) -> str | None:
    """What a file is that is not read here, by its first bytes, and what to do with it."""
    if head.startswith(_POINTER):
        return "a pointer of git-lfs: its content was not fetched (git lfs pull)"
    return next((what for magic, what in _NOT_READ.items() if head.startswith(magic)), None)


def with_array(source: Source) -> Source:
    """The source, read as one JSON array where its first byte, white space aside, says that it is one."""
    if source.kind != "lines":
        return source
    with contextlib.closing(_unpacked_pieces(source)) as pieces:
        for number, (piece, _) in enumerate(pieces):
            head = (piece if number else piece.removeprefix(BOM)).lstrip()
            if head:
                return replace(source, kind="array") if head.startswith(b"[") else source
    return source


def read_pieces(source: Source) -> Iterator[tuple[bytes, int]]:
    """The source's lines, unpacked, in pieces, each with the number of bytes on disk read so far.

    Raises:
        UserError: a file that is not plain lines is damaged or cut off.
    """
    if source.kind in ("parquet", "arrow"):
        return _columnar_pieces(source)
    pieces = _unpacked_pieces(source)
    if source.kind == "array":
        return element_lines(source.path, pieces)
    return row_lines(source.path, pieces) if source.kind == "csv" else pieces


def _columnar_pieces(source: Source) -> Iterator[tuple[bytes, int]]:
    sizes = part_sizes(source.file, source.kind)
    done, total = 0, max(1, sum(sizes))
    for number, part in enumerate(sizes):
        held: list[bytes] = []
        size = passed = 0
        for line in part_lines(source.file, source.kind, number, number + 1):
            held += (line, b"\n")
            size += len(line) + 1
            if size >= PIECE_BYTES:
                passed += size
                yield b"".join(held), source.size * (done + min(part, passed)) // total
                held, size = [], 0
        done += part
        if held:
            yield b"".join(held), source.size * done // total


def _unpacked_pieces(source: Source) -> Generator[tuple[bytes, int], None, None]:
    with open(source.file, "rb") as file:
        if source.compression:
            yield from unpack(source.path, source.compression, file)
        while piece := file.read(1 << 20):  # nothing is left of a compressed file
            yield piece, file.tell()


def read_lines(source: Source) -> Iterator[bytes]:
    """The source's lines (a text source is one line), without the line feed; a leading byte-order mark is gone."""
    rest: list[bytes] = []
    for number, (piece, _) in enumerate(read_pieces(source)):
        if number == 0:
            piece = piece.removeprefix(BOM)
        if source.is_text or b"\n" not in piece:
            rest.append(piece)
            continue
        head, *lines, tail = piece.split(b"\n")
        yield b"".join([*rest, head])
        yield from lines
        rest = [tail]
    if any(rest):
        yield b"".join(rest)


def check_unchanged(source: Source) -> None:
    """Raises UserError where the file was changed since it was inspected."""
    if source.stored_at is not None:
        return
    status = Path(source.path).stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UserError(f"{source.path} was changed while it was read: start again")


# Compressed files as plain bytes: gzip, zstd, xz and bzip2, recognised by their first bytes, never by their name.
#
# A stream that ends early is an error, always: what was in the rest is unknown.


# Small enough that one piece of a well-compressed file does not become hundreds of megabytes.
READ_BYTES = 1 << 17
# Files packed with a longer window (zstd --long, xz with a large dictionary) need that much memory to unpack.
ZSTD_MAX_WINDOW = 1 << 27
XZ_MAX_MEMORY = 1 << 28
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # the first block, and the end of an empty stream


def compression_of(head: bytes) -> str:
    """``gzip``, ``zstd``, ``xz``, ``bz2`` or nothing, by a file's first 10 bytes."""
    if head[:3] == b"BZh" and head[4:10] in _BZ2_BLOCKS:
        return "bz2"
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), "")


def unpack(path: str, kind: str, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The unpacked bytes of all frames, members or streams, in pieces, each with the bytes of the file read so far.

    By hand, because the libraries' own readers take a file that is cut off for a shorter one, or stop after the first
    frame. Zeros between and after gzip's members and xz's streams are padding.

    Raises:
        UserError: damaged, or cut off.
    """
    new, errors = _decompressor(path, kind)
    padded = kind in ("gzip", "xz")
    position = unpacked = 0
    frame: Any = None
    packed = b""
    while True:
        if not packed:
            packed = file.read(READ_BYTES)
            position += len(packed)
            if not packed:
                break
        if frame is None:
            packed = packed.lstrip(b"\0") if padded else packed
            if not packed:
                continue
            frame = new()
        try:
            piece = frame.decompress(packed)
        except errors as error:
            raise UserError(f"{path}: damaged {kind} data after {unpacked:,} good bytes: {error}") from None
        packed = frame.unused_data if frame.eof else b""
        if frame.eof:
            frame = None
        if piece:
            unpacked += len(piece)
            yield piece, position
    if frame is not None:
        raise UserError(
            f"{path} is cut off: its {kind} stream ends in the middle, after {unpacked:,} unpacked bytes. "
            "Fetch it again, or leave it out"
        )


def _decompressor(path: str, kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """(what makes a decompressor of one frame, the errors that it raises)"""
    if kind == "gzip":
        library: Any = zlib
        with contextlib.suppress(ImportError):
            library = importlib.import_module("isal.isal_zlib")  # twice as fast
        return partial(library.decompressobj, 31), (library.error, zlib.error)
    try:
        if kind == "xz":
            import lzma

            new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, XZ_MAX_MEMORY)
            return new, (lzma.LZMAError, EOFError)
        if kind == "bz2":
            import bz2

            return bz2.BZ2Decompressor, (OSError, ValueError, EOFError)
        import zstandard
    except ImportError as error:  # Pythons built by hand may lack lzma or bz2
        advice = " (pip install zstandard)" if kind == "zstd" else ""
        raise UserError(f"{path} is {kind}: that needs Python's package {error.name}{advice}") from None
    return zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompressobj, (zstandard.ZstdError,)


# Pipes as input: standard input, ``<(zcat x.gz)``, a FIFO.
#
# A run reads its input's beginning more than once, and in several processes. So a pipe's bytes go to a nameless
# temporary file first, which is gone with this process however it ends.


STDIN = "-"
_open_pipes: list[IO[bytes]] = []
"""Open as long as this process and its workers live."""


@dataclass(frozen=True)
class PipeCopy:
    """A pipe's content."""

    path: str
    size: int
    """Bytes."""
    identity: int
    """Of the content; in place of a file's time, so that a run with the same content goes on."""


def is_pipe(status: os.stat_result) -> bool:
    """Whether it can be read only once, from its beginning to its end."""
    return stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode)


def store_pipe(path: str) -> PipeCopy:
    """Reads a pipe to its end, into $TMPDIR.

    Raises:
        UserError: it is a terminal or another device, or there is no room.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as pipe:
            if stat.S_ISCHR(os.fstat(pipe.fileno()).st_mode):
                raise UserError(f"{path} is a terminal or a device: name a file, or write into a pipe")
            file = tempfile.TemporaryFile() if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile()
            sys.stderr.write(f"note: {path} is a pipe: its bytes go to {tempfile.gettempdir()} first\n")
            while piece := pipe.read(1 << 20):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
    except OSError as error:
        raise UserError(f"can't store the pipe {path} in {tempfile.gettempdir()}: {error.strerror}") from None
    _open_pipes.append(file)
    name = f"/proc/self/fd/{file.fileno()}" if isinstance(file.name, int) else file.name
    return PipeCopy(name, size, int(digest.hexdigest()[:15], 16))


# Shares the lines of a fine-tuning set out over training and validation, in files of their own.
#
# The lines stay as they are, so an evaluation can read them too. Which go where is a function of the seed and of how
# many there are; each part keeps the order of the input.


PARTS = ("train", "validation")


def split_lines(sources: Sequence[Source], sizes: Sequence[int], prefix: Path, tables: bool, seed: int) -> list[Path]:
    """Writes <prefix>_train and <prefix>_validation (.tsv for ``tables``, else .jsonl) with ``sizes`` lines each.

    Raises:
        UserError: there are not that many lines, or the tables' headers differ.
    """
    headers = {header_of(source) for source in sources} if tables else set()
    if len(headers) > 1:
        raise UserError("--split: the tables have different headers")
    count = sum(1 for source in sources for _ in _records(source, tables))
    if sum(sizes) > count:
        raise UserError(f"--split {','.join(map(str, sizes))} needs {sum(sizes):,} lines, and there are {count:,}")
    part_of = np.full(count, len(sizes), dtype=np.int8)
    order = np.random.RandomState(seed).permutation(count)
    start = 0
    for part, size in enumerate(sizes):
        part_of[order[start : start + size]] = part
        start += size
    paths = [prefix.with_name(f"{prefix.name}_{part}{'.tsv' if tables else '.jsonl'}") for part in PARTS]
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_open(path)) for path in paths]
        for file in files:
            for header in headers:
                file.write(header + b"\n")
        lines = (line for source in sources for line in _records(source, tables))
        for part, line in zip(part_of.tolist(), lines, strict=True):
            if part < len(files):
                files[part].write(line + b"\n")
    return paths


def header_of(source: Source) -> bytes:
    """The first line of a table.

    Raises:
        UserError: the file is empty.
    """
    for line in read_lines(source):
        return line.removesuffix(b"\r")
    raise UserError(f"{source.path} is empty: a table begins with the names of its columns")


def _records(source: Source, tables: bool) -> Iterator[bytes]:
    """Lines that hold something, without a table's header."""
    for number, line in enumerate(read_lines(source)):
        if not (tables and number == 0) and line and not line.isspace():
            yield line
