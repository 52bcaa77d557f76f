"""A sample skips rows and long tests, but no other test."""

from __future__ import annotations

import pytest

from tests.sampling import sample

TABLE = [f"test_table[{row}]" for row in ("0", "1", "2", "3 compiled", "4", "5", "6")]


class Item:
    """A collected test."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid = nodeid
        self.markers = markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


@pytest.mark.parametrize(("rows", "expected"), [(1, "0"), (3, "026"), (6, "012456"), (9, "012456")])
def test_rows_from_the_first_to_the_last(rows: int, expected: str) -> None:
    others = [Item("test_fast[0]"), Item("test_fast[compiled]"), Item("test_slow", "slow")]
    items = [*others, *(Item(name, "slow") for name in TABLE), Item("test_long", "slow", "long")]
    selected = sample(items, rows)  # type: ignore[arg-type]
    assert selected == {*others, *(item for item in items if item.nodeid in {f"test_table[{row}]" for row in expected})}
