"""The HTML page of a report. It needs no network, and its script may read nothing but the page.

The template and the script are next to this file. Charts are drawn in the browser from JSON in the page.
Their tables are text, which a browser without scripts shows too.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_llama.config.problems import format_value, shorten
from megatron_llama.system.progress import duration
from megatron_llama.system.tables import gib, short_count
from megatron_llama.tools.figures import markup, render_page
from megatron_llama.tools.report.curves import AXES, LOSS, MEMORY, MFU, SPEED, STEP_TIME, VALIDATION, Curve
from megatron_llama.tools.report.runs import Run, describe_end, differing_settings, pipeline_svg
from megatron_llama.topology import Grid

HERE = Path(__file__).parent
TABLE_ROWS = 11  # largest number of rows of a chart's table, besides its head
MOST_STARTS = 50  # starts that the table lists; the page names the number of earlier ones
MOST_RANKS = 512  # ranks that the grid draws
MOST_CHARACTERS = 300  # characters of a setting's value
COLORS = 8  # colors of page.css; further runs repeat them with dashed lines


@dataclass(frozen=True)
class Chart:
    """A chart of one metric."""

    metric: str
    title: str
    unit: str = ""
    form: str = "number"
    """Format of the values, a key of FORMS and of ``forms`` in charts.js."""
    from_zero: bool = False
    """Whether the axis starts at 0."""
    points: bool = False
    """Whether each value has a mark."""


FORMS: dict[str, Callable[[float], str]] = {
    "number": lambda value: f"{value:.4g}",
    "loss": lambda value: f"{value:.4f}",
    "small": lambda value: f"{value:.2e}",
    "count": lambda value: f"{value:,.0f}",
    "percent": lambda value: f"{value:.1%}",
    "bytes": lambda value: gib(round(value)),
    "seconds": lambda value: f"{value:.4g}",
}
CHARTS = (
    Chart(LOSS, "Training loss", "nats per token", "loss"),
    Chart(VALIDATION[0], "Validation loss", "nats per token", "loss", points=True),
    Chart("lr", "Learning rate", "", "small", from_zero=True),
    Chart("gradient_norm", "Gradient norm", "before clipping"),
    Chart(SPEED, "Throughput", "tokens per second, all devices", "count", from_zero=True),
    Chart(MFU, "MFU", "model FLOPs utilization", "percent", from_zero=True),
    Chart(MEMORY, "Peak memory", "of the rank that logs", "bytes", from_zero=True),
)
MORE_CHARTS = (
    Chart(VALIDATION[1], "Validation accuracy", "share of tokens", "percent", points=True),
    Chart(STEP_TIME, "Step time", "seconds", "seconds", from_zero=True),
    Chart("data_time_s", "Wait for data", "seconds per step", "seconds", from_zero=True),
    Chart("global_batch_size", "Batch size", "sequences", "count", from_zero=True),
    Chart("throughput", "Sequences per second", "last 10 steps", "number", from_zero=True),
    Chart("tflops_per_device", "Model TFLOP/s per device", "causal attention", "number", from_zero=True),
    Chart("mfu_full", "MFU, full-square attention", "", "percent", from_zero=True),
)
REPEATED = ("train_step_timing", "throughput_peak", "train_samples_per_second")
"""Metrics that repeat others under another name."""


def render(runs: Sequence[Run], made: datetime | None = None) -> str:
    """Return the page of ``runs`` (at least one). ``made``: time of the report, default now."""
    main, more = list(_charts(runs, CHARTS)), list(_charts(runs, [*MORE_CHARTS, *_other_charts(runs)]))
    pictures = _pictures(runs)  # before the notes, to which it may add
    script = (HERE / "charts.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render_page(
        HERE / "page.html",
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'",
        script=markup(script),
        data=markup(_data(runs, [*main, *more])),
        made=_time((made or datetime.now(UTC)).timestamp()) + " UTC",
        runs=[
            {"name": run.name, "color": number % COLORS, "dash": " dashed" * (number >= COLORS), "run": run}
            for number, run in enumerate(runs)
        ],
        cards=[list(_summary(run)) for run in runs],
        charts=[(chart, _table(runs, chart)) for chart in main],
        more=[(chart, _table(runs, chart)) for chart in more],
        starts=[_starts(run) for run in runs],
        grids=[None if (grid := run.grid) is None else _grid(run, grid) for run in runs],
        pictures=[(names, markup(svg)) for names, svg in pictures],
        settings={
            name: [shorten(format_value(value), MOST_CHARACTERS) for value in values]
            for name, values in differing_settings(list(runs)).items()
        },
        shown=len(runs) > 1,
    )


def _data(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """Return the data of the script as JSON, without characters that could end the script element."""
    names = [chart.metric for chart in charts]
    content = {
        "charts": [
            {"metric": c.metric, "title": c.title, "form": c.form, "zero": c.from_zero, "points": c.points}
            for c in charts
        ],
        "runs": [
            {
                "name": run.name,
                "color": number % COLORS,
                "dashed": number >= COLORS,
                "starts": [start.step for start in run.starts[1:] if start.step],
                "curves": [
                    curve.payload([name for name in names if name in curve.names])
                    for curve in (run.metrics.steps, run.metrics.validations)
                ],
            }
            for number, run in enumerate(runs)
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _curve(run: Run, metric: str) -> Curve:
    return run.metrics.validations if metric in VALIDATION else run.metrics.steps


def _charts(runs: Sequence[Run], charts: Sequence[Chart]) -> Iterator[Chart]:
    """Yield the charts of which a run has a value."""
    names = {name for run in runs for curve in (run.metrics.steps, run.metrics.validations) for name in curve.names}
    yield from (chart for chart in charts if chart.metric in names)


def _other_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of each metric without one."""
    known = {chart.metric for chart in (*CHARTS, *MORE_CHARTS)} | {*AXES, *REPEATED}
    names = dict.fromkeys(name for run in runs for name in run.metrics.steps.names)
    yield from (Chart(name, name) for name in names if name not in known)


