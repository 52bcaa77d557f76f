"""Whether curves agree. docs/guides/tools/compare.md defines each figure."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.runs import Run
from megatron_llama.train.loss_curve import Floats, moving_average

# A curve that is outside the band for longer than this many windows has diverged; what is shorter is a spike, which a
# window spreads over its own length.
PATIENCE = 1.5


@dataclass(frozen=True)
class Divergence:
    """Where a curve left the band for good, or for long."""

    start: float
    """Samples at the centre of the first window outside."""
    end: float | None
    """Samples where it was back inside; None where it was not."""
    reason: str


@dataclass(frozen=True)
class Compared:
    """One run against the reference, on the samples that all runs have."""

    run: Run
    bins: Floats
    """Loss in each bin, [bins]."""
    curve: Floats
    """The smoothed loss, [points]."""
    gap: Floats
    """(curve - reference) / |reference|, [points]."""
    final: float
    """The smoothed loss at the end of the common samples."""
    area: float
    """Area between the smoothed curves, as a share of the area under the reference."""
    largest: float
    """The smoothed gap of the largest size, with its sign."""
    largest_at: float
    """Samples at the centre of its window."""
    speed_ratio: float | None
    """Sequences per second, over the reference's."""
    divergence: Divergence | None
    noise: float
    """Two standard errors of a smoothed gap, relative, from the noise between steps alone."""

    @property
    def agrees(self) -> bool:
        """Whether its curve is the reference's, within the tolerance and the seeds' noise."""
        return self.divergence is None


@dataclass(frozen=True)
class Comparison:
    """All runs against the first."""

    tolerance: float
    grid: Grid
    reference: Run
    seeds: tuple[Run, ...]
    """Further runs of the reference with other seeds."""
    reference_bins: Floats
    """The reference's loss in each bin; with seeds the mean of all."""
    reference_curve: Floats
    """The same, smoothed."""
    band: Floats
    """The gap that is allowed at each point, relative: the tolerance, and with seeds their noise on top."""
    min_overlap: float
    """Share of the reference's samples that must have been compared for a verdict that curves agree."""
    compared: tuple[Compared, ...] = ()

    @property
    def agree(self) -> bool:
        """The verdict."""
        return self.covered and all(one.agrees for one in self.compared)

    @property
    def overlap(self) -> float:
        """Share of the reference's samples that all runs have."""
        edges = borders(self.reference)
        return (self.grid.end - self.grid.start) / float(edges[-1] - edges[0])

    @property
    def covered(self) -> bool:
        """Whether enough of the reference was compared; a bin may hang over its end."""
        return self.overlap + self.grid.width / float(self.reference.samples[-1]) >= self.min_overlap

    @property
    def reference_final(self) -> float:
        """The reference's smoothed loss at the end of the common samples."""
        return float(self.reference_curve[-1])


def compare(
    reference: Run,
    others: Sequence[Run],
    tolerance: float,
    seeds: Sequence[Run] = (),
    window_samples: float | None = None,
    min_overlap: float = 0.9,
) -> Comparison:
    """Compares each of ``others`` with ``reference``; raises ConfigError where that can't be done."""
    runs = [reference, *seeds, *others]
    grid = common_grid(runs, window_samples)
    if grid is None:
        ranges = "; ".join(f"{run.name} has {run.samples[0]:,.0f} to {run.samples[-1]:,.0f}" for run in runs)
        instead = "compare runs over the same samples, or check --samples-per-step"
        raise ConfigError([Problem("runs", None, f"have no consumed samples in common: {ranges}", instead)])
    drawn = np.stack([binned(run, grid) for run in (reference, *seeds)])
    curves = moving_average(drawn, grid.window)
    band = np.full(len(grid.centres), tolerance)
    if seeds:
        # A seed that is the same run twice would make the spread look smaller than it is.
        names = [run.name for run in (reference, *seeds)]
        problems = [
            Problem("--seeds", names[second], f"its losses are {names[first]}'s, to the last digit", "name it once")
            for first, second in combinations(range(len(names)), 2)
            if np.array_equal(drawn[first], drawn[second], equal_nan=True)
        ]
        if problems:
            raise ConfigError(problems)
        band = band + seeds_band(curves, grid.window)
    means = drawn.mean(axis=0), curves.mean(axis=0)
    comparison = Comparison(tolerance, grid, reference, tuple(seeds), *means, band, min_overlap)
    return replace(comparison, compared=tuple(_compared(run, comparison) for run in others))


def _compared(run: Run, to: Comparison) -> Compared:
    grid, reference = to.grid, to.reference_curve
    bins = binned(run, grid)
    curve = moving_average(bins, grid.window)
    gap = (curve - reference) / np.abs(reference)
    known = np.isfinite(gap)
    largest = int(np.argmax(np.where(known, np.abs(gap), -1.0)))
    found = [_ends_non_finite(one, grid) for one in (to.reference, *to.seeds, run)] + [_leaves_band(gap, bins, to)]
    return Compared(
        run=run,
        bins=bins,
        curve=curve,
        gap=gap,
        final=float(curve[-1]),
        area=float(np.abs(curve - reference)[known].sum() / np.abs(reference)[known].sum()) if known.any() else np.nan,
        largest=float(gap[largest]),
        largest_at=float(grid.centres[largest]),
        speed_ratio=run.speed / to.reference.speed if run.speed and to.reference.speed else None,
        divergence=min((one for one in found if one is not None), key=lambda one: one.start, default=None),
        noise=_step_noise(bins, to),
    )


