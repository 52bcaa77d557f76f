"""What came out, as text and as an HTML page that stands alone."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from dataclasses import replace

from megatron_llama.tools.compare.comparison_plot import DARK, LIGHT, NARROW, draw, short
from megatron_llama.tools.compare.verdict import Compared, Comparison

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
            "asked for (--min-overlap): no verdict, which counts as not agreeing."
        )
    if not apart:
        what = "The curve agrees" if len(comparison.compared) == 1 else "The curves agree"
        return f"{what} with {to} within {measure}."
    names = " and ".join(filter(None, [", ".join(apart[:-1]), apart[-1]]))
    return f"{names} {'does' if len(apart) == 1 else 'do'} not agree with {to} within {measure}."


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table: a row per figure, a column for the reference and for each run compared with it."""
    reference = comparison.reference
    own = (f"{comparison.reference_final:.4f}", "", "", "", _speed(reference.speed), "reference")
    columns = [LABELS, own, *(_column(one, comparison) for one in comparison.compared)]
    return list(zip(*columns, strict=True))


def _column(one: Compared, comparison: Comparison) -> tuple[str, ...]:
    change = one.final / comparison.reference_final - 1
    ratio = f" ({one.speed_ratio:.2f} times)" if one.speed_ratio else ""
    return (
        f"{one.final:.4f} ({change:+.2%})",
        f"{one.area:.3%}",
        f"{one.largest:+.3%} at {one.largest_at:,.0f} samples",
        _divergence(one),
        _speed(one.run.speed) + ratio,
        ("agrees" if comparison.covered else "agrees so far") if one.agrees else "does not agree",
    )


def _divergence(one: Compared) -> str:
    if one.divergence is None:
        return "none"
    back = f", back at {one.divergence.end:,.0f}" if one.divergence.end is not None else ""
    return f"{one.divergence.start:,.0f} samples{back}"


def _speed(speed: float | None) -> str:
    return "not logged" if speed is None else f"{speed:,.4g}"


def how(comparison: Comparison) -> str:
    """What was compared, in a sentence."""
    grid = comparison.grid
    return (
        f"Compared over {grid.end - grid.start:,.0f} consumed samples ({grid.start:,.0f} to {grid.end:,.0f}), in "
        f"{grid.bins:,} bins of {grid.width:,.6g}; smoothed over {grid.window} bins ({short(grid.window * grid.width)} "
        "samples)."
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
            yield f"{run.name} ends after {share:.0%} of {longest.name}'s samples; nothing is said about the rest."
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
    table = [head, *rows(comparison)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines += ["", how(comparison), *notes(comparison), "", verdict(comparison)]
    return "\n".join(lines) + "\n"


STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #616e7c; --paper: #fff; --line: #e4e7eb; --good: #15803d;
        --bad: #b91c1c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --soft: #9aa5b1; --paper: #14181f; --line: #323a46; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .5rem; border-left: .35rem solid; padding-left: .75rem; }
h1.agrees { border-color: var(--good); } h1.differs { border-color: var(--bad); }
h2 { font-size: 1.05rem; margin: 1.75rem 0 .25rem; }
p, li { color: var(--soft); margin: .25rem 0; } ul { padding-left: 1.2rem; }
img { display: block; width: 100%; height: auto; margin: 1rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .5rem 1.5rem; margin: .5rem 0; }
dl > div { border-top: 1px solid var(--line); padding-top: .35rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.agrees dd.word { color: var(--good); } .differs dd.word { color: var(--bad); } dd.word { font-weight: 600; }
"""


def as_html(comparison: Comparison) -> str:
    """The report as one page: no script, nothing from elsewhere, for wide and narrow screens, light and dark."""
    table = rows(comparison)
    names = [comparison.reference.name, *(one.run.name for one in comparison.compared)]
    kinds = [
        "reference",
        *("agrees" if one.agrees and comparison.covered else "differs" for one in comparison.compared),
    ]
    sources = [comparison.reference, *(one.run for one in comparison.compared)]
    sections = []
    for column, (name, kind, run) in enumerate(zip(names, kinds, sources, strict=True), start=1):
        cells = [(row[0], row[column]) for row in table if row[column]]
        figures = "".join(
            f"<div><dt>{html.escape(label)}</dt><dd{' class=word' if label == 'verdict' else ''}>{html.escape(value)}"
            "</dd></div>"
            for label, value in cells
        )
        title = f"<h2>{html.escape(name)}</h2><p>{html.escape(f'{run.program}, {run.source}')}</p>"
        sections.append(f'<section class="{kind}">{title}<dl>{figures}</dl></section>')
    remarks = "".join(f"<li>{html.escape(note)}</li>" for note in notes(comparison))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Training curves: {html.escape(' and '.join(names))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1 class="{"agrees" if comparison.agree else "differs"}">{html.escape(verdict(comparison))}</h1>\n'
        f"<p>{html.escape(how(comparison))}</p>\n{_pictures(comparison)}\n" + "\n".join(sections) + "\n"
        f"{f'<h2>Notes</h2><ul>{remarks}</ul>' if remarks else ''}\n</body>\n</html>\n"
    )


def _pictures(comparison: Comparison) -> str:
    """The picture in four looks; a browser takes the one that fits."""
    wide_dark, wide_light = draw(comparison, DARK), draw(comparison, LIGHT)
    narrow_dark, narrow_light = (draw(comparison, replace(look, inches=NARROW)) for look in (DARK, LIGHT))
    narrow, dark = "(max-width: 600px)", "(prefers-color-scheme: dark)"
    text = "Above, the loss over consumed samples, smoothed; below, the relative gap and the band it may stay in."
    return (
        "<picture>"
        f'<source media="{narrow} and {dark}" srcset="{_inline(narrow_dark)}">'
        f'<source media="{narrow}" srcset="{_inline(narrow_light)}">'
        f'<source media="{dark}" srcset="{_inline(wide_dark)}">'
        f'<img src="{_inline(wide_light)}" alt="{text}"></picture>'
    )


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