def _table(runs: Sequence[Run], chart: Chart) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a chart's table: a few buckets of the longest run, and the mean of each run in them."""
    curves, form = [_curve(run, chart.metric) for run in runs], FORMS[chart.form]
    longest = max(curves, key=lambda curve: curve.last[-1] if curve.last else -1)
    means = longest.column(chart.metric, 1) if chart.metric in longest.names else []
    valued = [index for index, mean in enumerate(means) if mean is not None] or list(range(len(longest.last)))
    last = len(valued) - 1
    chosen = sorted({round(last * row / (TABLE_ROWS - 1)) for row in range(TABLE_ROWS)} if last > 0 else {0})
    width = max(curve.width for curve in curves)
    head = ["step", *([run.name for run in runs] if len(runs) > 1 else ["tokens", chart.title])]
    extremes = []
    if len(runs) == 1 and width > 1:
        head += ["lowest", "highest"]
        extremes = [longest.column(chart.metric, number) for number in (2, 3)]
    rows = []
    for index in [valued[number] for number in chosen] if valued else []:
        first, step, tokens = longest.first[index], longest.last[index], longest.tokens[index]
        cells = [f"{first:,}–{step:,}" if step > first else f"{step:,}"]
        if len(runs) == 1:
            cells.append("" if tokens is None else short_count(tokens))
        values = [*(curve.mean(chart.metric, first, step) for curve in curves), *(each[index] for each in extremes)]
        rows.append([*cells, *("" if value is None else form(value) for value in values)])
    return head, rows


