"""Curves of a run from its metrics.jsonl, in at most ``LIMIT`` buckets of steps, and the totals of the run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.system.tables import plural
from megatron_llama.train.loss_curve import SMOOTHING, Floats, moving_average
from megatron_llama.train.metrics_file import METRICS_FILE, Broken, stream_records

LIMIT = 1000
"""Largest number of buckets of a curve."""
BLOCK = 1024
"""Records that are read before they are added to the curves."""
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


class Curve:
    """Metrics over ascending steps in at most ``limit`` buckets of equal width, a power of two.

    A bucket has the mean, the smallest and the largest value of its steps, so that a spike of one step stays visible in
    a run of any length.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.width = 1
        """Steps of a bucket."""
        self.first, self.last = list[int](), list[int]()
        """First and last step of each bucket."""
        self.tokens = list[int | None]()
        """Tokens consumed after each bucket."""
        self._limit, self._values = limit, dict[str, Floats]()

    @property
    def names(self) -> list[str]:
        """Metrics with a value."""
        return list(self._values)

    def add(self, steps: Sequence[int], tokens: Sequence[int | None], columns: Mapping[str, Floats]) -> None:
        """Add at least one step, above the last one.

        Args:
            steps: Ascending steps. [n]
            tokens: Tokens consumed after each step; None if unknown. [n]
            columns: Values of each metric; NaN without a value. [n]
        """
        first, last, all_tokens = [*self.first, *steps], [*self.last, *steps], [*self.tokens, *tokens]
        offsets = np.array(first, dtype=np.float64) - first[0]
        while len(starts := np.flatnonzero(np.diff(offsets // float(self.width), prepend=-1.0)).tolist()) > self._limit:
            self.width *= 2
        for name in [*self._values, *(name for name in columns if name not in self._values)]:
            before = self._values.get(name, _single(np.full(len(self.last), np.nan)))
            rows = np.hstack([before, _single(columns.get(name, np.full(len(steps), np.nan)))])
            merge = (np.add, np.add, np.fmin, np.fmax)
            self._values[name] = np.stack([ufunc.reduceat(row, starts) for ufunc, row in zip(merge, rows, strict=True)])
        ends = [start - 1 for start in [*starts[1:], len(first)]]
        self.first, self.last = [first[index] for index in starts], [last[index] for index in ends]
        self.tokens = [all_tokens[index] for index in ends]

    def remove(self, name: str) -> None:
        """Remove a metric, if the curve has it."""
        self._values.pop(name, None)

    def column(self, name: str, number: int) -> list[float | None]:
        """Return number 1 (mean), 2 (smallest) or 3 (largest) of each bucket's values; None without a value."""
        counts, sums, low, high = self._values[name]
        values = (sums / np.where(counts > 0, counts, np.nan), low, high)[number - 1]
        return [None if math.isnan(value) else value for value in values.tolist()]

    def mean(self, name: str, first: int, last: int) -> float | None:
        """Return the mean over the buckets that overlap the steps ``first`` to ``last``; None without a value."""
        inside = [index for index, step in enumerate(self.last) if step >= first and self.first[index] <= last]
        if name not in self._values or not inside:
            return None
        count, total = self._values[name][:2, inside].sum(axis=1).tolist()
        return total / count if count else None

    def payload(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the curve of ``names`` as JSON: positions, and mean, smallest and largest values by metric.

        Buckets of one step have no smallest and largest values.
        """
        curves: dict[str, Any] = {}
        for name in names:
            mean, low, high = (self.column(name, number) for number in (1, 2, 3))
            series = {"mean": mean} | ({"low": low, "high": high} if self.width > 1 else {})
            if name in SMOOTHED:
                series["smooth"] = smoothed(mean)
            curves[name] = {kind: [_short(value) for value in values] for kind, values in series.items()}
        return {"first": self.first, "step": self.last, "tokens": self.tokens, "series": curves}


def _single(values: Floats) -> Floats:
    """Return count, sum, minimum and maximum of each value as a bucket of one step, [4, n]."""
    known = np.isfinite(values)
    return np.stack([known, np.where(known, values, 0.0), values, values])


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the moving average over SMOOTHING of the values, at the middle of its window; None at both ends."""
    half = round(SMOOTHING * len(values)) // 2
    if not half:
        return list(values)
    means = moving_average([math.nan if value is None else value for value in values], 2 * half + 1)
    edge: list[float | None] = [None] * half
    return [*edge, *(None if math.isnan(mean) else mean for mean in means.tolist()), *edge]


def _short(value: float | None) -> float | None:
    """Return the value with six significant digits, for a short page."""
    return None if value is None else float(f"{value:.6g}")


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
    """Last finite validation loss."""
    logged_validation: float | None = None
    """Last validation loss; NaN after a divergence."""
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
    """Read the metrics.jsonl of a run folder, in constant memory except for two values per step. Raises OSError."""
    broken: Broken = []
    reader, metrics = _Reader(), Metrics()
    repeated, block = 0, list[dict[str, Any]]()
    for record, _ in stream_records(folder / METRICS_FILE, broken):
        step = record["step"]
        if not (math.isfinite(step) and (not metrics.last or step > metrics.last["step"])):
            repeated += 1
            continue
        metrics.last = record
        if is_number(validation := record.get(VALIDATION[0])):
            metrics.logged_validation = validation
        block.append(record)
        if len(block) == BLOCK:
            reader.add(metrics, block)
            block = []
    if block:
        reader.add(metrics, block)
    impossible = sum(value > 1 for value in reader.utilizations)
    if impossible:  # then the other values are too high too
        metrics.steps.remove(MFU)
        metrics.steps.remove("mfu_full")
    elif reader.utilizations:
        metrics.median_mfu = float(np.median(reader.utilizations))
    metrics.median_speed = float(np.median(reader.speeds)) if reader.speeds else None
    metrics.notes = _notes(broken, repeated, reader.unknown_losses, impossible)
    return metrics


class _Reader:
    """Adds blocks of records to metrics."""

    def __init__(self) -> None:
        self.speeds, self.utilizations = array("d"), array("d")
        self.unknown_losses = 0
        self._names = set[str]()

    def add(self, metrics: Metrics, block: Sequence[Mapping[str, Any]]) -> None:
        """Add records with ascending steps."""
        columns, steps = self._columns(block), [int(record["step"]) for record in block]
        consumed = [record.get("consumed_tokens") for record in block]
        tokens = [int(count) if count is not None and _is_finite(count) else None for count in consumed]

        def known(name: str) -> Floats:
            values = columns.get(name, np.empty(0))
            return values[np.isfinite(values)]

        self.speeds.extend(known(SPEED))
        self.utilizations.extend(known(MFU))
        unlogged = np.isnan(columns.get(LOSS, np.full(len(steps), np.nan)))
        self.unknown_losses += int((unlogged & (np.array(steps, dtype=np.float64) > 0)).sum())
        losses, validation, memory = known(LOSS), known(VALIDATION[0]), known(MEMORY)
        metrics.seconds += float(known(STEP_TIME).sum())
        if metrics.first_loss is None and len(losses):
            metrics.first_loss = float(losses[0])
        if len(memory):
            metrics.peak_memory = max(metrics.peak_memory or 0.0, float(memory.max()))
        if len(validation):
            metrics.last_validation, lowest = float(validation[-1]), float(validation.min())
            if metrics.best_validation is None or lowest < metrics.best_validation[0]:
                metrics.best_validation = lowest, steps[int(np.nanargmin(columns[VALIDATION[0]]))]
        of_validation = {name: values for name, values in columns.items() if name.partition("/")[0] in VALIDATION}
        metrics.steps.add(steps, tokens, {name: columns[name] for name in columns if name not in of_validation})
        if of_validation:
            rows = np.flatnonzero(np.isfinite(list(of_validation.values())).any(axis=0)).tolist()
            chosen = [steps[row] for row in rows], [tokens[row] for row in rows]
            metrics.validations.add(*chosen, {name: values[rows] for name, values in of_validation.items()})

    def _columns(self, block: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
        """Return the finite values of each metric, NaN without a value, for at most MOST_METRICS in all blocks."""
        columns = dict[str, Floats]()
        for row, record in enumerate(block):
            for name, value in record.items():
                if name in AXES or not _is_finite(value):
                    continue
                if name not in columns:
                    if name not in self._names and len(self._names) == MOST_METRICS:
                        continue
                    self._names.add(name)
                    columns[name] = np.full(len(block), np.nan)
                columns[name][row] = value
        return columns


def is_number(value: object) -> bool:
    """Return whether a value of a record is a number, perhaps NaN or infinite."""
    return type(value) in (int, float)


def _is_finite(value: object) -> bool:
    return is_number(value) and -1e300 < value < 1e300  # type: ignore[operator]


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
