"""The part of the slow tests that CI runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

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
