"""The curves and their gap as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from megatron_llama.system.units import short_count
from megatron_llama.tools.compare.verdict import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Bins drawn as thin lines; more would only be ink.
MOST_POINTS = 4000
WIDE, NARROW = (9.0, 6.4), (4.2, 6.0)
"""Inches, for a screen and for a phone."""
STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.01,
    "grid.alpha": 0.25,
    "font.size": 9,
    "legend.frameon": False,
}
REFERENCE = "C0"


def draw(comparison: Comparison, inches: tuple[float, float] = WIDE, dark: bool = False) -> bytes:
    """The picture, as the bytes of a PNG: loss above, relative gap and its band below, both over samples.

    A ``dark`` one has light lines and no background, for a dark page.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(["dark_background" if dark else "default", STYLE]):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=inches, dpi=130, sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        _losses(above, comparison)
        _gaps(below, comparison)
        below.xaxis.set_major_formatter(lambda samples, _: short_count(samples))
        below.set_xlabel("consumed samples")
        written = io.BytesIO()
        figure.savefig(written, format="png", transparent=dark)
        pyplot.close(figure)
    return written.getvalue()


def _losses(axes: Axes, comparison: Comparison) -> None:
    grid = comparison.grid
    seeds = len(comparison.seeds) + 1
    name = comparison.reference.name + (f" (mean of {seeds} seeds)" if seeds > 1 else "")
    drawn = [(name, comparison.reference_bins, comparison.reference_curve, REFERENCE)]
    drawn += [(one.run.name, one.bins, one.curve, f"C{index + 1}") for index, one in enumerate(comparison.compared)]
    for order, (label, bins, curve, colour) in enumerate(drawn):
        every = -(-len(bins) // MOST_POINTS)
        middles = (grid.edges[:-1] + grid.edges[1:]) / 2
        axes.plot(middles[::every], bins[::every], color=colour, alpha=0.25, linewidth=0.8)
        style = "-" if order == 0 else (0, (4, 1.2))  # so that curves on top of each other are both seen
        axes.plot(grid.centres, curve, color=colour, linewidth=2.0, linestyle=style, label=label)
    if seeds > 1:
        noise = (comparison.band - comparison.tolerance) * np.abs(comparison.reference_curve)
        low, high = comparison.reference_curve - noise, comparison.reference_curve + noise
        axes.fill_between(grid.centres, low, high, color=REFERENCE, alpha=0.15, linewidth=0, label="seeds")
    # The axis shows what the smoothed curves need, so that a spike does not press them flat.
    values = np.concatenate([curve for _, _, curve, _ in drawn])
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.12 * float(np.ptp(values)) or 0.05 * abs(float(values[0])) or 1.0
        axes.set_ylim(float(values.min()) - margin, float(values.max()) + margin)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="upper right", fontsize=8)


def _gaps(axes: Axes, comparison: Comparison) -> None:
    centres, band = comparison.grid.centres, 100 * comparison.band
    if len(centres) == 1:  # a band has no width in one point
        centres, band = comparison.grid.edges[[0, -1]], np.repeat(band, 2)
    axes.fill_between(centres, -band, band, color=REFERENCE, alpha=0.12, linewidth=0)
    axes.axhline(0, color=REFERENCE, linewidth=1.2)
    marker = "o" if len(comparison.grid.centres) == 1 else None
    for index, one in enumerate(comparison.compared):
        colour = f"C{index + 1}"
        axes.plot(comparison.grid.centres, 100 * one.gap, color=colour, linewidth=1.6, marker=marker)
        if one.divergence is not None:
            axes.axvline(one.divergence.start, color=colour, linewidth=1, linestyle=":")
            axes.annotate(
                f"diverges at {short_count(one.divergence.start)}",
                (one.divergence.start, 0.97 - 0.1 * index),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=colour,
            )
    gaps = np.concatenate([band, *(100 * np.abs(one.gap) for one in comparison.compared)])
    reach = 1.15 * float(np.nanmax(gaps[np.isfinite(gaps)])) or 1.0
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("gap (%)")
