"""Curves on one grid of samples, bins of the samples that all have. docs/compare.md explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_llama.tools.compare.runs import Run
from megatron_llama.train.smoothing import Floats

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
