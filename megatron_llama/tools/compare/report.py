"""Report of a comparison: verdict, table, notes, HTML page without scripts, and picture."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_llama.system.output import import_pyplot
from megatron_llama.system.tables import plural, short_count, text_table
from megatron_llama.system.wrapping import WIDTH, fill
from megatron_llama.tools.compare.verdict import LEAST_BINS, Comparison, RunComparison
from megatron_llama.tools.figures import STYLE, as_svg, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LABELS = (
    *("final loss", "area between the curves", "largest smoothed gap", "first divergence"),
    *("sequences per second", "verdict"),
)


def verdict(comparison: Comparison) -> str:
    """Format the verdict."""
    differing = [item.run.name for item in comparison.compared if item.differs(comparison.is_long_enough)]
    to = comparison.reference.name
    measure = f"a tolerance of {comparison.tolerance:.3g} (relative)"
    if comparison.seeds:
        measure += f" and the spread of {len(comparison.seeds) + 1} seeds"
    if not differing and not comparison.is_long_enough:
        return f"Too short to tell, exit status 2: {_too_short(comparison)}"
    if not differing and not comparison.covered:
        return (
            f"Too short to tell, exit status 2: only {comparison.overlap:.0%} of {to}'s samples could be compared, and "
            f"{comparison.min_overlap:.0%} are required. Train all runs as long as {to}, or add --min-overlap SHARE."
        )
    if not differing:
        subject = "The curve agrees" if len(comparison.compared) == 1 else "The curves agree"
        return f"{subject} with {to} within {measure}."
    names = " and ".join(filter(None, [", ".join(differing[:-1]), differing[-1]]))
    return f"{names} {'does' if len(differing) == 1 else 'do'} not agree with {to} within {measure}."


def _too_short(comparison: Comparison) -> str:
    """Explain how many points are missing, and what to do."""
    grid, needed = comparison.grid, comparison.required_bins
    points = f"{grid.bins:,} {plural(grid.bins, 'point')} of {grid.width:,.6g} samples in common"
    by_window = f" with a window of {grid.window:,} points" if needed > LEAST_BINS else ""
    runs = [comparison.reference, *comparison.seeds, *(one.run for one in comparison.compared)]
    widest = max(runs, key=lambda run: run.step)
    coarse = f", or log {widest.name} more often" if widest.step > 1.5 * min(run.step for run in runs) else ""
    advice = f"Train at least {needed:,} steps{coarse}{', or write a smaller --window' if by_window else ''}."
    return f"the runs have {points}, and a verdict needs {needed:,}{by_window}. {advice}"


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Build the table: a row per quantity, a column per run."""
    final = comparison.reference_final
    undecided = "agrees" if comparison.is_long_enough and comparison.covered else "too short to tell"
    columns = [LABELS, (f"{final:.4f}", "", "", "", _speed(comparison.reference.speed), "reference")]
    for one in comparison.compared:
        divergence = "none"
        if one.divergence is not None:
            back = f", back at {one.divergence.end:,.0f}" if one.divergence.end is not None else ""
            divergence = f"{one.divergence.start:,.0f} samples{back}"
        column = (
            f"{one.final:.4f} ({one.final / final - 1:+.2%})",
            f"{one.area:.3%}",
            f"{one.largest:+.3%} at {one.largest_at:,.0f} samples",
            divergence,
            _speed(one.run.speed) + (f" ({one.speed_ratio:.2f} times)" if one.speed_ratio else ""),
            "does not agree" if one.differs(comparison.is_long_enough) else undecided,
        )
        columns.append(column)
    return list(zip(*columns, strict=True))


def _speed(speed: float | None) -> str:
    return "not logged" if speed is None else f"{speed:,.4g}"


