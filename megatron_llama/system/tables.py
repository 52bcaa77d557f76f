"""Console, plain-text and Markdown tables, and number formatting."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_llama.system.wrapping import wrap_lines

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_COLUMNS = 80
INDENT = " " * 7
"""Start of a wrapped column on separate lines."""


def open_console(*, stderr: bool = False) -> Console:
    """Return rich's console. With COLUMNS=0, as in a shell without a terminal, rich would print nothing."""
    from rich.console import Console

    # Open MPI's ranks write to a pseudo-terminal even if mpirun writes to a file.
    columns, terminal = os.environ.get("COLUMNS", ""), False if "OMPI_COMM_WORLD_RANK" in os.environ else None
    width = DEFAULT_COLUMNS if columns.isdigit() and int(columns) == 0 else None
    return Console(stderr=stderr, force_terminal=terminal, width=width)


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the columns that each column of ``rows`` takes on a terminal."""
    from rich.cells import cell_len  # some characters take two columns

    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def text_table(rows: Sequence[Sequence[str]], left: int | None = None, gap: int = 2) -> list[str]:
    """Return ``rows`` (at least one) as lines of aligned columns, ``gap`` spaces apart, without trailing spaces.

    The first ``left`` columns (default: all) are left-aligned, the others right-aligned.
    """
    from rich.cells import cell_len

    def padded(column: int, cell: str) -> str:
        space = " " * (widths[column] - cell_len(cell))
        return cell + space if left is None or column < left else space + cell

    widths = column_widths(rows)
    return [(" " * gap).join(padded(*each) for each in enumerate(row)).rstrip() for row in rows]


def wrapped_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return ``rows`` as left-aligned columns of at most ``width`` characters, by wrapping the last column.

    If a word of the last column does not fit after the other columns, the last column is on separate lines.
    """
    start = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]) - 1))
    is_beside = start + max((len(word) for row in rows for word in row[-1].split()), default=0) <= width
    indent = "" if is_beside else INDENT
    parts = [wrap_lines(row[-1], indent, width=width - start if is_beside else width) for row in rows]
    if not is_beside:
        heads = text_table([row[:-1] for row in rows])
        return [line for head, part in zip(heads, parts, strict=True) for line in (head, *part)]
    blank = [""] * (len(rows[0]) - 1)
    return text_table(
        [
            (*(blank if number else row[:-1]), text)
            for row, part in zip(rows, parts, strict=True)
            for number, text in enumerate(part or [""])
        ]
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, each as soon as its row exists."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " ".join(f"{cell} |".lstrip() for cell in row)  # an empty cell is one space wide


GIB = 2**30
_STEPS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))


def short_count(count: float) -> str:
    """Format a count with four significant digits: 6.738 B, 250 k, 1,024 T."""
    for unit, size in _STEPS:
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}" if abs(count) < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.4g}"


def gib(size: int) -> str:
    """Format bytes in binary units: 512 MiB, 1,002 MiB, 25.1 GiB, 1,024 GiB."""
    number, unit = (size / 2**20, "MiB") if size < GIB else (size / GIB, "GiB")
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def plural(count: int, noun: str) -> str:
    """Return ``noun`` for a count of one, else its plural with ``s``."""
    return noun if count == 1 else f"{noun}s"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format numbers, such as ranks, as ranges: 0 1 2 3 8 9 11 as 0-3, 8-9, 11."""
    # Within a range of successive numbers, number minus position is constant.
    ranges = itertools.groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    ends = [(items[0][1], items[-1][1]) for items in (list(group) for _, group in ranges)]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ends)
