"""Whether curves agree. docs/compare.md defines each figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.runs import Run
from megatron_llama.tools.compare.sample_grid import Grid, binned, borders, common_grid
from megatron_llama.tools.compare.seed_band import seeds_band
from megatron_llama.train.smoothing import Floats, moving_average

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
