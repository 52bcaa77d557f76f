"""A comparison in words: the verdict, the table of figures, the notes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import short_count
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