def _ends_non_finite(run: Run, grid: Grid) -> Divergence | None:
    """A run whose last losses are not finite has failed there, however few they are."""
    finite = np.flatnonzero(np.isfinite(run.losses))
    if len(finite) and finite[-1] == len(run.losses) - 1:
        return None
    start = float(run.samples[finite[-1] + 1]) if len(finite) else float(run.samples[0])
    if start > grid.end + grid.width:
        return None  # beyond what is compared
    return Divergence(start, None, f"from there on {run.name}'s loss is not finite")


def _leaves_band(gap: Floats, bins: Floats, to: Comparison) -> Divergence | None:
    """The first stretch outside the band that is longer than a spike."""
    grid, centres = to.grid, to.grid.centres
    missing = ~np.isfinite(gap)
    outside = missing | (np.abs(gap) > to.band)
    # A spike of a few steps at the very end does not move the median of the last half window. NaN is outside.
    last = min(len(bins), max(3, grid.window // 2))
    still = ~(abs(np.median((bins - to.reference_bins)[-last:] / np.abs(to.reference_bins[-last:]))) <= to.band[-1])
    changes = np.flatnonzero(np.diff(outside, prepend=False, append=False))
    for first, after in zip(changes[::2], changes[1::2], strict=True):
        end = None if after == len(outside) else float(centres[after])
        if missing[first:after].any():
            reason = "most losses of a whole window are not finite"
        elif after - first > PATIENCE * grid.window:
            reason = f"outside the band for {(after - first) * grid.width:,.0f} samples"
        elif end is None and still:
            reason = "outside the band at the end"
        else:
            continue
        return Divergence(float(centres[first]), end, reason)
    return None


def _step_noise(bins: Floats, to: Comparison) -> float:
    """Two standard errors of a smoothed gap, from how much the gap changes from one bin to the next."""
    gaps = (bins - to.reference_bins) / np.abs(to.reference_bins)
    changes = np.diff(gaps[np.isfinite(gaps)])
    if len(changes) < 2:
        return 0.0
    # The median of |N(0, s) - N(0, s)| is 0.6745 · sqrt(2) · s; spikes hardly change it.
    spread = float(np.median(np.abs(changes))) / (0.6745 * 2**0.5)
    return 2 * spread / float(np.sqrt(to.grid.window))


# The spread of runs that differ only in their seed, and the interval in which one more run is expected.
#
# docs/guides/tools/compare.md derives the band; the terms are those of one-way analysis of variance with random
# effects.


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


# Curves on one grid of samples, bins of the samples that all have. docs/guides/tools/compare.md explains it.


# The window when none is given: this share of what is compared, but no fewer bins than that.
SHARE, FEWEST_BINS = 0.05, 8


@dataclass(frozen=True)
class Grid:
    """Equal bins over the samples that all runs have; a bin is a step of the run with the largest ones."""

    start: float
    """Samples before the first bin."""
    width: float
    """Samples in a bin."""
    bins: int
    window: int
    """Bins that a smoothed value is the mean of."""

    @property
    def end(self) -> float:
        """Samples after the last bin."""
        return self.start + self.bins * self.width

    @property
    def edges(self) -> Floats:
        """Samples at the bins' borders, bins + 1 of them."""
        return self.start + self.width * np.arange(self.bins + 1, dtype=np.float64)

    @property
    def centres(self) -> Floats:
        """Samples in the middle of each window, bins - window + 1 of them."""
        return self.start + self.width * (self.window / 2 + np.arange(self.bins - self.window + 1, dtype=np.float64))


def borders(run: Run) -> Floats:
    """Samples before and after each logged step: the first step is taken to be as large as the median one."""
    return np.concatenate(([run.samples[0] - run.step], run.samples))


def common_grid(runs: Sequence[Run], window_samples: float | None = None) -> Grid | None:
    """The grid that all runs share, or None where they share no bin."""
    start = max(float(borders(run)[0]) for run in runs)
    end = min(float(run.samples[-1]) for run in runs)
    width = max(run.step for run in runs)
    bins = int((end - start) / width + 1e-6)
    if bins < 1:
        return None
    window = max(FEWEST_BINS, round(SHARE * bins)) if window_samples is None else max(1, round(window_samples / width))
    return Grid(start, width, bins, min(window, bins))


def binned(run: Run, grid: Grid) -> Floats:
    """The mean loss in each bin, weighted by samples. A logged loss is that of all samples since the one before.

    So runs with different steps are averaged over the very same samples. NaN where less than half of a bin has a
    finite loss.
    """
    edges = borders(run)
    finite = np.isfinite(run.losses)
    widths = np.diff(edges)
    covered = np.concatenate(([0.0], np.cumsum(widths * finite)))
    summed = np.concatenate(([0.0], np.cumsum(widths * np.where(finite, run.losses, 0.0))))
    cover = np.diff(np.interp(grid.edges, edges, covered))
    total = np.diff(np.interp(grid.edges, edges, summed))
    known = cover > grid.width / 2
    return np.where(known, total / np.where(known, cover, 1.0), np.nan)
