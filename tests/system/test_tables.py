"""Tables of text, and sizes in them."""

from __future__ import annotations

import pytest

from megatron_llama.system.tables import GIB, gib, text_table, wrapped_table


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


MIB = 2**20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (512 * MIB, "512 MiB"),
        (1002 * MIB, "1,002 MiB"),
        (GIB - 1, "1,024 MiB"),
        (GIB, "1 GiB"),
        (25.14 * GIB, "25.1 GiB"),
        (1024 * GIB, "1,024 GiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert gib(size) == text
