"""Input files, and their records as lines of bytes for every format and compression.

The first bytes of a file determine its type: RedPajama's common_crawl is zstd despite its .json.gz names. The name only
distinguishes CSV and text files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
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
from data_prep.lib.record_formats import BOM, element_lines
from megatron_llama.config.data_settings import COLUMNAR_SUFFIXES, COMPRESSION_SUFFIXES, CSV_SUFFIXES, strip_compression
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import atomic_open, open_regular
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.system.object_store import RemotePath, is_url

CHUNK_BYTES = 1 << 17
LARGEST_PART = 1 << 28
"""Maximum unpacked bytes of a row group for parallel reading; files with larger ones are read as a stream."""
UNITS = {"text": "file", "array": "record", "csv": "row", "parquet": "row", "arrow": "row"}
_NOT_READ = {
    b"PK\x03\x04": "a zip archive. Unpack it",
    b"\x04\x22\x4d\x18": "lz4-compressed. Unpack it, or compress it with zstd",
    b"7z\xbc\xaf": "a 7z archive. Unpack it",
    b"Obj\x01": "an Avro file. Convert it to Parquet",
}
_POINTER = b"version https://git-lfs"
_HEAD_BYTES = 32


@dataclass(frozen=True)
class Source:
    """Input file."""

    path: str
    size: int
    """Bytes on disk."""
    mtime_ns: int
    """Or a number for the version of an object, or for a pipe's content."""
    compression: str
    """``gzip``, ``zstd``, ``xz``, ``bz2`` or empty."""
    kind: str = "lines"
    """``lines`` (a record per line), ``text`` (one document), or a format read as JSON lines: ``array`` (a JSON array),
    ``csv``, ``parquet``, ``arrow``."""
    in_parts: bool = False
    """Parquet and Arrow: whether workers read row groups or batches in parallel."""
    stored_at: str | None = None
    """For a pipe: path of the copy of its content."""

    @property
    def is_text(self) -> bool:
        """Whether the whole file is one document."""
        return self.kind == "text"

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read sequentially."""
        return not self.in_parts and (bool(self.compression) or self.kind not in ("lines", "text"))

    @property
    def file(self) -> str:
        """Path to open; ``path`` is for messages."""
        return self.stored_at or self.path

    @property
    def unit(self) -> str:
        """Name of a record in messages."""
        return UNITS.get(self.kind, "line")


def inspect(path: str, text_suffixes: tuple[str, ...]) -> Source:
    """Detect the type of a file. A pipe is read to its end.

    Raises UserError if the file is unreadable, unsupported or visibly damaged.
    """
    try:
        if is_url(path):
            size, state = _object_state(path)
            return _typed(path, size, state, RemotePath(path).read_bytes(0, min(size, _HEAD_BYTES)), text_suffixes)
        status = os.stat(path)
        reads_once = any(test(status.st_mode) for test in (stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISCHR))
        copy, digest = store_pipe(path) if reads_once else (None, 0)
        if copy is None and not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a file, a folder or a pipe")
        with open(copy or path, "rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return _typed(path, status.st_size, digest or status.st_mtime_ns, head, text_suffixes, copy)


def open_input(path: str) -> BinaryIO:
    """Open a file, or an object by ranges of a few MiB. Raises OSError."""
    return open_regular(RemotePath(path)) if is_url(path) else open(path, "rb")


def _object_state(path: str) -> tuple[int, int]:
    """Return size and a number for the version of an object, in place of a file's mtime. Raises OSError."""
    facts = RemotePath(path).facts()
    return facts.size, int.from_bytes(hashlib.sha256(facts.version.encode()).digest()[:7], "big")


def _typed(
    path: str, size: int, state: int, head: bytes, text_suffixes: tuple[str, ...], copy: str | None = None
) -> Source:
    """Return the source whose content starts with ``head``. Raises UserError."""
    unsupported = describe_unsupported(head)
    if unsupported and not (strip_compression(path).endswith(text_suffixes) and not head.startswith(_POINTER)):
        raise UserError(f"{path} is {unsupported}")
    compression = compression_of(head)
    kind = _kind(path, head, compression, text_suffixes)
    source = Source(path, size, state, compression, kind, stored_at=copy)
    if kind in ("parquet", "arrow"):
        source = replace(source, in_parts=max(part_sizes(source.file, kind), default=0) <= LARGEST_PART)
    return source


