"""The form of docs/design/log, as its README.md describes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

LOGS = sorted((ROOT / "docs/design/log").glob("[0-9]*.md"))
HEADING = re.compile(r"## (\d{4}-\d{2}-\d{2}): \S.*")
LINK_TARGET = re.compile(r"\]\([^)]*\)")
MAX_HEADING_CHARACTERS = 72
MAX_WORDS = 150
MAX_CELL_CHARACTERS = 120


def read_entries(log: Path) -> list[tuple[str, str]]:
    """Return the heading and the body of each entry."""
    parts = re.split(r"^(#{2,} .*)$", log.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def count_words(body: str) -> int:
    """Count the words outside tables, without the targets of links."""
    lines = [line for line in body.splitlines() if not line.startswith("|")]
    return len(LINK_TARGET.sub("]", "\n".join(lines)).split())


by_log = pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)


def test_a_log_exists() -> None:
    assert LOGS


@by_log
def test_headings_are_dated_and_short(log: Path) -> None:
    headings = [heading for heading, _ in read_entries(log)]
    assert headings
    assert not [heading for heading in headings if not HEADING.fullmatch(heading)]
    assert not [heading for heading in headings if len(heading) > MAX_HEADING_CHARACTERS]
    assert len(set(headings)) == len(headings)


@by_log
def test_dates_descend_within_the_month_of_the_file(log: Path) -> None:
    dates = [heading[3:13] for heading, _ in read_entries(log)]
    assert dates == sorted(dates, reverse=True)
    assert not [date for date in dates if date[:7] != log.stem]


@by_log
def test_entries_have_their_parts_in_order(log: Path) -> None:
    for heading, body in read_entries(log):
        parts = re.findall(r"^\*\*(\w+)\.\*\*", body, flags=re.MULTILINE)
        assert parts in (["Why", "Change", "Result"], ["Why", "Change", "Result", "Rejected"]), heading


@by_log
def test_entries_are_short(log: Path) -> None:
    words = {heading: count_words(body) for heading, body in read_entries(log)}
    assert not {heading: count for heading, count in words.items() if count > MAX_WORDS}


@by_log
def test_table_cells_are_short(log: Path) -> None:
    rows = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert not [row for row in rows if any(len(cell.strip()) > MAX_CELL_CHARACTERS for cell in row.split("|"))]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design/log").glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = {link for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")) if "://" not in link}
    assert not sorted(link for link in links if not (page.parent / link).exists())
