"""Input files: finding them, and reading them as plain bytes whatever their compression.

The compression is recognised by the first bytes, never by the name: RedPajama's common_crawl is zstd although its
names end in .json.gz. A compressed file that ends early is an error, always: what was in the rest is unknown.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.lib.json_array import element_lines
from data_prep.lib.json_lines import BOM
from megatron_llama.config.data_prefixes import COMPRESSION_SUFFIXES, RECORD_SUFFIXES, bare_name
from megatron_llama.system.errors import UserError

TEXT_SUFFIXES = (".txt",)
# Small enough that one piece of a well-compressed file does not become hundreds of megabytes.
READ_BYTES = 1 << 17
ONE_VALUE_MAX_BYTES = 4 << 20
# Files packed with a longer window (zstd --long) need that much memory to unpack.
ZSTD_MAX_WINDOW = 1 << 27


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    size: int
    """bytes on disk"""
    mtime_ns: int
    compression: str
    """"", "gzip" or "zstd" """
    is_text: bool
    """the whole file is one document, rather than one record a line"""
    is_array: bool = False
    """the file is one JSON array, read as one element a line"""

    @property
    def is_stream(self) -> bool:
        """Whether its lines can only be found from its beginning on."""
        return bool(self.compression) or self.is_array


def find_sources(
    patterns: Sequence[str],
    text_suffixes: Sequence[str] = TEXT_SUFFIXES,
    left_out: list[str] | None = None,
    arrays: bool = False,
) -> list[Source]:
    """The input files of the command line, in its order; folders and patterns are sorted by path.

    In a folder, .jsonl, .json, .ndjson and .txt files are taken, compressed or not, at any depth. What is plainly no
    list of records there goes to `left_out`: a manifest of several lines, a text file beside files of records. With
    `arrays` a JSON array over several lines is a list of records.

    Raises:
        UserError: something is not there, can't be read, or no file is left.
    """
    sources: list[Source] = []
    seen: set[str] = set()
    for pattern in patterns:
        paths = _expand(pattern, tuple(text_suffixes))
        texts = {path for path in paths if bare_name(path).endswith(tuple(text_suffixes))}
        has_records = os.path.isdir(pattern) and len(texts) < len(paths)
        for path in paths:
            if (has_records and path in texts) or (path != pattern and _is_one_value(path, arrays)):
                if left_out is not None:
                    left_out.append(path)
                continue
            real = os.path.realpath(path)
            if real in seen:
                raise UserError(f"{path} is named twice in --input: its documents would count twice")
            seen.add(real)
            sources.append(_inspect(path, tuple(text_suffixes)))
    return sources


def _expand(pattern: str, text_suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(pattern):
        wanted = RECORD_SUFFIXES + text_suffixes
        paths = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(pattern, followlinks=True)
            for name in names
            if not name.startswith(".") and bare_name(name).endswith(wanted)
        ]
        if not paths:
            raise UserError(f"the folder {pattern} holds no {', '.join(wanted)} file (compressed or not)")
        return sorted(paths)
    if os.path.exists(pattern):
        return [pattern]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise UserError(f"there is no file {pattern}" + (" (nothing matches)" if glob.has_magic(pattern) else ""))
    return paths


def _is_one_value(path: str, arrays: bool) -> bool:
    """Whether a small .json file is one JSON value over several lines: a manifest or a configuration."""
    if not path.lower().endswith(".json") or os.path.getsize(path) > ONE_VALUE_MAX_BYTES:
        return False
    with open(path, "rb") as file:
        data = file.read().strip()
    if b"\n" not in data:
        return False
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return not (arrays and isinstance(value, list))


def _inspect(path: str, text_suffixes: tuple[str, ...]) -> Source:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(4)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    compression = "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head == b"\x28\xb5\x2f\xfd" else ""
    is_json = head.lstrip(BOM + b" \t\r\n")[:1] in (b"{", b"[", b"")
    if not (compression or is_json) and path.lower().endswith(COMPRESSION_SUFFIXES):
        raise UserError(f"{path} is neither gzip nor zstd, whatever its name says: it starts with {head!r}")
    return Source(path, status.st_size, status.st_mtime_ns, compression, bare_name(path).endswith(text_suffixes))


def with_array(source: Source) -> Source:
    """The source, read as one JSON array where its first byte, white space aside, says that it is one."""
    with contextlib.closing(_unpacked_pieces(source)) as pieces:
        for number, (piece, _) in enumerate(pieces):
            head = (piece if number else piece.removeprefix(BOM)).lstrip()
            if head:
                return replace(source, is_array=head.startswith(b"["))
    return source


def read_pieces(source: Source) -> Iterator[tuple[bytes, int]]:
    """The source's bytes, unpacked, in pieces, each with the number of bytes on disk read so far.

    Raises:
        UserError: a compressed stream is damaged or cut off, or a JSON array is.
    """
    pieces = _unpacked_pieces(source)
    return element_lines(source.path, pieces) if source.is_array else pieces


def _unpacked_pieces(source: Source) -> Generator[tuple[bytes, int], None, None]:
    with open(source.path, "rb") as file:
        if source.compression:
            yield from _unpack(source, file)
        while piece := file.read(1 << 20):  # nothing is left of a compressed file
            yield piece, file.tell()


def _unpack(source: Source, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Unpacks all frames of zstd, or all members of gzip, between and after which zeros are padding.

    By hand, because zstandard's stream reader takes a file that is cut off for a shorter one.
    """
    path, kind = source.path, source.compression
    new, errors = _decompressor(path, kind)
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
            packed = packed.lstrip(b"\0") if kind == "gzip" else packed
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
        import zstandard
    except ImportError:
        raise UserError(f"{path} is zstd: that needs the Python package zstandard (pip install zstandard)") from None
    return zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompressobj, (zstandard.ZstdError,)


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
    """Raises UserError where the file was changed since `find_sources` saw it."""
    status = Path(source.path).stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UserError(f"{source.path} was changed while it was read: start again")
