"""Tables do not depend on the terminal."""

from __future__ import annotations

import pytest

from megatron_llama.system.tables import text_table


def test_columns_are_aligned() -> None:
    rows = [("axis", "calls", "bytes"), ("tp", "54", "110,592"), ("world", "4", "")]
    assert text_table(rows) == ["axis   calls  bytes", "tp     54     110,592", "world  4"]
    assert text_table(rows, left=1) == ["axis   calls    bytes", "tp        54  110,592", "world      4"]


def test_no_terminal_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long, markup = "x" * 300, "[bold]not markup[/bold] :smile:"
    assert text_table([(long, markup, "1.5")]) == [f"{long}  {markup}  1.5"]