def _kind(path: str, head: bytes, compression: str, text_suffixes: tuple[str, ...]) -> str:
    """Return ``Source.kind``. Raises UserError if the name contradicts the content."""
    if kind := is_columnar(head):
        return kind
    name = strip_compression(path)
    if name.endswith(COLUMNAR_SUFFIXES):
        if compression:
            raise UserError(
                f"{path} is compressed as a whole, which is not supported: unpack it (its pages are compressed)"
            )
        raise UserError(f"{path} is truncated or not of this format: it starts with {head[:8]!r}")
    is_json = head.lstrip(BOM + b" \t\r\n")[:1] in (b"{", b"[", b"")
    if not (compression or is_json) and path.lower().endswith(COMPRESSION_SUFFIXES):
        kinds = ", ".join(end[1:] for end in COMPRESSION_SUFFIXES)
        raise UserError(f"{path} is not compressed with any of {kinds}: it starts with {head[:8]!r}")
    return "text" if name.endswith(text_suffixes) else "csv" if name.endswith(CSV_SUFFIXES) else "lines"


def describe_unsupported(head: bytes) -> str | None:
    """Return the type of an unsupported file by its first bytes, with a fix, else None."""
    if head.startswith(_POINTER):
        return "a git-lfs pointer. Run git lfs pull"
    return next((message for magic, message in _NOT_READ.items() if head.startswith(magic)), None)


def with_array(source: Source) -> Source:
    """Return the source, as kind ``array`` if its first byte, except white space, starts a JSON array."""
    if source.kind != "lines":
        return source
    with contextlib.closing(_unpacked_chunks(source)) as chunks:
        for number, (chunk, _) in enumerate(chunks):
            head = (chunk if number else chunk.removeprefix(BOM)).lstrip()
            if head:
                return replace(source, kind="array") if head.startswith(b"[") else source
    return source


def read_chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    """Yield the unpacked lines in chunks, each with the bytes on disk read so far.

    Raises UserError if a file that is not plain lines is damaged or truncated.
    """
    if source.kind in ("parquet", "arrow"):
        return _columnar_chunks(source)
    chunks = _unpacked_chunks(source)
    if source.kind == "array":
        return element_lines(source.path, chunks)
    return row_lines(source.path, chunks) if source.kind == "csv" else chunks


def _columnar_chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    sizes = part_sizes(source.file, source.kind)
    done, total = 0, max(1, sum(sizes))
    for number, part in enumerate(sizes):
        held: list[bytes] = []
        size = passed = 0
        for line in part_lines(source.file, source.kind, number, number + 1):
            held += (line, b"\n")
            size += len(line) + 1
            if size >= CHUNK_BYTES:
                passed += size
                yield b"".join(held), source.size * (done + min(part, passed)) // total
                held, size = [], 0
        done += part
        if held:
            yield b"".join(held), source.size * done // total


def _unpacked_chunks(source: Source) -> Generator[tuple[bytes, int], None, None]:
    with open_input(source.file) as file:
        if source.compression:
            yield from unpack(source.path, source.compression, file)
        while chunk := file.read(1 << 20):  # a compressed file is at its end
            yield chunk, file.tell()


def read_lines(source: Source) -> Iterator[bytes]:
    """Yield lines without line feeds and without a byte-order mark; a text file is one line."""
    rest: list[bytes] = []
    for number, (chunk, _) in enumerate(read_chunks(source)):
        if number == 0:
            chunk = chunk.removeprefix(BOM)
        if source.is_text or b"\n" not in chunk:
            rest.append(chunk)
            continue
        head, *lines, tail = chunk.split(b"\n")
        yield b"".join([*rest, head])
        yield from lines
        rest = [tail]
    if any(rest):
        yield b"".join(rest)


def check_unchanged(source: Source) -> None:
    """Raise UserError if the file was changed since it was inspected."""
    if source.stored_at is not None:
        return
    if is_url(source.path):
        state = _object_state(source.path)
    else:
        status = Path(source.path).stat()
        state = status.st_size, status.st_mtime_ns
    if state != (source.size, source.mtime_ns):
        raise UserError(f"{source.path} changed while it was read: rerun when no process writes to it")


# Decompression: gzip, zstd, xz and bzip2, detected by their first bytes.
#
# A truncated stream is always an error, since its documents cannot be counted.

# Small, so that a chunk of a highly compressed file does not unpack to hundreds of MB.
READ_BYTES = 1 << 17
# Memory limits for files with long windows (zstd --long, large xz dictionaries).
ZSTD_MAX_WINDOW = 1 << 31  # zstd's largest, --long=31; pages that a frame does not fill take no memory
XZ_MAX_MEMORY = 1 << 28
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # pzstd and seekable files begin with such a frame
_BZ2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # the first block, or the end of an empty stream


