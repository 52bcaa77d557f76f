"""The one way in which curves are smoothed: loss.png, scripts/compare.py and the figures of scripts/."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def moving_average(values: npt.ArrayLike, window: int) -> Floats:
    """The mean of each ``window`` neighbours along the last axis: [..., n] to [..., n - window + 1].

    Only whole windows count, so the noise in every smoothed value is the same. A value belongs to the middle of its
    window, so that the curve does not lag behind: plot it over ``moving_average(steps, window)``, and a straight line
    stays one. Non-finite values are left out of the mean; the result is NaN where less than half of a window is finite.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    counts = _sliding_sum(finite.astype(np.float64), window)
    sums = _sliding_sum(np.where(finite, values, 0.0), window)
    known = counts >= max(1, window / 2)
    return np.where(known, sums / np.where(known, counts, 1.0), np.nan)


def _sliding_sum(values: Floats, window: int) -> Floats:
    zero = np.zeros((*values.shape[:-1], 1))
    sums = np.concatenate((zero, np.cumsum(values, axis=-1)), axis=-1)
    return sums[..., window:] - sums[..., :-window]
