"""Smoothing neither lags nor shifts a curve, and counts only the finite values of a window."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_llama.train.loss_curve import moving_average


def test_straight_lines_and_levels_are_kept() -> None:
    steps = np.arange(1.0, 31.0)
    line = 3.0 - 0.1 * steps
    middles = moving_average(steps, 5)
    assert middles.tolist() == list(range(3, 29))
    assert moving_average(line, 5) == pytest.approx(3.0 - 0.1 * middles), "a mean that only looks back would lag"
    wave = [1.0 + (-1) ** step for step in range(100)]
    assert moving_average(wave, 20) == pytest.approx(1.0)


def test_only_whole_windows_count() -> None:
    assert moving_average([], 1).shape == (0,)
    assert moving_average([2.0, 4.0], 1).tolist() == [2.0, 4.0]
    assert moving_average([2.0, 4.0], 2).tolist() == [3.0]
    assert moving_average(np.ones((3, 10)), 4).shape == (3, 7)


def test_non_finite_values_are_left_out() -> None:
    smooth = moving_average([1.0, math.nan, 3.0, math.inf, math.nan, 5.0], 2)
    assert smooth[[0, 1, 2, 4]].tolist() == [1.0, 3.0, 3.0, 5.0]
    assert math.isnan(smooth[3]), "no finite value in the window"
