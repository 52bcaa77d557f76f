"""Tables of published runs as people write them: which file is one, and what its cells say."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from megatron_llama.tools.plan import sweep

Row = Mapping[str, str]
NO = ("no", "off", "none", "false", "0", "0.0", "n", "disabled")
_NOTHING = ("?", "-", "n/a", "na", "null", "unknown", "not stated")
_CAPITALS = {name.lower(): name for name in ("peak_mem_GiB", "GPUs")}
"""Columns that have capitals, by their names without."""
_NUMBER = re.compile(r"[~≈<>]?\s*(\d[\d_]*\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(%|[a-z/ .]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d)[,\s'](?=\d{3}(?!\d))")
_REMARK = re.compile(r"\(.*?\)")
_TIMES = re.compile(r"\s*[x×*]\s*")


class NotSpoken(ValueError):
    """A row that nothing can be predicted for, and why."""


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of published runs, or of a sweep; columns that are not there are empty.

    Columns may stand in any order and be written in capitals or not; commas, semicolons or tabs may separate them.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        lines = csv.reader(file, delimiter=max(",;\t", key=head.count))
        names = [_CAPITALS.get(name.strip().lower(), name.strip().lower()) for name in next(lines, [])]
        cells = [list(map(str.strip, line)) for line in lines]
    rows = [dict.fromkeys(names, "") | dict(zip(names, row, strict=False)) for row in cells if any(row)]
    for row in rows:
        row["confidence"] = row.get("confidence", "").lower()
    return sweep.published_rows(rows) if sweep.is_sweep(rows) else rows


def number(row: Row, column: str) -> float | None:
    """What a cell says: "4,096", "2 x 8" devices, "8k" tokens, "870 ms"; None where it is no positive number."""
    plain = _THOUSANDS.sub("", _REMARK.sub("", row.get(column, ""))).strip()
    value = 1.0
    for part in map(_NUMBER.fullmatch, _TIMES.split(plain)):
        if part is None:
            return None
        unit = part[2].strip().lower().partition(" ")[0]
        scale = {"k": 1024 if column == "seq" else 1000, "ms": 1e-3 if column == "step_time_s" else 1}
        value *= float(part[1]) * scale.get(unit, 1)
    return value if 0 < value < float("inf") else None


def whole(row: Row, column: str) -> int | None:
    """The same where it is a whole number."""
    value = number(row, column)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


def need(row: Row, column: str, what: str) -> int:
    """The same of a column that a prediction needs. Raises NotSpoken."""
    value = whole(row, column)
    if value is None:
        raise NotSpoken(f"{what} is not stated")
    return value


def said(row: Row, column: str) -> bool | None:
    """Whether a cell says yes or no; None where it says nothing."""
    words = row.get(column, "").lower()
    if not words or words in _NOTHING:
        return None
    return words not in NO and not words.startswith("no ")
