"""docs/results/longest_sequences.md: its rows are the forecast of the current code, in a short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.methods.longest_sequences import MACHINES, request_of
from megatron_llama.tools.tune.longest import sequence_rows, sequence_table
from tests.paths import ROOT

PAGE = ROOT / "docs" / "results" / "longest_sequences.md"


def rows_of_page(machine: str) -> dict[tuple[str, ...], list[str]]:
    """Return the cells of a machine's table by (method, recomputation, cp, ZeRO stage)."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {MACHINES[machine]}\n")[2].partition("\n## ")[0]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line)
    return {tuple(row[:4]): row[4:] for row in rows}


@pytest.mark.parametrize("machine", ["h100", "trn2"])
def test_the_page_is_the_forecast(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 with full recomputation, within 10 %."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request, page = request_of("llama3_8b", machine), rows_of_page(machine)
    fixed = {"trainer.zero": 3, "trainer.recompute": "full"}
    _, *rows = sequence_rows(sequence_table(request.config, fixed, request.target, lambda done: None))
    assert len(rows) == 4, "two methods, with and without context parallelism"
    for row in rows:
        expected = page[tuple(row[:4])]
        assert len(expected) == len(row) - 4 == (4 if machine == "h100" else 7)
        for text, other in zip(row[4:], expected, strict=True):
            tokens, published = (int(each.replace(",", "").replace("-", "0")) for each in (text, other))
            assert tokens == pytest.approx(published, rel=0.1)


def test_all_machines_and_kinds_are_in_the_page() -> None:
    for machine in MACHINES:
        keys = set(rows_of_page(machine))
        for method in ("full", "LoRA"):
            assert {(method, "full", cp, str(zero)) for cp in ("1", "all") for zero in range(4)} <= keys
            assert (method, "full, offload", "all", "3") in keys
