"""What a sweep has found: a table for the terminal and one in Markdown, and the curves over one another."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_llama.system.files import write_atomically
from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import short_count
from megatron_llama.tools.compare.comparison_plot import MOST_POINTS, STYLE
from megatron_llama.tools.sweep.combinations import Combination, Sweep
from megatron_llama.tools.sweep.outcomes import Record
from megatron_llama.train.metrics_file import METRICS_FILE, own_records

TABLE, PICTURE = "sweep.md", "curves.png"
_SMOOTHED_PARTS = 50
"""Steps of a curve are averaged over one of so many parts of it."""


@dataclass(frozen=True)
class Result:
    """What a run has logged."""

    run: Combination
    status: str
    records: list[dict[str, Any]]

    def row(self, varied: Sequence[str]) -> list[str]:
        """Its row of the table."""
        last = self.records[-1] if self.records else {}
        losses = [record["val_loss"] for record in self.records if record.get("val_loss") is not None]
        speeds = [record["tokens_per_second"] for record in self.records]
        return [
            *(self.run.differing[key] for key in varied),
            self.status,
            f"{last['step']:,}" if last else "-",
            f"{last['reduced_train_loss']:.4f}" if last else "-",
            f"{losses[-1]:.4f}" if losses else "-",
            f"{median(speeds):,.0f}" if speeds else "-",
        ]


def summarize(sweep: Sweep, record: Record) -> str:
    """Writes the table and, where anything was logged, the picture into the sweep's folder; returns what to print."""
    results = [Result(one, record[one].in_words, _logged(sweep.folder / one.name)) for one in sweep.combinations]
    rows = [[*sweep.varied, "status", "step", "loss", "val loss", "tokens/s"], *(r.row(sweep.varied) for r in results)]
    write_atomically(sweep.folder / TABLE, markdown(rows))
    told = [*text_table(rows, left=len(sweep.varied) + 1), "", f"  table   {sweep.folder / TABLE}"]
    drawn = [result for result in results if result.records]
    if drawn:
        write_atomically(sweep.folder / PICTURE, draw(drawn))
        told.append(f"  curves  {sweep.folder / PICTURE}")
    return "\n".join(told) + "\n"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """``rows``, the first of them the heads, as a table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [escaped[0], ["---"] * len(rows[0]), *escaped[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def draw(results: Sequence[Result]) -> bytes:
    """The losses of all runs over their tokens, as the bytes of a PNG: each step thin, their mean over a fiftieth of
    the run thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(["default", STYLE]):
        figure, axes = pyplot.subplots(figsize=(9.0, 5.0), dpi=130, layout="constrained")
        for index, result in enumerate(results):
            tokens = np.array([record["consumed_tokens"] for record in result.records], dtype=float)
            losses = np.array([record["reduced_train_loss"] for record in result.records], dtype=float)
            every, colour = -(-len(losses) // MOST_POINTS), f"C{index % 10}"
            axes.plot(tokens[::every], losses[::every], color=colour, alpha=0.2, linewidth=0.8)
            width = max(1, len(losses) // _SMOOTHED_PARTS)
            whole = len(losses) // width * width
            means = [values[:whole].reshape(-1, width).mean(axis=1) for values in (tokens, losses)]
            label = ", ".join(f"{key}={value}" for key, value in result.run.differing.items())
            axes.plot(*means, color=colour, linewidth=1.8, linestyle=("-", "--", ":")[index // 10 % 3], label=label)
        axes.xaxis.set_major_formatter(lambda tokens, _: short_count(tokens))
        axes.set_xlabel("consumed tokens")
        axes.set_ylabel("loss (nats per token)")
        axes.legend(loc="upper right", fontsize=8)
        written = io.BytesIO()
        figure.savefig(written, format="png")
        pyplot.close(figure)
    return written.getvalue()


def _logged(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged; nothing where it has not begun."""
    path = folder / METRICS_FILE
    return own_records(path) if path.is_file() else []