def compression_of(head: bytes) -> str:
    """Return ``gzip``, ``zstd``, ``xz``, ``bz2`` or an empty string by a file's first 10 bytes."""
    if head[:3] == b"BZh" and head[4:10] in _BZ2_BLOCKS:
        return "bz2"
    if _ZSTD_SKIPPABLE.match(head):
        return "zstd"
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), "")


def unpack(path: str, kind: str, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the unpacked bytes of all frames, members or streams in chunks, with the bytes on disk read so far.

    The libraries' readers are not used: they accept truncated files, or stop after the first frame. Zeros between and
    after gzip members and xz streams are padding.

    Raises:
        UserError: The file is damaged or truncated.
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
            chunk = frame.decompress(packed)
        except errors as error:
            raise UserError(
                f"{path}: damaged {kind} data after {unpacked:,} unpacked bytes: {error}. Download it again"
            ) from None
        packed = frame.unused_data if frame.eof else b""
        if frame.eof:
            frame = None
        if chunk:
            unpacked += len(chunk)
            yield chunk, position
    if frame is not None:
        raise UserError(
            f"{path} is truncated: its {kind} stream ends after {unpacked:,} unpacked bytes. "
            "Download it again, or remove it from --input"
        )


def _decompressor(path: str, kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return (constructor of a frame decompressor, its exceptions)."""
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
    except ImportError as error:  # custom builds of Python may lack lzma or bz2
        hint = f": {pip_install('zstandard')}" if kind == "zstd" else ""
        raise UserError(f"{path} is {kind}-compressed and needs the package {error.name}{hint}") from None
    return zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompressobj, (zstandard.ZstdError,)


# Pipes as input: standard input, ``<(zcat x.gz)``, a FIFO.
#
# A run reads the start of its input several times, in several processes. So a pipe is copied to an unnamed temporary
# file, which the system deletes when this process ends.

STDIN = "-"
_open_pipes: list[IO[bytes]] = []
"""Kept open until this process and its workers end."""


def store_pipe(path: str) -> tuple[str, int]:
    """Copy a pipe to a temporary file in $TMPDIR; return the copy's path and a digest of its content.

    The digest replaces a file's mtime, so that a run with the same content resumes.

    Raises:
        UserError: It is a terminal or another device, or the disk is full.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as pipe:
            if stat.S_ISCHR(os.fstat(pipe.fileno()).st_mode):
                raise UserError(f"{path} is a terminal or a device: write a file, or pipe data into the command")
            file = tempfile.TemporaryFile() if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile()
            sys.stderr.write(f"note: copying the pipe {path} to {tempfile.gettempdir()}\n")
            while chunk := pipe.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
    except OSError as error:
        raise UserError(f"cannot copy the pipe {path} to {tempfile.gettempdir()}: {error.strerror}") from None
    _open_pipes.append(file)
    name = f"/proc/self/fd/{file.fileno()}" if isinstance(file.name, int) else file.name
    return name, int(digest.hexdigest()[:15], 16)


# Split the lines of a fine-tuning dataset into files for training and validation.
#
# Lines are copied unchanged and in order, so an evaluation can read them. The split depends on the seed and the number
# of lines.

PARTS = ("train", "validation")


def split_lines(sources: Sequence[Source], sizes: Sequence[int], prefix: Path, tables: bool, seed: int) -> list[Path]:
    """Write PREFIX_train and PREFIX_validation (.tsv for ``tables``, else .jsonl) with ``sizes`` lines each.

    Raises UserError if the input has fewer lines, or the tables' headers differ.
    """
    headers = {header_of(source) for source in sources} if tables else set()
    if len(headers) > 1:
        raise UserError("--split: the tables have different headers")
    count = sum(1 for source in sources for _ in _records(source, tables))
    if sum(sizes) > count:
        raise UserError(f"--split {','.join(map(str, sizes))} needs {sum(sizes):,} lines, but the input has {count:,}")
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
    """Return the first line of a table. Raises UserError if the file is empty."""
    for line in read_lines(source):
        return line.removesuffix(b"\r")
    raise UserError(f"{source.path} is empty: a table starts with a header of column names")


def _records(source: Source, tables: bool) -> Iterator[bytes]:
    """Yield non-empty lines, without a table's header."""
    for number, line in enumerate(read_lines(source)):
        if not (tables and number == 0) and line and not line.isspace():
            yield line
