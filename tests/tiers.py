"""Rows of parametrized tests that ``make test`` runs, in tiers.txt; ``make test-slow`` runs the others.

A function that is not listed runs whole. Tables of layouts list their rows next to the table (``rows`` of
tests/rows.py). A listed function without rows belongs to ``make test-slow``: it repeats, in a whole run or a campaign,
what smaller tests of ``make test`` check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip()
ROWS = {function: rows for function, *rows in (part.split("\n    ") for part in re.split(r"\n(?! )", _TEXT))}
"""Test functions below tests/, and the ids of the rows that ``make test`` runs."""


def selected_by_tier(item: pytest.Item) -> bool:
    """Return whether ``make test`` runs the test."""
    function, _, row = item.nodeid.removeprefix("tests/").partition("[")
    rows = ROWS.get(function)
    return rows is None or row.removesuffix("]") in map(escaped, rows)


def escaped(row: str) -> str:
    """Return the id of a row as pytest writes it."""
    return row.encode("unicode_escape").decode()


COMPILED_ROWS = ("compiled", "async_tp")
"""Words in the names of rows that compile for a minute or more. ``--sample`` skips them, as tests marked ``long``."""


def sample(items: Sequence[pytest.Item], rows: int) -> set[pytest.Item]:
    """Return the fast tests, and of each slow one ``rows`` rows from the first to the last."""
    slow: dict[str, list[pytest.Item]] = {}
    selected = set[pytest.Item]()
    for item in items:
        name, _, row = item.nodeid.partition("[")
        if not item.get_closest_marker("slow"):
            selected.add(item)
        elif not item.get_closest_marker("long") and not any(word in row for word in COMPILED_ROWS):
            slow.setdefault(name, []).append(item)
    for table in slow.values():
        count = min(rows, len(table))
        selected |= {table[number * (len(table) - 1) // max(1, count - 1)] for number in range(count)}
    return selected
