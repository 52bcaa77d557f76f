"""The curves and their gap as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_llama.system.units import short_count
from megatron_llama.tools.compare.sample_grid import Grid
from megatron_llama.tools.compare.verdict import Comparison
from megatron_llama.train.smoothing import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Bins drawn as thin lines; more would only be ink.
MOST_POINTS = 4000


@dataclass(frozen=True)
class Look:
    """Colours and size of a picture."""

    ink: str
    soft: str
    paper: str
    reference: str
    others: tuple[str, ...]
    inches: tuple[float, float] = (9.0, 6.4)
    dpi: int = 130

    def colour(self, index: int) -> str:
        """The colour of the run with that number."""
        return self.others[index % len(self.others)]


LIGHT = Look("#1f2933", "#7b8794", "#ffffff", "#2563eb", ("#ea580c", "#0d9488", "#9333ea", "#be123c", "#65a30d"))
DARK = Look("#e5e7eb", "#9aa5b1", "#14181f", "#60a5fa", ("#fb923c", "#2dd4bf", "#c084fc", "#fb7185", "#a3e635"))
NARROW = (4.2, 6.0)  # a phone's


def draw(comparison: Comparison, look: Look = LIGHT) -> bytes:
    """The picture, as the bytes of a PNG: loss above, relative gap and its band below, both over samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"text.color": look.ink, "axes.edgecolor": look.soft, "axes.labelcolor": look.ink}):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=look.inches, dpi=look.dpi, sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        figure.set_facecolor(look.paper)
        _losses(above, comparison, look)
        _gaps(below, comparison, look)
        for axes in (above, below):
            _plain(axes, look)
        below.xaxis.set_major_formatter(lambda samples, _: short_count(samples))
        below.set_xlabel("consumed samples")
        written = io.BytesIO()
        figure.savefig(written, format="png", facecolor=look.paper)
        pyplot.close(figure)
    return written.getvalue()


def _losses(axes: Axes, comparison: Comparison, look: Look) -> None:
    grid = comparison.grid
    seeds = len(comparison.seeds) + 1
    name = comparison.reference.name + (f" (mean of {seeds} seeds)" if seeds > 1 else "")
    drawn = [(name, comparison.reference_bins, comparison.reference_curve, look.reference)]
    drawn += [(one.run.name, one.bins, one.curve, look.colour(index)) for index, one in enumerate(comparison.compared)]
    for order, (label, bins, curve, colour) in enumerate(drawn):
        _thin(axes, grid, bins, colour)
        style = "-" if order == 0 else (0, (4, 1.2))  # so that curves on top of each other are both seen
        axes.plot(grid.centres, curve, color=colour, linewidth=2.0, linestyle=style, label=label)
    if seeds > 1:
        noise = (comparison.band - comparison.tolerance) * np.abs(comparison.reference_curve)
        low, high = comparison.reference_curve - noise, comparison.reference_curve + noise
        axes.fill_between(grid.centres, low, high, color=look.reference, alpha=0.15, linewidth=0, label="seeds")
    _limits(axes, [curve for _, _, curve, _ in drawn])
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, loc="upper right", fontsize=8, labelcolor=look.ink)


def _thin(axes: Axes, grid: Grid, bins: Floats, colour: str) -> None:
    """Each bin's loss, faint."""
    every = -(-len(bins) // MOST_POINTS)
    middles = (grid.edges[:-1] + grid.edges[1:]) / 2
    axes.plot(middles[::every], bins[::every], color=colour, alpha=0.25, linewidth=0.8)


def _limits(axes: Axes, curves: list[Floats]) -> None:
    """What the smoothed curves need, so that a spike does not press them flat."""
    values = np.concatenate(curves)
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.12 * float(np.ptp(values)) or 0.05 * abs(float(values[0])) or 1.0
        axes.set_ylim(float(values.min()) - margin, float(values.max()) + margin)


def _gaps(axes: Axes, comparison: Comparison, look: Look) -> None:
    centres, band = comparison.grid.centres, 100 * comparison.band
    if len(centres) == 1:  # a band has no width in one point
        centres, band = comparison.grid.edges[[0, -1]], np.repeat(band, 2)
    axes.fill_between(centres, -band, band, color=look.reference, alpha=0.12, linewidth=0)
    axes.axhline(0, color=look.reference, linewidth=1.2)
    marker = "o" if len(comparison.grid.centres) == 1 else None
    for index, one in enumerate(comparison.compared):
        colour = look.colour(index)
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


def _plain(axes: Axes, look: Look) -> None:
    """A quiet frame: light grid, no box."""
    axes.set_facecolor(look.paper)
    axes.grid(alpha=0.25, linewidth=0.6, color=look.soft)
    axes.set_axisbelow(True)
    axes.tick_params(colors=look.ink, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.01)
