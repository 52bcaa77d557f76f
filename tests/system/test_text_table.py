"""Tables do not depend on the terminal."""

from __future__ import annotations

import pytest

from megatron_llama.system.tables import text_table, wrapped_table


def test_columns_are_aligned() -> None:
    rows = [("axis", "calls", "bytes"), ("tp", "54", "110,592"), ("world", "4", "")]
    assert text_table(rows) == ["axis   calls  bytes", "tp     54     110,592", "world  4"]
    assert text_table(rows, left=1) == ["axis   calls    bytes", "tp        54  110,592", "world      4"]


def test_no_terminal_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long, markup = "x" * 300, "[bold]not markup[/bold] :smile:"
    assert text_table([(long, markup, "1.5")]) == [f"{long}  {markup}  1.5"]


def test_the_last_column_is_wrapped() -> None:
    rows = [("40 x fp32", "zeros_like in the optimizer and the loop"), ("1 x bf16", "mm")]
    assert wrapped_table(rows, 36) == [
        "40 x fp32  zeros_like in the",
        "           optimizer and the loop",
        "1 x bf16   mm",
    ]
    assert wrapped_table([("2", "layers.*.mlp", "mm in layers.*.gate_up_proj"), ("10", "", "")], 28) == [
        "2   layers.*.mlp",
        "       mm in",
        "       layers.*.gate_up_proj",
        "10",
    ]
