"""Buckets, totals and notes of a metrics.jsonl."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.tools.report.curves import LIMIT, LOSS, MOST_METRICS, Curve, read_run_metrics, smoothed
from tests.tools.report.helpers import lines, record


def curve_of(values: list[float], limit: int) -> Curve:
    curve = Curve(limit)
    for step, value in enumerate(values, start=1):
        curve.add(step, 10 * step, {"x": value})
    return curve


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 1000])
def test_buckets_have_the_values_of_their_steps(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).tolist()
    curve = curve_of(values, limit=8)
    assert len(curve.buckets) <= 8 and curve.width == 2 ** max(0, math.ceil(math.log2(count / 8)))
    assert curve.buckets[0].first == 1 and curve.buckets[-1].step == count
    for before, after in zip(curve.buckets, curve.buckets[1:], strict=False):
        assert after.first == before.step + 1
    for bucket, mean, low, high in zip(curve.buckets, *(curve.column("x", n) for n in (1, 2, 3)), strict=True):
        inside = values[bucket.first - 1 : bucket.step]
        assert bucket.tokens == 10 * bucket.step
        assert mean == pytest.approx(statistics.mean(inside), rel=1e-4, abs=1e-6)
        assert (low, high) == pytest.approx((min(inside), max(inside)), rel=1e-5)


@pytest.mark.parametrize("limit", [4, 100])
def test_the_mean_over_steps(limit: int) -> None:
    curve = curve_of([float(step) for step in range(1, 33)], limit)  # with 4: buckets of 8 steps
    assert curve.mean("x", 9, 16) == 12.5 and curve.mean("x", 1, 32) == 16.5
    assert curve.mean("x", 10, 10) == (12.5 if limit == 4 else 10.0)
    assert curve.mean("x", 33, 99) is None and curve.mean("y", 1, 32) is None


def test_a_spike_of_one_step_stays_visible() -> None:
    values = [1.0] * 5000
    values[3210] = 99.0
    assert max(filter(None, curve_of(values, 100).column("x", 3))) == 99.0


def test_steps_with_gaps_and_missing_values() -> None:
    curve = Curve(limit=4)
    for step in (5, 6, 90, 1000, 10**9):
        curve.add(step, None, {"x": 1.0} if step != 90 else {})
    assert len(curve.buckets) <= 4 and curve.buckets[-1].step == 10**9
    sparse = Curve()
    for step in (1, 2, 3):
        sparse.add(step, None, {"x": 2.0} if step == 2 else {})
    payload = sparse.payload(["x"])
    assert payload["series"]["x"] == {"mean": [None, 2.0, None]} and payload["tokens"] == [None] * 3


def test_smoothing_is_that_of_loss_png() -> None:
    values = [float(value) for value in np.random.default_rng(1).standard_normal(100)]
    smooth = smoothed([*values])
    assert smooth[:2] == [None, None] and smooth[-2:] == [None, None]  # a window of 5
    assert smooth[2] == pytest.approx(np.mean(values[:5]), rel=1e-5)
    assert smoothed([1.0, None, 3.0]) == [1.0, None, 3.0], "too short for a window"


def read(folder: Path, text: str) -> Any:
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return read_run_metrics(folder)


def test_totals(tmp_path: Path) -> None:
    metrics = read(tmp_path, "".join(lines(60)))
    records = [record(step) for step in range(1, 61)]
    assert metrics.count == 60 and metrics.last == records[-1] and metrics.notes == []
    assert metrics.first_loss == records[0][LOSS] and metrics.last_validation == records[-1]["val_loss"]
    assert metrics.best_validation == (records[-1]["val_loss"], 60)
    assert metrics.median_speed == statistics.median(each["tokens_per_second"] for each in records)
    assert metrics.seconds == pytest.approx(6.0) and metrics.peak_memory == 350 << 20
    assert [bucket.step for bucket in metrics.validations.buckets] == [10, 20, 30, 40, 50, 60]
    assert "val_loss" not in metrics.steps.names


def test_a_damaged_file_has_notes(tmp_path: Path) -> None:
    good = list(lines(4))
    text = good[0] + "{broken\n" + good[2] + good[1] + "[]\n" + json.dumps(record(4, reduced_train_loss=None)) + "\n"
    metrics = read(tmp_path, text + good[3][:40])
    assert [bucket.step for bucket in metrics.steps.buckets] == [1, 3, 4]
    invalid, repeated, unknown = metrics.notes
    assert "2 invalid lines" in invalid and "line 2 " in invalid
    assert repeated.startswith("1 line of metrics.jsonl repeat") and unknown == "1 step without a finite loss"


def test_an_impossible_mfu_is_not_shown(tmp_path: Path) -> None:
    metrics = read(tmp_path, "".join(lines(3, mfu=0.9)) + json.dumps(record(4, mfu=1.18)) + "\n")
    assert metrics.median_mfu is None and not {"mfu", "mfu_full"} & {*metrics.steps.names}
    assert [note.partition(":")[0] for note in metrics.notes] == ["MFU is unknown, with 1 step above 100 %"]


def test_the_last_line_of_a_run_in_progress_is_no_fault(tmp_path: Path) -> None:
    assert read(tmp_path, "".join(lines(3)) + '{"step": 4, "redu').notes == []
    assert read(tmp_path, "").last == {}


def test_strange_values(tmp_path: Path) -> None:
    strange = {"step": 1e400, "a": math.nan, "b": math.inf, "c": True, "d": "x", "e": [1], "f": 10**400}
    huge = json.dumps(strange | {"step": 10**400})
    metrics = read(tmp_path, json.dumps(strange) + f"\n{huge}\n" + json.dumps(strange | {"step": 2, "lr": 1.0}) + "\n")
    assert metrics.steps.names == ["lr"] and metrics.count == 2
    many = {"step": 1} | {f"m{number}": 1.0 for number in range(200)}
    assert len(read(tmp_path, json.dumps(many) + "\n").steps.names) == MOST_METRICS
    assert LIMIT == 1000
