"""A comparison in words: the verdict, the table of figures, the notes."""
from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatron_llama.system.tables import short_count, text_table
from megatron_llama.tools.compare.verdict import Compared, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LABELS = (
    "final loss",
    "area between the curves",
    "largest smoothed gap",
    "first divergence",
    "sequences per second",
    "verdict",
)


def verdict(comparison: Comparison) -> str:
    """The verdict in a sentence."""
    apart = [one.run.name for one in comparison.compared if not one.agrees]
    to = comparison.reference.name
    measure = f"a tolerance of {comparison.tolerance:.3g} (relative)"
    if comparison.seeds:
        measure += f" and the spread of {len(comparison.seeds) + 1} seeds"
    if not apart and not comparison.covered:
        return (
            f"Only {comparison.overlap:.0%} of {to}'s samples could be compared, and {comparison.min_overlap:.0%} are "
            "required (--min-overlap): no verdict, which counts as not agreeing."
        )
    if not apart:
        what = "The curve agrees" if len(comparison.compared) == 1 else "The curves agree"
        return f"{what} with {to} within {measure}."
    names = " and ".join(filter(None, [", ".join(apart[:-1]), apart[-1]]))
    return f"{names} {'does' if len(apart) == 1 else 'do'} not agree with {to} within {measure}."


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table: a row per figure, a column for the reference and for each run compared with it."""
    final = comparison.reference_final
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
            ("agrees" if comparison.covered else "agrees so far") if one.agrees else "does not agree",
        )
        columns.append(column)
    return list(zip(*columns, strict=True))


def _speed(speed: float | None) -> str:
    return "not logged" if speed is None else f"{speed:,.4g}"


def how(comparison: Comparison) -> str:
    """What was compared, in a sentence."""
    grid = comparison.grid
    window = short_count(grid.window * grid.width)
    return (
        f"Compared over {grid.end - grid.start:,.0f} consumed samples ({grid.start:,.0f} to {grid.end:,.0f}), in "
        f"{grid.bins:,} bins of {grid.width:,.6g}; smoothed over {grid.window} bins ({window} samples)."
    )


def notes(comparison: Comparison) -> Iterator[str]:
    """What a reader should know beside the table."""
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
        yield f"The sequences are not equally long ({each} tokens), so equal samples are not equal tokens."
    if comparison.seeds:
        noise = comparison.band - comparison.tolerance
        yield f"The seeds' noise allows ±{float(noise.min()):.2%} to ±{float(noise.max()):.2%} beside the tolerance."
    for one in comparison.compared:
        yield from _about(one, comparison)


def _about(one: Compared, comparison: Comparison) -> Iterator[str]:
    outside = bool((abs(one.gap) > comparison.band).any())
    if one.divergence is not None:
        yield f"{one.run.name}: {one.divergence.reason}, from {one.divergence.start:,.0f} samples on."
    elif outside:
        yield (
            f"{one.run.name} was outside the band, but for shorter than a divergence (the largest gap is at "
            f"{one.largest_at:,.0f} samples)."
        )
    if outside and not comparison.seeds and one.noise > comparison.tolerance / 2:
        yield (
            f"{one.run.name}: noise from step to step alone makes smoothed gaps of ±{one.noise:.2%}. Give further "
            "seeds of the first run (--seeds), a larger --window or a larger --tolerance."
        )


def as_text(comparison: Comparison) -> str:
    """The table, what was done, and the verdict, for a terminal."""
    head = ("", comparison.reference.name, *(one.run.name for one in comparison.compared))
    lines = [*text_table([head, *rows(comparison)]), "", how(comparison), *notes(comparison), "", verdict(comparison)]
    return "\n".join(lines) + "\n"


# A comparison as one HTML page that needs nothing else: no script, no other file, no network.


# The browser takes the picture that fits the screen's width and the reader's light or dark theme.
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training curves: {{ runs | map(attribute="name") | join(" and ") }}</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; border-left: .35rem solid {{ "#15803d" if agree else "#b91c1c" }}; padding-left: .75rem; }
img { width: 100%; }
div { overflow-x: auto; } td, th { text-align: left; padding: .2rem 1.2rem .2rem 0; white-space: nowrap; }
</style>
<h1>{{ verdict }}</h1>
<p>{{ how }}</p>
<picture>
{%- for media, png in pictures.items() %}
<source media="{{ media }}" srcset="data:image/png;base64,{{ png }}">
{%- endfor %}
<img src="data:image/png;base64,{{ picture }}"
alt="Above, the loss over consumed samples, smoothed; below, the relative gap and the band that it may stay in.">
</picture>
<div><table>
<tr><th>{% for run in runs %}<th>{{ run.name }}{% endfor %}
<tr><td>log{% for run in runs %}<td>{{ run.program }}:<br>{{ run.source }}{% endfor %}
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}{% endfor %}
{% endfor %}</table></div>
<ul>{% for note in notes %}<li>{{ note }}{% endfor %}</ul>
</html>
"""


def as_html(comparison: Comparison) -> str:
    """The report as a page for wide and narrow screens, light and dark."""
    import jinja2  # torch requires it

    def png(inches: tuple[float, float] = WIDE, dark: bool = False) -> str:
        return base64.b64encode(draw(comparison, inches, dark)).decode("ascii")

    narrow, dark = "(max-width: 600px)", "(prefers-color-scheme: dark)"
    pictures = {
        f"{narrow} and {dark}": png(NARROW, dark=True),
        narrow: png(NARROW),
        dark: png(dark=True),
    }
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(
        agree=comparison.agree,
        verdict=verdict(comparison),
        how=how(comparison),
        pictures=pictures,
        picture=png(),
        runs=[comparison.reference, *(one.run for one in comparison.compared)],
        rows=rows(comparison),
        notes=list(notes(comparison)),
    )


# The curves and their gap as a picture. matplotlib is imported when one is drawn.


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
