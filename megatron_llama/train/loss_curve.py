"""Loss curve as loss.png, and the moving average of all curves. Imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_llama.plan import Plan
from megatron_llama.system.files import atomic_open
from megatron_llama.system.output import import_pyplot
from megatron_llama.system.tables import short_count
from megatron_llama.topology import AXIS_NAMES
from megatron_llama.train.metrics_file import METRICS_FILE, read_run_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PICTURE_FILE = "loss.png"
INK, SOFT, TRAIN, VALIDATION, RATE = "#1f2933", "#9aa5b1", "#2563eb", "#ea580c", "#0d9488"
# Window of the moving average, as a share of the run.
SMOOTHING = 0.05


def draw_run(plan: Plan) -> Path | None:
    """Draw the ``loss.png`` of a run from its metrics.jsonl. Return its path, or None if no step was logged."""
    records = read_run_records(plan.run_dir / METRICS_FILE)
    if not records:
        return None
    return draw(records, plan.run_dir / PICTURE_FILE, title=plan.model.name, subtitle=describe(plan))


def describe(plan: Plan) -> str:
    """Describe model size, layout, precision, device and data in one line."""
    trainer = plan.config.trainer
    count = plan.parameters
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    sizes = plan.grid.sizes
    axes = [f"{name}{sizes[name]}" for name in AXIS_NAMES if sizes[name] > 1]
    layout = "·".join(axes) or "one rank"
    if plan.data_ranks > 1:
        layout += f" zero{trainer.zero}"
    ranks = f"{plan.world_size} × {plan.config.device.name}"
    return f"{size} parameters  |  {layout}  |  {trainer.precision} on {ranks}  |  {plan.config.data.name}"


def draw(records: Sequence[Mapping[str, Any]], path: Path, title: str, subtitle: str) -> Path:
    """Draw training and validation loss over steps and tokens, with the learning rate below; return ``path``."""
    pyplot = import_pyplot()
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 6), dpi=130, sharex=True, height_ratios=(5, 1), layout="constrained"
    )
    _loss(above, records)
    _tokens_on_top(above, records)
    _learning_rate(below, records)
    _legend(figure, above, 58)
    _headline(above, title, 58, fontsize=15, fontweight="bold", color=INK)
    _headline(above, subtitle, 42, fontsize=9.5, color=SOFT)
    with atomic_open(path) as file:  # replaces a pipe, on which opening would block
        figure.savefig(file)
    pyplot.close(figure)
    return path


def _headline(axes: Axes, text: str, points: float, **style: Any) -> None:
    """Write a line of text, left-aligned, ``points`` above the frame."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, points), "textcoords": "offset points"}
    axes.annotate(text, (0, 1), parse_math=False, **place, **style)


def _legend(figure: Figure, axes: Axes, points: float) -> None:
    """Draw the legend, right-aligned, ``points`` above the frame."""
    from matplotlib.transforms import ScaledTranslation

    where = axes.transAxes + ScaledTranslation(0, points / 72, figure.dpi_scale_trans)
    style: dict[str, Any] = {"frameon": False, "borderaxespad": 0, "borderpad": 0, "ncols": 2}
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), bbox_transform=where, **style)


def _loss(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss (thin), its moving average (thick) and validation loss (points); label the last value."""
    known = [record for record in records if record["reduced_train_loss"] is not None]
    steps = [record["step"] for record in known]
    losses = [record["reduced_train_loss"] for record in known]
    window = max(1, round(SMOOTHING * len(losses)))
    middles, smooth = moving_average(steps, window), moving_average(losses, window)
    axes.plot(steps, losses, color=TRAIN, alpha=0.28, linewidth=0.9)
    axes.plot(
        middles, smooth, color=TRAIN, linewidth=2.2, label="training loss", solid_capstyle="round", **_dot(middles)
    )
    validated = [(record["step"], record["val_loss"]) for record in records if record.get("val_loss") is not None]
    if validated:
        style: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1.2, "markeredgecolor": "white"}
        axes.plot(*zip(*validated, strict=True), color=VALIDATION, label="validation loss", **style)
    if known:
        name, last = ("validation", validated[-1][1]) if validated else ("training", smooth[-1])
        axes.annotate(
            f"{name}\n{last:.3f}",
            (1, last),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=VALIDATION if validated else TRAIN,
        )
    units = {"kl": "per answer", "rewards/margins": "per pair"}
    unit = next((unit for metric, unit in units.items() if metric in records[0]), "nats per token")
    axes.set_ylabel(f"loss ({unit})", color=INK)
    _plain(axes)


def _tokens_on_top(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """Add an axis in tokens on top; extrapolated beyond the run. Larger batches have more tokens per step."""
    known = np.array([(0, 0), *((record["step"], record["consumed_tokens"]) for record in records)])
    before = known[:1] - len(known) * (known[1] - known[0])
    beyond = known[-1:] + len(known) * (known[-1] - known[-2])
    steps, counts = np.concatenate((before, known, beyond)).T
    functions = (lambda at: np.interp(at, steps, counts), lambda at: np.interp(at, counts, steps))
    top = axes.secondary_xaxis("top", functions=functions)
    top.xaxis.set_major_formatter(lambda tokens, _: short_count(tokens))
    top.set_xlabel("tokens", fontsize=9, color=SOFT)
    top.tick_params(colors=SOFT, labelsize=8, length=3)
    top.spines["top"].set_visible(False)


def _learning_rate(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw the learning rate over steps."""
    from matplotlib.ticker import MaxNLocator

    steps, rates = [record["step"] for record in records], [record["lr"] for record in records]
    axes.plot(steps, rates, color=RATE, linewidth=1.5, **_dot(steps))
    axes.fill_between(steps, rates, color=RATE, alpha=0.12, linewidth=0)
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylabel("lr", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    _plain(axes)


def _dot(values: Sized) -> dict[str, Any]:
    """Return a line style: a single value needs a marker to be visible."""
    return {"marker": "o"} if len(values) == 1 else {}


def _plain(axes: Axes) -> None:
    """Draw a light grid and no box."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.01)


# Moving average of all curves: loss.png, scripts/compare.py and the figures of scripts/.

Floats = npt.NDArray[np.float64]


def moving_average(values: npt.ArrayLike, window: int) -> Floats:
    """Return the mean of each ``window`` neighbors along the last axis: [..., n] to [..., n - window + 1].

    Only full windows are used, so all values have equal noise. A value belongs to the middle of its window: plot it
    over ``moving_average(steps, window)``. Non-finite values are omitted; a mean is NaN if less than half of its window
    is finite.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    counts = _sliding_sum(finite.astype(np.float64), window)
    sums = _sliding_sum(np.where(finite, values, 0.0), window)
    known = counts >= max(1, window / 2)
    return np.where(known, sums / np.where(known, counts, 1.0), np.nan)


def _sliding_sum(values: Floats, window: int) -> Floats:
    sums = np.concatenate((np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)), axis=-1)
    return sums[..., window:] - sums[..., :-window]
