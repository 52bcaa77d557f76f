"""Figures and HTML pages of the tools, and memory over time. matplotlib is imported by the functions that draw."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.system.output import import_pyplot
from megatron_llama.system.tables import GIB, gib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.01,
    "axes.axisbelow": True,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "text.parse_math": False,  # names of runs can have $
}
DARK = {"#000000": "#e5e7eb", "#1f2933": "#e5e7eb", "#64748b": "#94a3b8", "#eef1f4": "#262c36", "#ffffff": "#0d1117"}
"""Colors of an SVG in the reader's dark theme, by their color in the light theme."""
TOOLTIP = "tooltip: "
"""Prefix of the ``gid`` of an artist with a tooltip."""
MOST_COLUMNS = 1500
"""Sampled moments per figure. Each is the maximum of its interval."""
MOST_PASSES = 24  # figures with more passes do not mark them


def as_png(figure: Figure) -> bytes:
    """Close the figure and return the bytes of a PNG."""
    written = io.BytesIO()
    figure.savefig(written, format="png")
    import_pyplot().close(figure)
    return written.getvalue()


def as_svg(figure: Figure) -> str:
    """Close the figure and return SVG text that follows the reader's light or dark theme."""
    written, pyplot = io.StringIO(), import_pyplot()
    # Text elements in the reader's font. Equal figures have equal files.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megatron_llama"}):
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    pyplot.close(figure)
    text = written.getvalue()[written.getvalue().index("<svg") :]
    text = re.sub(f'<g id="{TOOLTIP}([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub("'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text).replace(" \n", " ")
    dark = (f'[style*="{name}: {a}"]{{{name}:{b}!important}}' for a, b in DARK.items() for name in ("fill", "stroke"))
    rules = f"text{{fill:{DARK['#000000']}}}{''.join(dark)}"  # black text has no fill
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    return text.replace("</defs>", f"</defs>{style}", 1)


def peak_indices(totals: Any) -> Any:
    """Downsample ``totals`` [n] to at most MOST_COLUMNS moments: index of each interval's maximum, int64 [m]."""
    import numpy as np

    every = -(-len(totals) // MOST_COLUMNS)
    starts = np.arange(0, len(totals), every)
    return np.array([start + int(totals[start : start + every].argmax()) for start in starts])


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes of a rank over a step."""

    kinds: tuple[str, ...]
    moments: Any
    """Position of each row of ``bytes``: number of the change, or milliseconds from the start. [n]"""
    bytes: Any
    """Live bytes by kind: int64 array [n, kinds]."""
    passes: tuple[tuple[float, str], ...]
    """Moment at which each pass begins, and its name: F0 is the first forward pass, B0 the first backward pass."""

    @property
    def peak(self) -> int:
        """Largest number of live bytes."""
        return int(self.bytes.sum(axis=1).max())


def draw_memory(timeline: MemoryTimeline, *, title: str, axis: str, memory_gib: float | None = None) -> bytes:
    """Draw the live memory of a step, stacked by kind, and return the PNG's bytes.

    Args:
        timeline: kinds that stay below 1/500 of the peak are omitted.
        title: title of the figure.
        axis: label of the horizontal axis.
        memory_gib: device memory to mark, GiB.
    """
    pyplot = import_pyplot()
    moments, sizes, kinds, passes = timeline.moments, timeline.bytes, timeline.kinds, timeline.passes
    totals = sizes.sum(axis=1)
    top, end = int(totals.argmax()), moments[-1]
    peak = int(totals[top])
    chosen = peak_indices(totals)
    unit, size = ("GiB", GIB) if peak >= GIB else ("MiB", 2**20)
    shown = [number for number in range(len(kinds)) if sizes[:, number].max() > peak / 500]
    with pyplot.style.context(["default", STYLE, {"axes.xmargin": 0.0}]):
        figure, axes = pyplot.subplots(figsize=(11.0, 5.4), dpi=120, layout="constrained")
        colours = [pyplot.get_cmap("tab20")(number % 20 / 20) for number in shown]
        labels = [f"{kinds[number]}, {gib(int(sizes[top, number]))}" for number in shown]
        stack = [sizes[chosen, number] / size for number in shown]
        axes.stackplot(moments[chosen], *stack, colors=colours, labels=labels, step="post")
        axes.plot([moments[top]], [peak / size], "kv", markersize=5)
        highest_point = (moments[top], peak / size)
        axes.annotate(f"peak {gib(peak)}", highest_point, xytext=(0, 6), textcoords="offset points", ha="center")
        if memory_gib is not None:
            axes.axhline(memory_gib * GIB / size, color="k", linestyle="--", linewidth=1)
            axes.annotate(f"device memory {memory_gib:g} GiB", (moments[0], memory_gib * GIB / size), va="bottom")
        axes.set_ylim(0, max(peak, (memory_gib or 0) * GIB) / size * 1.08)
        if len(passes) <= MOST_PASSES:
            stops = [begin for begin, _ in passes[1:]] + [end]
            for (begin, name), stop in zip(passes, stops, strict=True):
                axes.axvline(begin, color="k", linewidth=0.3, alpha=0.5)
                axes.text((begin + stop) / 2, 0, name, ha="center", va="bottom", fontsize=7)
        axes.set_ylabel(unit)
        axes.set_xlabel(axis)
        axes.set_title(title, loc="left")
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), title="at the peak")
    return as_png(figure)


# HTML pages: templates next to the tools, and one style. Pages need no network.
STYLE_SHEET = Path(__file__).with_name("page.css")


def render_page(template: Path, **values: Any) -> str:
    """Return the page of a jinja2 template, whose variable ``style`` is the style sheet."""
    import jinja2  # torch requires it

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = markup(STYLE_SHEET.read_text(encoding="utf-8"))
    return environment.from_string(template.read_text(encoding="utf-8")).render(style=style, **values)


def markup(text: str) -> Any:
    """Mark text as HTML that needs no escapes."""
    import markupsafe  # of jinja2

    return markupsafe.Markup(text)
