"""Parquet, Arrow and .csv files as one JSON object a line. The first two need pyarrow, imported at the first such file.

A file comes in parts, parquet's row groups or Arrow's record batches, which workers can take on their own. Arrow is
read in both its formats: with a footer, and the stream that Hugging Face's ``save_to_disk`` writes.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterator
from typing import Any

from data_prep.lib.records import BOM, dump_texts
from megatron_llama.system.errors import UserError

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
STREAM_END = ARROW_STREAM + bytes(4)
BUFFER_BYTES = 1 << 20
BATCH_BYTES = 4 << 20
"""About what is turned into Python objects at a time, unpacked."""


def is_columnar(head: bytes) -> str:
    """``parquet``, ``arrow`` or nothing, by a file's first bytes."""
    return "parquet" if head.startswith(PARQUET) else "arrow" if head.startswith((ARROW_FILE, ARROW_STREAM)) else ""


def part_sizes(path: str, kind: str) -> list[int]:
    """The unpacked bytes of each part.

    Raises:
        UserError: the file is damaged, cut off or encrypted, or pyarrow is missing.
    """
    with _opened(path, kind) as file:
        if kind == "parquet":
            return [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
        return [batch.nbytes for batch in _batches(file)]


def part_lines(path: str, kind: str, start: int, end: int) -> Iterator[bytes]:
    """The records of the parts [start, end), each as a line without its line feed.

    Raises:
        UserError: the file is damaged, or pyarrow is missing.
    """
    with _opened(path, kind) as file:
        if kind == "parquet":
            for number in range(start, end):
                group = file.metadata.row_group(number)
                rows = max(1, min(1 << 16, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
                for batch in file.iter_batches(rows, row_groups=[number], use_threads=False):
                    yield from _lines(batch)
        else:
            for number, batch in enumerate(_batches(file)):
                if number >= end:
                    break
                if number >= start:
                    yield from _lines(batch)


@contextlib.contextmanager
def _opened(path: str, kind: str) -> Iterator[Any]:
    """The file, opened by pyarrow, whose errors become UserErrors; without threads, because workers are forked."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} is {kind}, which pyarrow reads: pip install 'megatron_llama[parquet]'") from None
    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(
                path, page_checksum_verification=True, pre_buffer=False, buffer_size=BUFFER_BYTES
            ) as file:
                _check_names(path, file.schema_arrow.names)
                yield file
            return
        with pyarrow.memory_map(path) as data:
            if data.read(len(ARROW_FILE)) == ARROW_FILE:
                reader = pyarrow.ipc.open_file(data)
            else:
                # A writer that was killed leaves whole batches and no end; the reader would take them for all.
                data.seek(max(0, os.path.getsize(path) - len(STREAM_END)))
                if data.read() != STREAM_END:
                    raise UserError(f"{path} is cut off: its Arrow stream has no end. Fetch it again, or leave it out")
                data.seek(0)
                reader = pyarrow.ipc.open_stream(data)
            _check_names(path, reader.schema.names)
            yield reader
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged {kind} data: {error}. Fetch it again, or leave it out") from None


def _check_names(path: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise UserError(f"{path}: two of its columns have one name: {', '.join(names)[:200]}")


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _lines(batch: Any) -> Iterator[bytes]:
    rows = max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        some = batch.slice(start, rows)
        try:
            records = some.to_pylist()
        except UnicodeDecodeError:
            yield from (_careful_line(some.slice(number, 1)) for number in range(some.num_rows))
            continue
        yield from map(_line, records)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _careful_line(row: Any) -> bytes:
    """The line of a batch of one row. Text that is no UTF-8 makes it a line that is none, as in a file of lines."""
    try:
        return _line(row.to_pylist()[0])
    except UnicodeDecodeError as error:
        return b"{" + error.object.replace(b"\n", b" ") + b"}"


def _plain(value: Any) -> Any:
    """What JSON has no form for: text that was written without its type, dates, decimal numbers, pictures."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes": len(value)}
    return str(value)


# A .csv file as one JSON object a line, with the header's names as keys and every value a string.
#
# Quotes as in RFC 4180: a field in double quotes may hold commas, line feeds and doubled quotes. So a row's end can't
# be told from the middle of a file, and the file is one stream.


MAX_FIELD_BYTES = 1 << 28
"""Bounds what a quote that is never closed takes into memory."""
PIECE_BYTES = 1 << 17


def row_lines(path: str, pieces: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """The rows below the header, each as a JSON line, in pieces; the numbers (bytes on disk) are passed on.

    A row with more or fewer cells than the header becomes a JSON array of its cells, which no record is. Bytes that are
    no UTF-8 stay as they are. Both are seen where lines are parsed.

    Raises:
        UserError: no usable header; or a quote is broken, so that the rows after it can't be told apart.
    """
    position = 0

    def text_lines() -> Iterator[str]:
        nonlocal position
        rest: list[bytes] = []
        for number, (piece, position) in enumerate(pieces):  # noqa: B007  the reader's loop below passes it on
            *lines, tail = (piece if number else piece.removeprefix(BOM)).split(b"\n")
            for line in lines:
                yield b"".join([*rest, line, b"\n"]).decode("utf-8", "surrogateescape")
                rest = []
            rest.append(tail)
        if last := b"".join(rest):
            yield last.decode("utf-8", "surrogateescape")

    csv.field_size_limit(MAX_FIELD_BYTES)
    rows = csv.reader(text_lines(), strict=True)
    header: list[str] | None = None
    number = size = 0
    found: list[bytes] = []
    try:
        for row in rows:
            if not row:
                continue
            if header is None:
                header = _checked_header(path, row)
                continue
            number += 1
            record = dict(zip(header, row, strict=True)) if len(row) == len(header) else row
            line = dump_texts(record)
            found += (line, b"\n")
            size += len(line)
            if size >= PIECE_BYTES:
                yield b"".join(found), position
                found, size = [], 0
    except csv.Error as error:
        raise UserError(
            f"{path}, row {number + 1} (ends in line {rows.line_num}): {error}. After a broken quote rows can't be "
            "told apart, so nothing of the rest could be trusted: mend the file, or leave it out"
        ) from None
    if found:
        yield b"".join(found), position


def bad_columns(line: bytes) -> str | None:
    """What is wrong where ``row_lines`` made the line of a row with too many or too few cells."""
    if not line.startswith(b"["):
        return None
    return f"{len(json.loads(line.decode('utf-8', 'replace')))} cells, which is not the header's number of columns"


def _checked_header(path: str, names: list[str]) -> list[str]:
    """The names of the columns. Raises UserError."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: its header names the column {twice!r} twice")
    try:
        ",".join(names).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: its header is no UTF-8; convert the file (iconv -t utf-8)") from None
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise UserError(f"{path}: its header {names[0][:80]!r} holds no comma, which is what has to be between cells")
    return names
