"""The published tables have every row of the layout table, and exact mode has no difference in any."""

from __future__ import annotations

from benchmarks.verify.parity import exact_results
from tests.layouts.exact_table import exact_rows, rejection
from tests.layouts.table import LAYOUTS
from tests.paths import ROOT

PARITY = (ROOT / "docs/design/parity.md").read_text(encoding="utf-8")
EXACT = (ROOT / "docs/results/exact.md").read_text(encoding="utf-8")


def test_parity_has_all_rows() -> None:
    """A new row of the table needs `python -m benchmarks.verify.parity --exact docs/results/exact.md --rows NAME`."""
    lines = [line for line in PARITY.splitlines() if line.startswith("| ") and line.count("|") == 9]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert [row[0] for row in cells] == [name for name, *_ in LAYOUTS]
    assert [row[-1] for row in cells] == [rejection(layout, model) or "0" for _, _, layout, model in LAYOUTS]


def test_exact_mode_has_no_difference_in_any_row() -> None:
    """A new row of the table needs `python -m benchmarks.verify.exact --rows NAME`."""
    assert exact_results(EXACT) == {name: "0" for name, *_ in exact_rows()}


def test_a_difference_is_the_result_of_its_row() -> None:
    head = "| layout | ranks | fp32 | bf16 |\n|---|---|---|---|\n"
    page = f"{head}| a | 2 | 0 | 3 tensors |\n| b | 2 | 0 | own |\n| c | 2 | – | – |\n"
    assert exact_results(page) == {"a": "3 tensors", "b": "0"}
