"""Tokens per second over the sequence length: shares of attention and ratios of given times, without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import long_context
from benchmarks.harness.arguments import load_preset

MODEL = load_preset("llama_15m", None).model
LENGTHS = (1024, 4096, 16384)


def _points(cp: int, factor: float) -> list[dict[str, object]]:
    """Return points whose time follows the formula."""
    points = []
    for length in LENGTHS:
        seconds = factor * length / (1 - long_context.formula_share(MODEL, length, 0))
        points.append({"length": length, "window": 0, "cp": cp, "seconds": seconds, "times": [seconds]})
    return points


def test_attention_share_grows_with_the_length_up_to_the_window() -> None:
    shares = [long_context.formula_share(MODEL, length, 0) for length in LENGTHS]
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] < 1
    windowed = [long_context.formula_share(MODEL, length, 1024) for length in (65536, 131072)]
    assert windowed[0] == pytest.approx(windowed[1], rel=0.02)
    # 4/3 x 6 x 6 layers x 288 x 16384 for attention, 4/3 x 6 x 6 x 995,328 + 6 x 32,000 x 288 for the rest
    attention, rest = 8 * 6 * 288 * 16384, 8 * 6 * 995_328 + 6 * 32_000 * 288
    assert shares[-1] == pytest.approx(attention / (attention + rest))


def test_measured_shares_of_times_by_the_formula_equal_it() -> None:
    points = [*_points(1, 1e-3), *_points(2, 2e-3)]
    expected = [long_context.formula_share(MODEL, length, 0) for length in LENGTHS]
    assert long_context.measured_shares(MODEL, points) == pytest.approx([*expected, *expected])


def test_rows_and_picture(tmp_path: Path) -> None:
    points = [*_points(1, 1e-3), *_points(2, 2e-3)]
    rows = list(long_context.long_context_rows(MODEL, points))
    assert [row[4] for row in rows] == ["1.00"] * 3 + ["0.50"] * 3
    long_context.draw(points, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
