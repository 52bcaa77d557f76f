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
MOST_METRICS = 60
"""Largest number of metrics of a run; a file of another program may have any names."""
SMOOTHED = ("reduced_train_loss", "gradient_norm")  # metrics with a moving average
LOSS, SPEED, MFU = "reduced_train_loss", "tokens_per_second", "mfu"
STEP_TIME, MEMORY = "step_time_s", "peak_memory_bytes"
VALIDATION = ("val_loss", "val_token_accuracy")
AXES = ("step", "consumed_tokens", "consumed_samples", "global_step")
"""Metrics that are positions, and have no chart."""


class Curve:
    """Metrics over ascending steps in at most ``limit`` buckets of equal width, a power of two.

    A bucket has the mean, the smallest and the largest value of its steps, so that a spike of one step stays visible in
    a run of any length.
    """

    def __init__(
        self, steps: Sequence[int], tokens: Sequence[int | None], columns: Mapping[str, Floats], limit: int = LIMIT
    ) -> None:
        """Divide the steps into buckets.

        Args:
            steps: Ascending steps. [n]
            tokens: Tokens consumed after each step; None if unknown. [n]
            columns: Values of each metric; NaN without a value. [n]
        """
        self.width = 1
        """Steps of a bucket."""
        offsets = np.array(steps, dtype=np.float64) - (steps[0] if steps else 0)
        while len(starts := np.flatnonzero(np.diff(offsets // float(self.width), prepend=-1.0)).tolist()) > limit:
            self.width *= 2
        ends = [start - 1 for start in [*starts[1:], len(steps)]] if steps else []
        self.first, self.last = [steps[index] for index in starts], [steps[index] for index in ends]
        """First and last step of each bucket."""
        self.tokens = [tokens[index] for index in ends]
        """Tokens consumed after each bucket."""
        self._values = {name: _buckets(values, starts) for name, values in columns.items()}

    @property
    def names(self) -> list[str]:
        """Metrics with a value."""
        return list(self._values)

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
            curves[name] = {  # six significant digits, for a short page
                kind: [None if value is None else float(f"{value:.6g}") for value in values]
                for kind, values in series.items()
            }
        return {"first": self.first, "step": self.last, "tokens": self.tokens, "series": curves}


def _buckets(values: Floats, starts: Sequence[int]) -> Floats:
    """Return count, sum, minimum and maximum of the known values in each bucket, [4, buckets]."""
    known = np.isfinite(values)
    rows = ((np.add, known.astype(np.float64)), (np.add, np.where(known, values, 0.0)))
    return np.stack([ufunc.reduceat(row, starts) for ufunc, row in (*rows, (np.fmin, values), (np.fmax, values))])


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the moving average over SMOOTHING of the values, at the middle of its window; None at both ends."""
    half = round(SMOOTHING * len(values)) // 2
    if not half:
        return list(values)
    means = moving_average([math.nan if value is None else value for value in values], 2 * half + 1)
    edge: list[float | None] = [None] * half
    return [*edge, *(None if math.isnan(mean) else mean for mean in means.tolist()), *edge]


@dataclass
class Metrics:
    """Curves and totals of a metrics.jsonl."""

    steps: Curve = field(default_factory=lambda: Curve([], [], {}))
    """All metrics except VALIDATION."""
    validations: Curve = field(default_factory=lambda: Curve([], [], {}))
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
    """Read the metrics.jsonl of a run folder. Raises OSError."""
    metrics, broken, repeated = Metrics(), Broken(), 0
    steps, tokens, lists = list[int](), list[int | None](), dict[str, "array[float]"]()
    for record, _ in stream_records(folder / METRICS_FILE, broken):
        step, consumed = record["step"], record.get("consumed_tokens", math.nan)
        if not (math.isfinite(step) and (not metrics.last or step > metrics.last["step"])):
            repeated += 1
            continue
        metrics.last = record
        if is_number(validation := record.get(VALIDATION[0])):
            metrics.logged_validation = validation
        for name, value in record.items():
            if name not in AXES and _is_finite(value) and (name in lists or len(lists) < MOST_METRICS):
                _extend(lists.setdefault(name, array("d")), len(steps)).append(value)
        steps.append(int(step))
        tokens.append(int(consumed) if _is_finite(consumed) else None)
    columns = {name: np.array(_extend(values, len(steps))) for name, values in lists.items()}
    _set_totals(metrics, steps, columns)
    impossible = int((columns.get(MFU, np.empty(0)) > 1).sum())
    if impossible:  # then the other values are too high too
        metrics.median_mfu = None
        columns = {name: values for name, values in columns.items() if name not in (MFU, "mfu_full")}
    losses = columns.get(LOSS, np.full(len(steps), np.nan))
    unknown_losses = int((np.isnan(losses) & (np.array(steps, dtype=np.float64) > 0)).sum())
    metrics.notes = _notes(broken, repeated, unknown_losses, impossible)
    of_validation = {name: values for name, values in columns.items() if name.partition("/")[0] in VALIDATION}
    metrics.steps = Curve(steps, tokens, {name: columns[name] for name in columns if name not in of_validation})
    if of_validation:
        rows = np.flatnonzero(np.isfinite(list(of_validation.values())).any(axis=0)).tolist()
        chosen = [steps[row] for row in rows], [tokens[row] for row in rows]
        metrics.validations = Curve(*chosen, {name: values[rows] for name, values in of_validation.items()})
    return metrics


def _extend(values: array[float], length: int) -> array[float]:
    """Extend the values of a metric to ``length`` steps, with NaN for steps without it."""
    values.extend([math.nan] * (length - len(values)))
    return values


def _set_totals(metrics: Metrics, steps: Sequence[int], columns: Mapping[str, Floats]) -> None:
    def known(name: str) -> Floats:
        values = columns.get(name, np.empty(0))
        return values[np.isfinite(values)]

    metrics.seconds = float(known(STEP_TIME).sum())
    if len(losses := known(LOSS)):
        metrics.first_loss = float(losses[0])
    if len(memory := known(MEMORY)):
        metrics.peak_memory = float(memory.max())
    if len(speeds := known(SPEED)):
        metrics.median_speed = float(np.median(speeds))
    if len(utilizations := known(MFU)):
        metrics.median_mfu = float(np.median(utilizations))
    if len(validation := known(VALIDATION[0])):
        best = steps[int(np.nanargmin(columns[VALIDATION[0]]))]
        metrics.last_validation, metrics.best_validation = float(validation[-1]), (float(validation.min()), best)


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
