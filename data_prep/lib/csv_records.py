"""A .csv file as one JSON object a line, with the header's names as keys and every value a string.

Quotes as in RFC 4180: a field in double quotes may hold commas, line feeds and doubled quotes. So a row's end can't be
told from the middle of a file, and the file is one stream.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator

from data_prep.lib.json_lines import BOM, dump_texts
from megatron_llama.system.errors import UserError

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
