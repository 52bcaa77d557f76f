"""The arithmetic of the comparison, from recorded numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.harness import standings
from benchmarks.harness.standings import Cell, Spread
from benchmarks.train import page
from tests.benchmarks.recorded import cell, result
from tests.paths import ROOT


def test_speeds_and_shares_are_of_each_turn() -> None:
    found = cell()
    ours = found.results[0]
    assert found.speeds(ours) == [40.0, 20.0, 40.0]  # 40 tokens a step
    # 10 FLOPs a token, of 1000 FLOP/s in the first round and 2000 in the others
    assert found.shares(ours) == pytest.approx([0.4, 0.1, 0.2])


def test_ratios_are_taken_in_each_round() -> None:
    found = cell()
    assert found.ratio(found.results[0], found.results[1]) == Spread(2.0, 1.0, 4.0)


def test_the_verdict_is_over_the_fastest_and_the_leanest_peer() -> None:
    lines = list(standings.verdict_lines(cell()))
    assert lines == [
        "ours is 2.00 (1.00 to 4.00) times as fast as the fastest peer, fast compiled.",
        "ours is 10.00 (5.00 to 10.00) times as fast as lean.",
        "Its peak of resident memory is 60% of the leanest peer's, lean.",
        "Its peak of live memory is 60% of the leanest peer's, lean.",
    ]


def test_recomputing_contestants_have_lines_of_their_own() -> None:
    found = cell()
    found.results.append(result("ours", [4.0, 4.0, 4.0], 30 << 20, recompute="full"))
    assert list(standings.verdict_lines(found))[-3:] == [
        "ours recompute=full is 0.50 (0.50 to 1.00) times as fast as the fastest peer, fast compiled.",
        "Its peak of resident memory is 30% of the leanest peer's, lean.",
        "Its peak of live memory is 30% of the leanest peer's, lean.",
    ]


def test_layouts_are_beside_one_process_of_the_same_mode() -> None:
    rows = list(standings.layout_rows(cell()))
    # 4 micro batches in 2 stages fill 4 of 5 slots.
    assert rows == [
        ["ours pp2", "0.50 (0.50 to 1.00)", "0.80", "62.5%"],
        ["ours dp2", "0.50 (0.50 to 1.00)", "1.00", "50.0%"],
    ]


def test_rows_are_ordered_by_speed() -> None:
    rows = list(standings.speed_rows(cell()))
    assert [row[0] for row in rows] == ["ours", "fast compiled", "ours pp2", "ours dp2", "lean"]
    assert rows[0] == ["ours", "40", "0.0", "20.0%", "2.00", "600", "60", "30.0 s", "8.0 s"]


def test_a_recorded_cell_is_read_back() -> None:
    again = Cell.from_json(json.loads(json.dumps(asdict(cell()))))
    assert again == cell()


def test_a_published_record_makes_its_page() -> None:
    published = ROOT / "docs/results/train-amx.json"
    text = "\n".join(page(json.loads(published.read_text())))
    assert published.with_suffix(".md").read_text().startswith(text + "\n")
