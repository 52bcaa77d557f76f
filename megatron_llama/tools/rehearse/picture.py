"""A step's memory over time as a picture. matplotlib is imported when one is drawn."""

from __future__ import annotations

import io

import numpy as np

from megatron_llama.system.units import GIB, gib
from megatron_llama.tools.rehearse.report import KINDS, Rehearsal

MOST_COLUMNS = 1500
"""Of the picture; each shows the highest moment of the changes that it stands for."""
MOST_MARKS = 24
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0.0,
    "font.size": 9,
    "legend.frameon": False,
}


def draw(rehearsal: Rehearsal, title: str, memory_gib: float | None = None) -> bytes:
    """The bytes of a PNG: what is alive, by kind, over the changes of a step, with its passes below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alive = rehearsal.timeline.bytes
    every = -(-len(alive) // MOST_COLUMNS)
    starts = np.arange(0, len(alive), every)
    totals = alive.sum(axis=1)
    chosen = np.array([start + int(totals[start : start + every].argmax()) for start in starts])
    unit, size = ("GiB", GIB) if rehearsal.peak >= GIB else ("MiB", 2**20)
    shown = [number for number, kind in enumerate(KINDS) if rehearsal.most.get(kind, 0) > rehearsal.peak / 500]
    with pyplot.style.context(["default", STYLE]):
        figure, axes = pyplot.subplots(figsize=(11.0, 5.4), dpi=120, layout="constrained")
        colours = [pyplot.get_cmap("tab20")(number / 20) for number in shown]
        labels = [f"{KINDS[number]}, {gib(rehearsal.at_peak.get(KINDS[number], 0))}" for number in shown]
        axes.stackplot(
            chosen, *(alive[chosen, number] / size for number in shown), colors=colours, labels=labels, step="post"
        )
        peak = int(totals.argmax())
        axes.plot([peak], [rehearsal.peak / size], "kv", markersize=5)
        axes.annotate(
            f"peak {gib(rehearsal.peak)}",
            (peak, rehearsal.peak / size),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
        )
        if memory_gib is not None:
            axes.axhline(memory_gib * GIB / size, color="k", linestyle="--", linewidth=1)
            axes.annotate(f"the device's {memory_gib:g} GiB", (0, memory_gib * GIB / size), va="bottom")
        axes.set_ylim(0, max(rehearsal.peak, (memory_gib or 0) * GIB) / size * 1.08)
        _passes(axes, rehearsal, len(alive))
        axes.set_ylabel(unit)
        axes.set_xlabel(
            "a step, from one birth or death of a tensor to the next; F: forward, B: backward of a micro batch"
        )
        axes.set_title(title, loc="left")
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), title="at the peak")
        written = io.BytesIO()
        figure.savefig(written, format="png")
        pyplot.close(figure)
    return written.getvalue()


def _passes(axes: object, rehearsal: Rehearsal, end: int) -> None:
    """A letter and a micro batch's number for each pass, where they are few enough to be read."""
    marks = [(change, name) for change, name in rehearsal.timeline.marks if " of micro batch " in name]
    begins = [
        mark for before, mark in zip([(0, ""), *marks], marks, strict=False) if _letter(mark[1]) != _letter(before[1])
    ]
    if len(begins) > MOST_MARKS:
        return
    stops = [change for change, _ in begins[1:]] + [end]
    for (change, name), stop in zip(begins, stops, strict=True):
        axes.axvline(change, color="k", linewidth=0.3, alpha=0.5)  # type: ignore[attr-defined]
        axes.text((change + stop) / 2, 0, _letter(name), ha="center", va="bottom", fontsize=7)  # type: ignore[attr-defined]


def _letter(name: str) -> str:
    """F3 for the forward pass of micro batch 3; recomputation belongs to the backward pass."""
    phase, _, batch = name.partition(" of micro batch ")
    return ("F" if phase == "forward" else "B") + batch.replace(", chunk ", "'")
