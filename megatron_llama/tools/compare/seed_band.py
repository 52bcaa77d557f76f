"""The spread of runs that differ only in their seed, and the interval in which one more run is expected.

docs/compare.md derives the band; the terms are those of one-way analysis of variance with random effects.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_llama.train.smoothing import Floats

# The share of runs without a true gap that are inside the band at a point; the variance is pooled over this many
# windows around the point.
LEVEL, POOLED_WINDOWS = 0.99, 5


def seeds_band(curves: Floats, window: int) -> Floats:
    """How far a further run may be from the seeds' mean, relative to it, at each point.

    ``curves`` are the smoothed curves of at least two seeds, [seeds, points]; ``window`` is the smoothing's, in points.
    A prediction interval: t · σ · sqrt(1 + 1/seeds), with Student's t at the effective degrees of freedom: fewer
    where each seed stays on its side of the mean all along the curve.
    """
    seeds, points = curves.shape
    mean = curves.mean(axis=0)
    deviations = (curves - mean) / np.abs(mean)
    variance = pooled((deviations**2).sum(axis=0) / (seeds - 1), min(POOLED_WINDOWS * window, points))
    sigma = np.sqrt(variance)
    kept = persistence(deviations / np.where(sigma > 0, sigma, 1.0), window)
    windows = max(1.0, min(POOLED_WINDOWS, points / window))
    freedom = degrees_of_freedom(seeds, windows, kept)
    return student_t((1 + LEVEL) / 2, freedom) * sigma * math.sqrt(1 + 1 / seeds)


def pooled(values: Floats, span: int) -> Floats:
    """The mean over ``span`` points around each; at the ends over those that are there. NaN is left out."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(len(values))
    low, high = np.maximum(index - span // 2, 0), np.minimum(index + span // 2 + 1, len(values))
    return (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)


def persistence(standardised: Floats, window: int) -> float:
    """The share of the seeds' variance, 0 to 1, that is constant along the curve (the intraclass correlation).

    ``standardised`` are deviations from the seeds' mean in units of their spread, [seeds, points]. Windows that don't
    overlap are the members of a class. One window is not enough to estimate it, and gives 1.
    """
    blocks = standardised[:, ::window]
    blocks = blocks[:, np.isfinite(blocks).all(axis=0)]
    seeds, count = blocks.shape
    if count < 2:
        return 1.0
    own = blocks.mean(axis=1, keepdims=True)
    between = count * float((own**2).sum()) / (seeds - 1)
    within = float(((blocks - own) ** 2).sum()) / ((seeds - 1) * (count - 1))
    kept = max(0.0, (between - within) / count)
    return kept / (kept + within) if kept + within > 0 else 1.0


def degrees_of_freedom(seeds: int, windows: float, kept: float) -> float:
    """Satterthwaite's for a variance pooled over ``windows``, where the share ``kept`` of it is the same in all.

    seeds - 1 for ``kept`` 1, (seeds - 1) · windows for 0.
    """
    if windows <= 1:
        return seeds - 1.0
    shared = (kept + (1 - kept) / windows) ** 2
    own = (1 - kept) ** 2 * (1 - 1 / windows) ** 2 / (windows - 1)
    return (seeds - 1) / (shared + own)


def student_t(probability: float, freedom: float) -> float:
    """The quantile of Student's t, for probabilities above 0.5, to about 1e-5.

    With t = sqrt(f) · tan(a) the density becomes cos(a)^(f - 1), which is summed over a fine grid.
    """
    freedom = min(freedom, 1000.0)
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate(([0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)))
    angle = float(np.interp(2 * probability - 1, areas / areas[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)
