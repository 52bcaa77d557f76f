"""Read Parquet, Arrow and CSV files as JSON lines. Parquet and Arrow need pyarrow.

Workers read Parquet row groups and Arrow record batches ("parts") independently. Both Arrow formats are supported: the
file format, and the stream format of Hugging Face's ``save_to_disk``.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from typing import Any

from data_prep.lib.record_formats import BOM, dump_texts
from megatron_llama.system.errors import UserError
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.system.object_store import RemotePath, is_url

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
STREAM_END = ARROW_STREAM + bytes(4)
BUFFER_BYTES = 1 << 20
BATCH_BYTES = 4 << 20
"""Approximate unpacked bytes that are converted to Python objects at a time."""


def is_columnar(head: bytes) -> str:
    """Return ``parquet``, ``arrow`` or an empty string by a file's first bytes."""
    return "parquet" if head.startswith(PARQUET) else "arrow" if head.startswith((ARROW_FILE, ARROW_STREAM)) else ""


def part_sizes(path: str, kind: str) -> list[int]:
    """Return the unpacked bytes of each part.

    Raises UserError if the file is damaged, truncated or encrypted, or pyarrow is missing.
    """
    with _opened(path, kind) as file:
        if kind == "parquet":
            return [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
        return [batch.nbytes for batch in _batches(file)]


def part_lines(path: str, kind: str, start: int, end: int) -> Iterator[bytes]:
    """Yield the records of the parts [start, end) as lines without line feeds.

    Raises UserError if the file is damaged, or pyarrow is missing.
    """
    with _opened(path, kind) as file:
        if kind == "parquet":
            for number in range(start, end):
                group = file.metadata.row_group(number)
                rows = max(1, min(1 << 16, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
                for batch in file.iter_batches(rows, row_groups=[number], use_threads=False):
                    yield from _lines(path, batch)
        else:
            for number, batch in enumerate(_batches(file)):
                if number >= end:
                    break
                if number >= start:
                    yield from _lines(path, batch)


@contextlib.contextmanager
def _opened(path: str, kind: str) -> Iterator[Any]:
    """Open a file with pyarrow; convert its errors to UserError. No threads, since workers are forked."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} is {kind} and needs pyarrow: {pip_install(extra='parquet')}") from None
    try:
        source: Any = pyarrow.PythonFile(RemotePath(path).open(), "r") if is_url(path) else path
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(
                source, page_checksum_verification=True, pre_buffer=False, buffer_size=BUFFER_BYTES
            ) as file:
                _check_names(path, file.schema_arrow.names)
                yield file
            return
        with source if is_url(path) else pyarrow.memory_map(path) as data:
            if data.read(len(ARROW_FILE)) == ARROW_FILE:
                reader = pyarrow.ipc.open_file(data)
            else:
                # The stream of a killed writer has no end marker; pyarrow would accept it.
                data.seek(max(0, data.size() - len(STREAM_END)))
                if data.read() != STREAM_END:
                    raise UserError(
                        f"{path} is truncated: its Arrow stream has no end. Write it again, or remove it from --input"
                    )
                data.seek(0)
                reader = pyarrow.ipc.open_stream(data)
            _check_names(path, reader.schema.names)
            yield reader
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged {kind} data: {error}. Download it again, or remove it from --input") from None


def _check_names(path: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise UserError(f"{path}: duplicate column names: {', '.join(names)[:200]}")


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _lines(path: str, batch: Any) -> Iterator[bytes]:
    rows = max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        some = batch.slice(start, rows)
        try:
            records = some.to_pylist()
        except (OverflowError, ValueError) as error:
            if not isinstance(error, UnicodeDecodeError):
                some = _without_dates(path, some)
            yield from (_careful_line(some.slice(number, 1)) for number in range(some.num_rows))
            continue
        yield from map(_line, records)


def _without_dates(path: str, batch: Any) -> Any:
    """Return the batch with text in place of dates and times that Python cannot represent. Raises UserError."""
    import pyarrow

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.to_pylist()
        except UnicodeDecodeError:
            pass
        except (OverflowError, ValueError) as error:
            column = _as_text(column)
            if column is None:
                raise UserError(f"{path}: column {name!r} has a value that cannot be read: {error}") from None
        columns.append(column)
    return pyarrow.record_batch(columns, batch.schema.names)


def _as_text(column: Any) -> Any:
    """Return a column as text, durations as their numbers; None for types that have no text, such as lists."""
    import pyarrow

    for kinds in ((pyarrow.string(),), (pyarrow.int64(), pyarrow.string())):
        with contextlib.suppress(pyarrow.ArrowException):
            text = column
            for kind in kinds:
                text = text.cast(kind)
            return text
    return None


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _careful_line(row: Any) -> bytes:
    """Convert a batch of one row to a line. Text that is not UTF-8 gives a bad line, as in JSONL files."""
    try:
        return _line(row.to_pylist()[0])
    except UnicodeDecodeError as error:
        return b"{" + error.object.replace(b"\n", b" ") + b"}"


def _plain(value: Any) -> Any:
    """Convert types that JSON lacks: bytes, dates, decimals."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes": len(value)}
    return str(value)


# CSV files as JSON lines, with the header's names as keys and strings as values.
#
# Quoting follows RFC 4180: a quoted field may contain line feeds. So rows cannot be found from the middle of a file,
# which is read as a stream.

MAX_FIELD_BYTES = 1 << 28
"""Memory limit for a quote that is never closed."""
CHUNK_BYTES = 1 << 17


def row_lines(path: str, chunks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Yield the rows as JSON lines in chunks, each with its input chunk's bytes on disk.

    A row with a wrong number of cells becomes a JSON array, and bytes that are not UTF-8 stay unchanged: the parser of
    lines rejects both.

    Raises:
        UserError: The header is unusable, or a quote is broken, so that the following rows are unknown.
    """
    position = 0

    def text_lines() -> Iterator[str]:
        nonlocal position
        rest: list[bytes] = []
        for number, (chunk, position) in enumerate(chunks):  # noqa: B007  used by the loop below
            *lines, tail = (chunk if number else chunk.removeprefix(BOM)).split(b"\n")
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
    output: list[bytes] = []
    try:
        for row in rows:
            if not row:
                continue
            if header is None:
                header = _checked_header(path, row)
                continue
            number += 1
            line = dump_texts(dict(zip(header, row, strict=True)) if len(row) == len(header) else row)
            output += (line, b"\n")
            size += len(line)
            if size >= CHUNK_BYTES:
                yield b"".join(output), position
                output, size = [], 0
    except csv.Error as error:
        raise UserError(
            f"{path}, row {number + 1} (ends in line {rows.line_num}): {error}. Rows after a broken quote "
            "cannot be separated: fix the file, or remove it from --input"
        ) from None
    if output:
        yield b"".join(output), position


def bad_columns(line: bytes) -> str | None:
    """Return the error of a row with a wrong number of cells, else None."""
    if not line.startswith(b"["):
        return None
    return f"{len(json.loads(line.decode('utf-8', 'replace')))} cells, but the header has another number of columns"


def _checked_header(path: str, names: list[str]) -> list[str]:
    """Return the column names. Raises UserError."""
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: the header has the column {duplicate!r} twice")
    try:
        ",".join(names).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the header is not UTF-8: convert the file (iconv -t utf-8)") from None
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise UserError(f"{path}: the header {names[0][:80]!r} has no comma: separate columns by commas")
    return names
