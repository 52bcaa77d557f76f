"""Statistics of a training comparison, from recorded numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.harness import comparison
from benchmarks.harness.comparison import ComparisonCell, Spread
from benchmarks.train import page
from tests.benchmarks.recorded import cell, result
from tests.paths import ROOT


def test_speeds_and_peak_shares_are_per_turn() -> None:
    recorded = cell()
    ours = recorded.results[0]
    assert recorded.speeds(ours) == [40.0, 20.0, 40.0]  # 40 tokens per step
    # 10 FLOPs per token; the peak is 1000 FLOP/s in the first round and 2000 afterwards
    assert recorded.peak_shares(ours) == pytest.approx([0.4, 0.1, 0.2])


def test_ratios_are_computed_per_round() -> None:
    recorded = cell()
    assert recorded.ratio(recorded.results[0], recorded.results[1]) == Spread(2.0, 1.0, 4.0)


def test_summary_compares_with_the_fastest_and_the_smallest_peer() -> None:
    lines = list(comparison.summary_lines(cell()))
    assert lines == [
        "* ours is 2.00 (1.00 to 4.00) times as fast as the fastest peer, fast compiled.",
        "* ours is 10.00 (5.00 to 10.00) times as fast as lean.",
        "* ours: peak resident memory is 60% of lean, the smallest peer.",
        "* ours: peak live memory is 60% of lean, the smallest peer.",
    ]


def test_summary_has_lines_for_recompute() -> None:
    recorded = cell()
    recorded.results.append(result("ours", [4.0, 4.0, 4.0], 30 << 20, recompute="full"))
    assert list(comparison.summary_lines(recorded))[-3:] == [
        "* ours recompute=full is 0.50 (0.50 to 1.00) times as fast as the fastest peer, fast compiled.",
        "* ours recompute=full: peak resident memory is 30% of lean, the smallest peer.",
        "* ours recompute=full: peak live memory is 30% of lean, the smallest peer.",
    ]


def test_layouts_are_compared_with_one_process_of_the_same_mode() -> None:
    rows = list(comparison.layout_rows(cell()))
    # 4 micro batches keep 2 stages busy in 4 of 5 slots.
    assert rows == [
        ["ours pp2", "0.50 (0.50 to 1.00)", "0.80", "62.5%"],
        ["ours dp2", "0.50 (0.50 to 1.00)", "1.00", "50.0%"],
    ]


def test_rows_are_ordered_by_speed() -> None:
    rows = list(comparison.speed_rows(cell()))
    assert [row[0] for row in rows] == ["ours", "fast compiled", "ours pp2", "ours dp2", "lean"]
    assert rows[0] == ["ours", "40", "0.0", "20.0%", "2.00", "600", "60", "30.0 s", "8.0 s"]


def test_recorded_cell_round_trips_through_json() -> None:
    read_back = ComparisonCell.from_json(json.loads(json.dumps(asdict(cell()))))
    assert read_back == cell()


def test_published_record_reproduces_its_page() -> None:
    published = ROOT / "docs/results/train-amx.json"
    text = "\n".join(page(json.loads(published.read_text())))
    assert published.with_suffix(".md").read_text().startswith(text + "\n")