def method(comparison: Comparison) -> str:
    """Describe the compared samples and the smoothing."""
    grid = comparison.grid
    window = short_count(grid.window * grid.width)
    return (
        f"Compared over {grid.end - grid.start:,.0f} consumed samples ({grid.start:,.0f} to {grid.end:,.0f}), in "
        f"{grid.bins:,} bins of {grid.width:,.6g}; smoothed over {grid.window} bins ({window} samples)."
    )


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on the runs and the comparison."""
    runs = [comparison.reference, *comparison.seeds, *(one.run for one in comparison.compared)]
    for run in runs:
        yield from (f"{run.name}: {note}." for note in run.notes)
    longest = max(runs, key=lambda run: float(run.samples[-1]))
    for run in runs:
        share = float(run.samples[-1] / longest.samples[-1])
        if share < 0.99:
            yield f"{run.name} ends after {share:.0%} of {longest.name}'s samples; the rest is not compared."
    lengths = {run.name: run.tokens_per_sample for run in runs if run.tokens_per_sample}
    if lengths and max(lengths.values()) > 1.01 * min(lengths.values()):
        each = ", ".join(f"{name} {length:,.0f}" for name, length in lengths.items())
        yield f"The sequence lengths differ ({each} tokens), so equal samples are not equal tokens."
    if comparison.seeds:
        noise = comparison.band - comparison.tolerance
        yield f"The spread of the seeds adds ±{float(noise.min()):.2%} to ±{float(noise.max()):.2%} to the tolerance."
    for one in comparison.compared:
        yield from _run_notes(one, comparison)


def _run_notes(one: RunComparison, comparison: Comparison) -> Iterator[str]:
    outside = bool((abs(one.gap) > comparison.band).any())
    if one.divergence is not None:
        yield f"{one.run.name}: {one.divergence.reason}, from {one.divergence.start:,.0f} samples on."
    elif outside:
        yield (
            f"{one.run.name} was outside the band, but too briefly for a divergence (largest gap at "
            f"{one.largest_at:,.0f} samples)."
        )
    if outside and not comparison.seeds and one.noise > comparison.tolerance / 2:
        yield (
            f"{one.run.name}: noise between steps alone causes smoothed gaps of ±{one.noise:.2%}. Use more seeds "
            "of the first run (--seeds), a larger --window or a larger --tolerance."
        )


def as_text(comparison: Comparison) -> str:
    """Format tables, notes and verdict as text of at most WIDTH columns where the names allow it."""
    tables = "\n\n".join("\n".join(lines) for lines in _tables(comparison))
    texts = [method(comparison), *notes(comparison), "", verdict(comparison)]
    return "\n".join([tables, "", *[fill("", text) for text in texts]]) + "\n"


def _tables(comparison: Comparison) -> Iterator[list[str]]:
    """Yield tables with the labels, the reference and one or more runs each."""
    names = [comparison.reference.name, *(one.run.name for one in comparison.compared)]
    columns = list(zip(*[("", *names), *rows(comparison)], strict=True))
    fixed, left = columns[:2], columns[2:]
    while left:
        count = max([1, *(each for each in range(len(left) + 1) if _width(fixed + left[:each]) <= WIDTH)])
        yield text_table(list(zip(*fixed, *left[:count], strict=True)))
        left = left[count:]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(2 + max(map(len, column)) for column in columns) - 2


def as_html(comparison: Comparison) -> str:
    """Render the report as an HTML page for large and small screens, light and dark."""
    svgs = (as_svg(draw(comparison, inches)).encode() for inches in (LARGE_INCHES, SMALL_INCHES))
    return render_page(
        Path(__file__).with_name("page.html"),
        agree=comparison.agree,
        verdict=verdict(comparison),
        method=method(comparison),
        pictures=[base64.b64encode(svg).decode() for svg in svgs],
        runs=[comparison.reference, *(one.run for one in comparison.compared)],
        rows=rows(comparison),
        notes=list(notes(comparison)),
    )


# Figure of the curves and their gap.

# Largest number of bins drawn as thin lines.
MAX_POINTS = 4000
LARGE_INCHES, SMALL_INCHES = (9.0, 6.4), (4.2, 6.0)  # size of the picture for a screen and for a phone
REFERENCE = "C0"


def draw(comparison: Comparison, inches: tuple[float, float] = LARGE_INCHES) -> Figure:
    """Draw loss and relative gap over samples."""
    pyplot = import_pyplot()
    with pyplot.style.context(["default", STYLE, {"axes.grid": True}]):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=inches, dpi=130, sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        _losses(above, comparison)
        _gaps(below, comparison)
        below.xaxis.set_major_formatter(lambda samples, _: short_count(samples))
        below.set_xlabel("consumed samples")
    return figure


def _losses(axes: Axes, comparison: Comparison) -> None:
    grid = comparison.grid
    seeds = len(comparison.seeds) + 1
    name = comparison.reference.name + (f" (mean of {seeds} seeds)" if seeds > 1 else "")
    drawn = [(name, comparison.reference_bins, comparison.reference_curve, REFERENCE)]
    drawn += [(one.run.name, one.bins, one.curve, f"C{index + 1}") for index, one in enumerate(comparison.compared)]
    for order, (label, bins, curve, color) in enumerate(drawn):
        every = -(-len(bins) // MAX_POINTS)
        middles = (grid.edges[:-1] + grid.edges[1:]) / 2
        axes.plot(middles[::every], bins[::every], color=color, alpha=0.25, linewidth=0.8)
        style = "-" if order == 0 else (0, (4, 1.2))  # dashes keep overlapping curves visible
        label = re.sub("^_", " _", label)  # matplotlib omits labels that begin with _
        axes.plot(grid.centers, curve, color=color, linewidth=2.0, linestyle=style, label=label)
    if seeds > 1:
        noise = (comparison.band - comparison.tolerance) * np.abs(comparison.reference_curve)
        low, high = comparison.reference_curve - noise, comparison.reference_curve + noise
        axes.fill_between(grid.centers, low, high, color=REFERENCE, alpha=0.15, linewidth=0, label="seeds")
    # Scale the axis to the smoothed curves, so that a spike does not flatten them.
    values = np.concatenate([curve for _, _, curve, _ in drawn])
    values = values[np.isfinite(values)]
    if len(values):
        margin = 0.12 * float(np.ptp(values)) or 0.05 * abs(float(values[0])) or 1.0
        axes.set_ylim(float(values.min()) - margin, float(values.max()) + margin)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(loc="upper right", fontsize=8)


def _gaps(axes: Axes, comparison: Comparison) -> None:
    centers, band = comparison.grid.centers, 100 * comparison.band
    if len(centers) == 1:  # one point has no width
        centers, band = comparison.grid.edges[[0, -1]], np.repeat(band, 2)
    axes.fill_between(centers, -band, band, color=REFERENCE, alpha=0.12, linewidth=0)
    axes.axhline(0, color=REFERENCE, linewidth=1.2)
    marker = "o" if len(comparison.grid.centers) == 1 else None
    for index, one in enumerate(comparison.compared):
        color = f"C{index + 1}"
        axes.plot(comparison.grid.centers, 100 * one.gap, color=color, linewidth=1.6, marker=marker)
        if one.divergence is not None:
            axes.axvline(one.divergence.start, color=color, linewidth=1, linestyle=":")
            axes.annotate(
                f"diverges at {short_count(one.divergence.start)}",
                (one.divergence.start, 0.97 - 0.1 * index),
                xycoords=("data", "axes fraction"),
                xytext=(4, 0),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=color,
            )
    gaps = np.concatenate([band, *(100 * np.abs(one.gap) for one in comparison.compared)])
    reach = 1.15 * float(np.nanmax(gaps[np.isfinite(gaps)])) or 1.0
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("gap (%)")
