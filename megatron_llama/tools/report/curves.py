"""Curves of a run from its metrics.jsonl, in at most ``LIMIT`` buckets of steps, and the totals of the run.

The file is read line by line. A bucket has the mean, the smallest and the largest value of its steps, so that a spike
of one step stays visible in a run of any length.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from megatron_llama.system.tables import plural
from megatron_llama.train.loss_curve import SMOOTHING, moving_average
from megatron_llama.train.metrics_file import METRICS_FILE, Broken, stream_records

LIMIT = 1000
"""Largest number of buckets of a curve."""
MOST_METRICS = 60
"""Largest number of metrics of a run; a file of another program may have any names."""
SMOOTHED = ("reduced_train_loss", "gradient_norm")  # metrics with a moving average
LOSS, SPEED, MFU, STEP_TIME, MEMORY = (
    "reduced_train_loss",
    "tokens_per_second",
    "mfu",
    "step_time_s",
    "peak_memory_bytes",
)
VALIDATION = ("val_loss", "val_token_accuracy")
AXES = ("step", "consumed_tokens", "consumed_samples", "global_step")
"""Metrics that are positions, and have no chart."""


@dataclass
class Bucket:
    """Values of neighboring steps."""

    first: int
    """First step."""
    step: int
    """Last step."""
    tokens: int | None
    """Tokens consumed after the last step; None if unknown."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """By metric: count, sum, smallest and largest value."""

    def merge(self, later: Bucket) -> None:
        """Add the bucket of the following steps."""
        self.step, self.tokens = later.step, later.tokens
        for name, (count, total, low, high) in later.sums.items():
            known = self.sums.setdefault(name, [0, 0.0, low, high])
            known[0] += count
            known[1] += total
            if low < known[2]:
                known[2] = low
            if high > known[3]:
                known[3] = high


class Curve:
    """Metrics over ascending steps in at most ``limit`` buckets of equal width, which doubles if it must."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.buckets: list[Bucket] = []
        self.width = 1
        """Steps of a bucket."""
        self._limit, self._start = limit, 0

    def add(self, step: int, tokens: int | None, metrics: Mapping[str, float]) -> None:
        """Add the finite values of a step, above the last one."""
        if not self.buckets:
            self._start = step
        self._append(Bucket(step, step, tokens, {name: [1, value, value, value] for name, value in metrics.items()}))
        while len(self.buckets) > self._limit:
            self.width *= 2
            buckets, self.buckets = self.buckets, []
            for bucket in buckets:
                self._append(bucket)

    def _append(self, bucket: Bucket) -> None:
        """Add a bucket at the end, or to the last one if it has the same range."""
        last = self.buckets[-1] if self.buckets else None
        if last and (last.first - self._start) // self.width == (bucket.first - self._start) // self.width:
            last.merge(bucket)
        else:
            self.buckets.append(bucket)

    @property
    def names(self) -> list[str]:
        """Metrics with a value, in the order of the file."""
        return list(dict.fromkeys(name for bucket in self.buckets for name in bucket.sums))

    def column(self, name: str, number: int) -> list[float | None]:
        """Return number 1 (mean), 2 (smallest) or 3 (largest) of each bucket's values; None without a value."""
        values = (bucket.sums.get(name) for bucket in self.buckets)
        return [None if v is None else _short(v[1] / v[0] if number == 1 else v[number]) for v in values]

    def mean(self, name: str, first: int, last: int) -> float | None:
        """Return the mean over the buckets that overlap the steps ``first`` to ``last``; None without a value."""
        start = bisect_left(self.buckets, first, key=lambda bucket: bucket.step)
        inside = takewhile(lambda bucket: bucket.first <= last, islice(self.buckets, start, None))
        known = [bucket.sums[name] for bucket in inside if name in bucket.sums]
        return sum(total for _, total, *_ in known) / sum(count for count, *_ in known) if known else None

    def payload(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the curve of ``names`` as JSON: positions, and mean, smallest and largest values by metric.

        Buckets of one step have no smallest and largest values.
        """
        result: dict[str, Any] = {
            "first": [bucket.first for bucket in self.buckets],
            "step": [bucket.step for bucket in self.buckets],
            "tokens": [bucket.tokens for bucket in self.buckets],
            "series": {},
        }
        for name in names:
            series: dict[str, Any] = {"mean": self.column(name, 1)}
            if self.width > 1:
                series |= {"low": self.column(name, 2), "high": self.column(name, 3)}
            if name in SMOOTHED:
                series["smooth"] = smoothed(series["mean"])
            result["series"][name] = series
        return result


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the moving average over SMOOTHING of the values, at the middle of its window; None at both ends."""
    half = round(SMOOTHING * len(values)) // 2
    if not half:
        return list(values)
    means = moving_average([math.nan if value is None else value for value in values], 2 * half + 1)
    edge: list[float | None] = [None] * half
    return [*edge, *(None if math.isnan(mean) else _short(mean) for mean in means.tolist()), *edge]


def _short(value: float) -> float:
    """Return the value with six significant digits, for a short page."""
    return float(f"{value:.6g}")


@dataclass
class Metrics:
    """Curves and totals of a metrics.jsonl."""

    steps: Curve = field(default_factory=Curve)
    """All metrics except VALIDATION."""
    validations: Curve = field(default_factory=Curve)
    """VALIDATION, on steps that have it."""
    last: dict[str, Any] = field(default_factory=dict)
    """Last record."""
    first_loss: float | None = None
    last_validation: float | None = None
    best_validation: tuple[float, int] | None = None
    """Lowest validation loss and its step."""
    median_speed: float | None = None
    """Median tokens per second."""
    median_mfu: float | None = None
    seconds: float = 0.0
    """Sum of the steps' times."""
    peak_memory: float | None = None
    notes: list[str] = field(default_factory=list)
    """Faults of the file."""

    @property
    def count(self) -> int:
        """Number of the last step; 0 without a step."""
        return int(self.last.get("step", 0))


def read_run_metrics(folder: Path) -> Metrics:
    """Read the metrics.jsonl of a run folder. Raises OSError."""
    metrics = Metrics()
    broken: Broken = []
    speeds, utilizations = array("d"), array("d")
    repeated = unknown_losses = 0
    known: dict[str, None] = {}
    for record, _ in stream_records(folder / METRICS_FILE, broken):
        step = record["step"]
        if not (math.isfinite(step) and (not metrics.last or step > metrics.last["step"])):
            repeated += 1
            continue
        values = {name: float(value) for name, value in record.items() if _is_finite(value)}
        known |= dict.fromkeys(name for name in values if name not in AXES)
        if len(known) > MOST_METRICS:
            known = dict.fromkeys(list(known)[:MOST_METRICS])
        values = {name: value for name, value in values.items() if name in known}
        unknown_losses += LOSS not in values and step > 0
        _add_totals(metrics, int(step), values, speeds, utilizations)
        consumed = record.get("consumed_tokens")
        tokens = int(consumed) if consumed is not None and _is_finite(consumed) else None
        validated = {name: values.pop(name) for name in [*values] if name.partition("/")[0] in VALIDATION}
        metrics.steps.add(int(step), tokens, values)
        if validated:
            metrics.validations.add(int(step), tokens, validated)
        metrics.last = record
    metrics.median_speed = statistics.median(speeds) if speeds else None
    impossible = sum(value > 1 for value in utilizations)
    if impossible:  # then the other values are too high too
        for bucket in metrics.steps.buckets:
            bucket.sums = {name: sums for name, sums in bucket.sums.items() if name not in (MFU, "mfu_full")}
    else:
        metrics.median_mfu = statistics.median(utilizations) if utilizations else None
    metrics.notes += _notes(broken, repeated, unknown_losses, impossible)
    return metrics


def _add_totals(
    metrics: Metrics, step: int, values: Mapping[str, float], speeds: array[float], utilizations: array[float]
) -> None:
    if metrics.first_loss is None:
        metrics.first_loss = values.get(LOSS)
    if SPEED in values:
        speeds.append(values[SPEED])
    if MFU in values:
        utilizations.append(values[MFU])
    metrics.seconds += values.get(STEP_TIME, 0.0)
    if MEMORY in values:
        metrics.peak_memory = max(metrics.peak_memory or 0.0, values[MEMORY])
    loss = values.get(VALIDATION[0])
    if loss is not None:
        metrics.last_validation = loss
        if metrics.best_validation is None or loss < metrics.best_validation[0]:
            metrics.best_validation = loss, step


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def _notes(broken: Broken, repeated: int, unknown_losses: int, impossible: int) -> list[str]:
    notes = []
    if broken:
        number, reason = broken[0]
        lines = f"{len(broken):,} invalid {plural(len(broken), 'line')}"
        notes.append(f"{METRICS_FILE} has {lines}, omitted here; the first is line {number:,} ({reason})")
    if repeated:
        notes.append(f"{repeated:,} {plural(repeated, 'line')} of {METRICS_FILE} repeat an earlier step, omitted here")
    if unknown_losses:
        notes.append(f"{unknown_losses:,} {plural(unknown_losses, 'step')} without a finite loss")
    if impossible:
        above = f"{impossible:,} {plural(impossible, 'step')} above 100 %"
        cause = "the peak FLOP/s, measured at the start, are too low, as on a busy host"
        notes.append(f"MFU is unknown, with {above}: {cause}. device.peak_tflops=N sets the peak of a device")
    return notes
