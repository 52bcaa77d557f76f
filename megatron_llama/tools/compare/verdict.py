"""Decide whether curves agree. docs/guides/tools/compare.md defines each quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.logs import Run
from megatron_llama.train.loss_curve import Floats, moving_average

# A curve outside the band for longer than this number of windows has diverged; shorter is a spike, which smoothing
# spreads over one window.
PATIENCE = 1.5
# Bins that a verdict needs at least, and the number of windows. A shorter curve is only its start and its final loss is
# the mean of most of it.
LEAST_BINS, LEAST_WINDOWS = 16, 2


@dataclass(frozen=True)
class Divergence:
    """Range in which a curve is outside the band for longer than a spike."""

    start: float
    """Samples at the center of the first window outside."""
    end: float | None
    """Samples where it returned to the band; None if it did not."""
    reason: str
    is_non_finite: bool = False
    """Whether losses that are not finite caused it. A single one of these at the end suffices."""


@dataclass(frozen=True)
class RunComparison:
    """Comparison of a run with the reference on the common samples."""

    run: Run
    bins: Floats
    """Loss in each bin, [bins]."""
    curve: Floats
    """Smoothed loss, [points]."""
    gap: Floats
    """(curve - reference) / |reference|, [points]."""
    final: float
    """Smoothed loss at the end of the common samples."""
    area: float
    """Area between the smoothed curves over the area under the reference."""
    largest: float
    """Largest smoothed gap by magnitude, signed."""
    largest_at: float
    """Samples at the center of its window."""
    speed_ratio: float | None
    """Sequences per second relative to the reference."""
    divergence: Divergence | None
    noise: float
    """Two standard errors of a smoothed relative gap, from noise between steps."""

    def differs(self, is_long_enough: bool) -> bool:
        """Whether the curve certainly differs; short curves only by losses that are not finite."""
        return self.divergence is not None and (is_long_enough or self.divergence.is_non_finite)


@dataclass(frozen=True)
class Comparison:
    """Comparison of all runs with the first."""

    tolerance: float
    grid: SampleGrid
    reference: Run
    seeds: tuple[Run, ...]
    """Further runs of the reference with other seeds."""
    reference_bins: Floats
    """Loss of the reference in each bin; with seeds their mean."""
    reference_curve: Floats
    """Smoothed ``reference_bins``."""
    band: Floats
    """Allowed relative gap at each point: the tolerance plus the spread of the seeds."""
    min_overlap: float
    """Minimum share of the reference's samples for a positive verdict."""
    compared: tuple[RunComparison, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all curves agree on enough samples."""
        return self.is_long_enough and self.covered and all(one.divergence is None for one in self.compared)

    @property
    def differ(self) -> bool:
        """Whether a curve certainly differs: it left the band on enough samples, or its last loss is not finite."""
        return any(one.differs(self.is_long_enough) for one in self.compared)

    @property
    def required_bins(self) -> int:
        """Bins that a verdict needs."""
        return max(LEAST_BINS, LEAST_WINDOWS * self.grid.window)

    @property
    def is_long_enough(self) -> bool:
        """Whether the curves have enough bins for a verdict."""
        return self.grid.bins >= self.required_bins

    @property
    def overlap(self) -> float:
        """Share of the reference's samples that all runs cover."""
        edges = step_edges(self.reference)
        return (self.grid.end - self.grid.start) / float(edges[-1] - edges[0])

    @property
    def covered(self) -> bool:
        """Whether enough of the reference was compared; a bin may hang over its end."""
        return self.overlap + self.grid.width / float(self.reference.samples[-1]) >= self.min_overlap

    @property
    def reference_final(self) -> float:
        """Smoothed loss of the reference at the end of the common samples."""
        return float(self.reference_curve[-1])


def compare(
    reference: Run,
    others: Sequence[Run],
    tolerance: float,
    seeds: Sequence[Run] = (),
    window_samples: float | None = None,
    min_overlap: float = 0.9,
) -> Comparison:
    """Compare each of ``others`` with ``reference``. Raises ConfigError if they cannot be compared."""
    runs = [reference, *seeds, *others]
    grid = common_grid(runs, window_samples)
    if grid is None:
        ranges = "; ".join(f"{run.name} has {run.samples[0]:,.0f} to {run.samples[-1]:,.0f}" for run in runs)
        instead = "compare runs over the same samples, or check --samples-per-step"
        raise ConfigError([Problem("runs", None, f"have no consumed samples in common: {ranges}", instead)])
    binned_losses = np.stack([binned(run, grid) for run in (reference, *seeds)])
    curves = moving_average(binned_losses, grid.window)
    band = np.full(len(grid.centers), tolerance)
    if seeds:
        # A duplicate seed would underestimate the spread.
        names = [run.name for run in (reference, *seeds)]
        problems = [
            Problem("--seeds", names[second], f"has exactly the losses of {names[first]}", "give it once")
            for first, second in combinations(range(len(names)), 2)
            if np.array_equal(binned_losses[first], binned_losses[second], equal_nan=True)
        ]
        if problems:
            raise ConfigError(problems)
        band = band + seeds_band(curves, grid.window)
    means = binned_losses.mean(axis=0), curves.mean(axis=0)
    comparison = Comparison(tolerance, grid, reference, tuple(seeds), *means, band, min_overlap)
    return replace(comparison, compared=tuple(_compared(run, comparison) for run in others))


def _compared(run: Run, comparison: Comparison) -> RunComparison:
    grid, reference = comparison.grid, comparison.reference_curve
    bins = binned(run, grid)
    curve = moving_average(bins, grid.window)
    gap = (curve - reference) / np.abs(reference)
    known = np.isfinite(gap)
    largest = int(np.argmax(np.where(known, np.abs(gap), -1.0)))
    divergences = [_ends_non_finite(item, grid) for item in (comparison.reference, *comparison.seeds, run)]
    divergences.append(_leaves_band(gap, bins, comparison))
    return RunComparison(
        run=run,
        bins=bins,
        curve=curve,
        gap=gap,
        final=float(curve[-1]),
        area=float(np.abs(curve - reference)[known].sum() / np.abs(reference)[known].sum()) if known.any() else np.nan,
        largest=float(gap[largest]),
        largest_at=float(grid.centers[largest]),
        speed_ratio=run.speed / comparison.reference.speed if run.speed and comparison.reference.speed else None,
        divergence=min((item for item in divergences if item is not None), key=lambda item: item.start, default=None),
        noise=_step_noise(bins, comparison),
    )


def _ends_non_finite(run: Run, grid: SampleGrid) -> Divergence | None:
    """Return the divergence of a run whose last losses are not finite."""
    finite = np.flatnonzero(np.isfinite(run.losses))
    if len(finite) and finite[-1] == len(run.losses) - 1:
        return None
    start = float(run.samples[finite[-1] + 1]) if len(finite) else float(run.samples[0])
    if start > grid.end + grid.width:
        return None  # after the compared samples
    return Divergence(start, None, f"the loss of {run.name} is not finite", is_non_finite=True)


def _leaves_band(gap: Floats, bins: Floats, comparison: Comparison) -> Divergence | None:
    """Return the first range outside the band that is longer than a spike."""
    grid, centers = comparison.grid, comparison.grid.centers
    missing = ~np.isfinite(gap)
    outside = missing | (np.abs(gap) > comparison.band)
    # The median of the last half window ignores a spike of a few steps at the end. NaN counts as outside.
    last = min(len(bins), max(3, grid.window // 2))
    end_gaps = (bins - comparison.reference_bins)[-last:] / np.abs(comparison.reference_bins[-last:])
    outside_at_end = not abs(np.median(end_gaps)) <= comparison.band[-1]
    changes = np.flatnonzero(np.diff(outside, prepend=False, append=False))
    for first, after in zip(changes[::2], changes[1::2], strict=True):
        end = None if after == len(outside) else float(centers[after])
        if missing[first:after].any():
            reason = "most losses of a window are not finite"
        elif after - first > PATIENCE * grid.window:
            reason = f"outside the band for {(after - first) * grid.width:,.0f} samples"
        elif end is None and outside_at_end:
            reason = "outside the band at the end"
        else:
            continue
        return Divergence(float(centers[first]), end, reason)
    return None


def _step_noise(bins: Floats, comparison: Comparison) -> float:
    """Estimate two standard errors of a smoothed gap from differences of adjacent bins."""
    gaps = (bins - comparison.reference_bins) / np.abs(comparison.reference_bins)
    changes = np.diff(gaps[np.isfinite(gaps)])
    if len(changes) < 2:
        return 0.0
    # The median of |N(0, s) - N(0, s)| is 0.6745 · sqrt(2) · s, which is robust to spikes.
    spread = float(np.median(np.abs(changes))) / (0.6745 * 2**0.5)
    return 2 * spread / float(np.sqrt(comparison.grid.window))


# Prediction interval for one more run, from runs that differ only in their seed.
#
# docs/guides/tools/compare.md derives the band, in terms of one-way analysis of variance with random effects.

# Coverage of the interval at a point, and the number of windows around it over which the variance is pooled.
LEVEL, POOLED_WINDOWS = 0.99, 5


def seeds_band(curves: Floats, window: int) -> Floats:
    """Return the half width of the prediction interval for one more run, relative to the mean, [points].

    t · σ · sqrt(1 + 1/seeds), with Student's t at the effective degrees of freedom, which are fewer if each seed stays
    on one side of the mean.

    Args:
        curves: Smoothed curves of at least two seeds, [seeds, points].
        window: Smoothing window in points.
    """
    seeds, points = curves.shape
    mean = curves.mean(axis=0)
    deviations = (curves - mean) / np.abs(mean)
    variance = pooled((deviations**2).sum(axis=0) / (seeds - 1), min(POOLED_WINDOWS * window, points))
    sigma = np.sqrt(variance)
    correlation = persistence(deviations / np.where(sigma > 0, sigma, 1.0), window)
    windows = max(1.0, min(POOLED_WINDOWS, points / window))
    freedom = degrees_of_freedom(seeds, windows, correlation)
    return student_t((1 + LEVEL) / 2, freedom) * sigma * math.sqrt(1 + 1 / seeds)


def pooled(values: Floats, span: int) -> Floats:
    """Return the centered moving average over ``span`` points, truncated at the ends; ignores NaN."""
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(len(values))
    low, high = np.maximum(index - span // 2, 0), np.minimum(index + span // 2 + 1, len(values))
    return (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)


def persistence(standardized: Floats, window: int) -> float:
    """Return the share of the variance that is constant along the curve: the intraclass correlation, 0 to 1.

    ``standardized`` are deviations from the mean of the seeds in units of their spread, [seeds, points].
    Non-overlapping windows are the members of a class. With one window the result is 1.
    """
    blocks = standardized[:, ::window]
    blocks = blocks[:, np.isfinite(blocks).all(axis=0)]
    seeds, count = blocks.shape
    if count < 2:
        return 1.0
    means = blocks.mean(axis=1, keepdims=True)
    between = count * float((means**2).sum()) / (seeds - 1)
    within = float(((blocks - means) ** 2).sum()) / ((seeds - 1) * (count - 1))
    constant = max(0.0, (between - within) / count)
    return constant / (constant + within) if constant + within > 0 else 1.0


def degrees_of_freedom(seeds: int, windows: float, persistence: float) -> float:
    """Return Satterthwaite's degrees of freedom of a variance pooled over ``windows``.

    (seeds - 1) · windows for ``persistence`` 0, seeds - 1 for 1.
    """
    if windows <= 1:
        return seeds - 1.0
    shared = (persistence + (1 - persistence) / windows) ** 2
    separate = (1 - persistence) ** 2 * (1 - 1 / windows) ** 2 / (windows - 1)
    return (seeds - 1) / (shared + separate)


def student_t(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t for probabilities above 0.5, accurate to about 1e-5.

    Substituting t = sqrt(f) · tan(a) gives the density cos(a)^(f - 1), which is integrated on a fine grid.
    """
    freedom = min(freedom, 1000.0)
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    heights = np.cos(angles) ** (freedom - 1)
    areas = np.concatenate(([0.0], np.cumsum((heights[1:] + heights[:-1]) / 2)))
    angle = float(np.interp(2 * probability - 1, areas / areas[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


# Alignment of curves on bins of the common samples. docs/guides/tools/compare.md explains it.

# Default window: share of the compared samples, and minimum number of bins.
WINDOW_SHARE, MIN_BINS = 0.05, 8


@dataclass(frozen=True)
class SampleGrid:
    """Equal bins over the common samples; a bin has the size of the largest median step."""

    start: float
    """Samples before the first bin."""
    width: float
    """Samples in a bin."""
    bins: int
    window: int
    """Number of bins per smoothed value."""

    @property
    def end(self) -> float:
        """Samples after the last bin."""
        return self.start + self.bins * self.width

    @property
    def edges(self) -> Floats:
        """Samples at the edges of the bins, [bins + 1]."""
        return self.start + self.width * np.arange(self.bins + 1, dtype=np.float64)

    @property
    def centers(self) -> Floats:
        """Samples at the center of each window, [bins - window + 1]."""
        return self.start + self.width * (self.window / 2 + np.arange(self.bins - self.window + 1, dtype=np.float64))


def step_edges(run: Run) -> Floats:
    """Return the samples before and after each logged step; assumes a first step of median size."""
    return np.concatenate(([run.samples[0] - run.step], run.samples))


def common_grid(runs: Sequence[Run], window_samples: float | None = None) -> SampleGrid | None:
    """Return the common grid of all runs, or None if they have no bin in common."""
    start = max(float(step_edges(run)[0]) for run in runs)
    end = min(float(run.samples[-1]) for run in runs)
    width = max(run.step for run in runs)
    bins = int((end - start) / width + 1e-6)
    if bins < 1:
        return None
    window = (
        max(MIN_BINS, round(WINDOW_SHARE * bins)) if window_samples is None else max(1, round(window_samples / width))
    )
    return SampleGrid(start, width, bins, min(window, bins))


def binned(run: Run, grid: SampleGrid) -> Floats:
    """Return the mean loss in each bin, weighted by samples; NaN if less than half of a bin has a finite loss.

    A logged loss covers all samples since the previous one, so runs with different batch sizes are averaged over the
    same samples.
    """
    edges = step_edges(run)
    finite = np.isfinite(run.losses)
    widths = np.diff(edges)
    covered = np.concatenate(([0.0], np.cumsum(widths * finite)))
    summed = np.concatenate(([0.0], np.cumsum(widths * np.where(finite, run.losses, 0.0))))
    cover = np.diff(np.interp(grid.edges, edges, covered))
    total = np.diff(np.interp(grid.edges, edges, summed))
    known = cover > grid.width / 2
    return np.where(known, total / np.where(known, cover, 1.0), np.nan)