def _summary(run: Run) -> Iterator[tuple[str, str]]:
    """Yield label and value of a run's facts."""
    metrics, settings = run.metrics, run.settings
    yield "state", run.status
    last = metrics.last.get(LOSS)
    if metrics.first_loss is not None and last is not None:
        yield "loss", f"{metrics.first_loss:.4f} → {last:.4f}"
    if metrics.last_validation is not None and metrics.best_validation is not None:
        best, step = metrics.best_validation
        lowest = "" if best == metrics.last_validation else f", lowest {best:.4f} at step {step:,}"
        yield "validation loss", f"{metrics.last_validation:.4f}{lowest}"
    tokens = metrics.last.get("consumed_tokens")
    if tokens is not None:
        yield "tokens", f"{short_count(tokens)} in {duration(metrics.seconds)} of steps"
    if metrics.median_speed is not None:
        mfu = "" if metrics.median_mfu is None else f", MFU {metrics.median_mfu:.1%}"
        yield "speed", f"{metrics.median_speed:,.0f} tokens/s{mfu} (median)"
    if metrics.peak_memory is not None:
        yield "peak memory", gib(round(metrics.peak_memory))
    if settings:
        yield "model", f"{settings.get('model.name')}, {settings.get('data.name')}"
        layout = "" if (grid := run.grid) is None else " × ".join(f"{name} {grid.sizes[name]}" for name in grid.listed)
        kind = f"{settings.get('trainer.precision')}, device={settings.get('device.name')}"
        yield "layout", f"{layout}; {kind}" if layout else kind
        batch = f"{settings.get('trainer.global_batch_size')} × {settings.get('data.seq_length')} tokens"
        yield "batch, seed", f"{batch}, {settings.get('trainer.seed')}"
    if len(run.starts) > 1:
        yield "starts", f"{len(run.starts):,}"


def _starts(run: Run) -> dict[str, Any]:
    """Return the rows of the starts' table, newest last, and the number of omitted rows."""
    before = max(0, len(run.starts) - MOST_STARTS)
    rows = []
    for number, start in enumerate(run.starts[before:], start=before + 1):
        first, last = ("" if step is None else f"{step:,}" for step in (start.step, start.last_step))
        row = {"#": f"{number}", "started (UTC)": _time(start.time), "from step": first, "to step": last}
        row["time"] = "" if start.ended is None else duration(start.ended - start.time)
        rows.append({**row, "end": describe_end(start, number == len(run.starts)), "command": start.command})
    return {"rows": rows, "before": before}


def _time(seconds: float) -> str:
    """Format a time in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "unknown time"


def _grid(run: Run, grid: Grid) -> dict[str, Any]:
    """Return the rows of the rank grid: a row per pipeline stage, in it a group per replica with its ranks."""
    layers, vpp = run.settings.get("trainer.pipeline_layers"), run.settings.get("trainer.vpp")
    rows = []
    stages, replicas = grid.sizes["pp"], grid.sizes["dp"]
    shown = min(replicas, max(1, MOST_RANKS // stages // (grid.sizes["tp"] * grid.sizes["cp"])))
    for stage in range(min(stages, MOST_RANKS)):
        groups = [
            (f"dp {replica}", grid.ranks(grid.rank(dp=replica, pp=stage), "tp", "cp")) for replica in range(shown)
        ]
        count = layers[stage] if isinstance(layers, list) and vpp == 1 and stage < len(layers) else None
        label = f"pp {stage}" + (f", {count} layers" if count is not None and stages > 1 else "")
        rows.append((label, groups, replicas - shown))
    if stages > MOST_RANKS:
        rows.append((f"and {stages - MOST_RANKS:,} more stages", [], 0))
    layout = " × ".join(f"{name} {grid.sizes[name]}" for name in reversed(grid.listed))
    inside = " and ".join(name for name in ("cp", "tp") if grid.sizes[name] > 1)
    return {"layout": f"{layout} = {grid.world_size}", "rows": rows, "inside": inside}


def _pictures(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the different pictures of pipelines, each with the names of its runs."""
    names: dict[str, list[str]] = {}
    for run in runs:
        if svg := pipeline_svg(run):
            names.setdefault(svg, []).append(run.name)
    return [(", ".join(each), svg) for svg, each in names.items()]
