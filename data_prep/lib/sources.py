"""An input file, and its records as lines of bytes, whatever its format and compression.

What a file is, its first bytes say: RedPajama's common_crawl is zstd although its names end in .json.gz. The name is
asked only where the bytes can't tell, for .csv and text.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.lib.columnar import is_columnar, part_lines, part_sizes
from data_prep.lib.csv_records import row_lines
from data_prep.lib.json_array import element_lines
from data_prep.lib.json_lines import BOM
from data_prep.lib.pipes import is_pipe, stored
from data_prep.lib.unpack import compression_of, unpack
from megatron_llama.config.data_prefixes import COLUMNAR_SUFFIXES, COMPRESSION_SUFFIXES, CSV_SUFFIXES, bare_name
from megatron_llama.system.errors import UserError

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
        pipe = stored(path) if is_pipe(status) else None
        if pipe is None and not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is neither a file, a folder nor a pipe")
        with open(pipe.path if pipe else path, "rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    what = not_read(head)
    if what and not (bare_name(path).endswith(text_suffixes) and not head.startswith(_POINTER)):
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
    name = bare_name(path)
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
