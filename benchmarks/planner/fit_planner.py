"""Fit the planner's constants to published step times and cross-validate them.

    python -m benchmarks fit_planner FILE.csv ...            print errors
    python -m benchmarks fit_planner FILE.csv ... --write    also write constants

The constants are a share of the peak for each chip and dtype, a share for each kind of attention kernel, and costs of
kernels, networks and hosts. No constant belongs to a single row, model or framework release. Each has physical bounds
and is regularized towards a value that was chosen before the fit (constants.csv). Rows are weighted by confidence:
high, medium, sweep (layouts of one machine); rows of low confidence are ignored.

Two cross-validations are printed: five folds of rows, and leave-one-source-out. --write stores the constants fitted to
all rows in megatron_llama/tools/forecast/constants.json.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.programs import PublishedStep
from benchmarks.planner.published import source_of, summary
from benchmarks.planner.rows import CannotPredict, Published, read_run, read_table
from megatron_llama.system.tables import text_table
from megatron_llama.tools.forecast.step_time import CONSTANTS_FILE

FOLDS = 5
WEIGHTS = {"high": 1.0, "medium": 0.25, "sweep": 0.05}
BEND = 0.05  # Huber loss: quadratic below, linear above, so that outliers do not dominate
ITERATIONS = 5  # enough for a fold, which starts from the constants of all rows
PULL = 0.02  # weight of the regularization towards the start values
_LINES = Path(__file__).with_name("constants.csv").read_text(encoding="utf-8").splitlines()
SPECIFICATION = {row["name"]: row for row in csv.DictReader(_LINES)}
"""Start value, bounds and meaning of each constant."""
NAMES = tuple(SPECIFICATION)
Vector = np.ndarray[Any, np.dtype[np.float64]]


def logs_of(column: str) -> Vector:
    """Return the logarithms of a column of numbers of the specification."""
    return np.log([float(row[column]) for row in SPECIFICATION.values()])


def named(logs: Vector) -> dict[str, float]:
    """Return the constants by name from a vector of their logarithms."""
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))


def log_errors(runs: Sequence[Published], constants: Mapping[str, float]) -> Vector:
    """Return log(predicted / published) of each row's step time."""
    seconds = [PublishedStep(run.job, run.device, constants).step().total for run in runs]
    return np.array([math.log(each / (run.seconds or math.nan)) for each, run in zip(seconds, runs, strict=True)])


class _RecordingConstants(dict[str, float]):
    """Constants that record the names that were read."""

    def __init__(self, constants: Mapping[str, float]) -> None:
        super().__init__(constants)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the constant, or ``default``."""
        return self[name] if name in self else default


def rows_by_constant(runs: Sequence[Published]) -> list[Vector]:
    """Return, for each constant, the indices of the rows whose step time depends on it."""
    start, reads = named(logs_of("start")), []
    for run in runs:
        constants = _RecordingConstants(start)
        PublishedStep(run.job, run.device, constants).step()
        reads.append(constants.names)
    return [np.array([row for row, names in enumerate(reads) if name in names], dtype=np.intp) for name in NAMES]


def fit(runs: Sequence[Published], begin: Mapping[str, float] | None = None, iterations: int = 12) -> dict[str, float]:
    """Return the constants with the smallest weighted error, by damped Gauss-Newton steps (Levenberg-Marquardt).

    Args:
        begin: initial constants; default: the start values of SPECIFICATION.
    """
    start, low, high = map(logs_of, ("start", "minimum", "maximum"))
    weights = np.array([WEIGHTS[run.row["confidence"]] for run in runs])
    pull = 2 * PULL * len(runs) / 100

    def cost(errors: Vector, logs: Vector) -> float:
        size = np.abs(errors)
        bent = np.where(size < BEND, size * size / 2 / BEND, size - BEND / 2)
        return float((weights * bent).sum() + pull / 2 * ((logs - start) ** 2).sum())

    logs = start.copy() if begin is None else np.log([begin[name] for name in NAMES])
    damping = 1e-2
    errors, moving = log_errors(runs, named(logs)), rows_by_constant(runs)
    best = cost(errors, logs)
    for _ in range(iterations):
        slopes = np.zeros((len(runs), len(NAMES)))
        for column, rows in enumerate(moving):
            moved = logs.copy()
            moved[column] += 1e-3
            slopes[rows, column] = (log_errors([runs[row] for row in rows], named(moved)) - errors[rows]) / 1e-3
        scaled = weights / np.maximum(np.abs(errors), BEND)
        curvature = slopes.T @ (slopes * scaled[:, None])
        gradient = slopes.T @ (scaled * errors) + pull * (logs - start)
        before = best
        for _ in range(8):
            damped = curvature + np.diag(np.diag(curvature) * damping + pull + 1e-9)
            trial = np.clip(logs - np.clip(np.linalg.solve(damped, gradient), -0.5, 0.5), low, high)
            trial_errors = log_errors(runs, named(trial))
            if cost(trial_errors, trial) < best:
                logs, errors, best, damping = trial, trial_errors, cost(trial_errors, trial), damping / 3
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    return named(logs)


def usable(rows: Iterable[Mapping[str, str]]) -> list[Published]:
    """Return the rows with a step time and a confidence in WEIGHTS."""
    runs = []
    for row in rows:
        try:
            run = read_run(row)
        except CannotPredict:
            continue
        if run.seconds is not None and row.get("confidence") in WEIGHTS:
            runs.append(run)
    return runs


def fold_of(run: Published) -> int:
    """Return the fold in which a row is held out, by a hash of its id."""
    return int.from_bytes(hashlib.sha256(run.row["id"].encode()).digest()[:4], "big") % FOLDS


def held_out_errors(
    runs: Sequence[Published], constants: Mapping[str, float], group_of: Callable[[Published], Any]
) -> dict[Any, list[tuple[str, float]]]:
    """Return (confidence, relative error) of the rows by group, with constants fitted without that group.

    Args:
        constants: constants fitted to all rows, from which each fit starts.
    """
    groups = sorted({group_of(run) for run in runs})
    errors = {}
    for number, group in enumerate(groups, 1):
        judged = [run for run in runs if group_of(run) == group]
        without = fit([run for run in runs if group_of(run) != group], constants, ITERATIONS)
        relative = np.expm1(log_errors(judged, without)).tolist()
        errors[group] = [(run.row["confidence"], error) for run, error in zip(judged, relative, strict=True)]
        print(f"{number} of {len(groups)} done: {group}", flush=True)
    return errors


def by_confidence(errors: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Summarize (confidence, relative error) by confidence."""
    sizes: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    for confidence, error in errors:
        sizes[confidence].append(error)
    return {name: rounded(summary(each)) for name, each in sizes.items() if each}


def source_lines(errors: Mapping[str, Sequence[tuple[str, float]]]) -> list[str]:
    """Return the table of held-out sources, largest mean error first."""
    by_source = {source: summary([error for _, error in rows]) for source, rows in errors.items()}
    rows: list[tuple[str, ...]] = [("held-out source", "rows", "mean", "90th percentile", "bias")]
    for source, numbers in sorted(by_source.items(), key=lambda item: -item[1]["mean"]):
        shares = (f"{100 * numbers[part]:.1f} %" for part in ("mean", "percentile_90", "bias"))
        rows.append((source, str(numbers["rows"]), *shares))
    return text_table(rows, left=1)


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """Round to four significant digits."""
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "tables", type=Path, nargs="+", help="CSV files of published runs (columns: docs/guides/tools/planning.md)"
    )
    parser.add_argument("--write", action="store_true", help="write constants.json")


def run(options: argparse.Namespace) -> int:
    """Fit, cross-validate and write the constants; return the exit status."""
    runs = usable(row for table in options.tables for row in read_table(table))
    constants = fit(runs)
    held_out = by_confidence(chain(*held_out_errors(runs, constants, fold_of).values()))
    relative = np.expm1(log_errors(runs, constants)).tolist()
    fitted_errors = by_confidence(zip([run.row["confidence"] for run in runs], relative, strict=True))
    of_sources = held_out_errors(runs, constants, lambda run: source_of(run.row))
    print("\n".join(source_lines(of_sources)))
    by_source = by_confidence(chain(*of_sources.values()))
    for name, value in constants.items():
        row = SPECIFICATION[name]
        print(f"{name:30s} {float(row['start']):10.4g} -> {value:10.4g}   {row['meaning']}")
    for title, errors in (("held out", held_out), ("source held out", by_source), ("fitted", fitted_errors)):
        for name, numbers in errors.items():
            mean, most = numbers["mean"], numbers["percentile_90"]
            print(f"{title}, confidence {name}: mean {mean:.1%}, 90th percentile {most:.1%}")
    if options.write:
        tables = [f"{x.name} (sha256 {hashlib.sha256(x.read_bytes()).hexdigest()[:16]})" for x in options.tables]
        page = {
            "date": datetime.date.today().isoformat(),
            "data": f"{len(runs)} step times of " + " and ".join(tables),
            "script": "python -m benchmarks fit_planner",
            "held out, each fifth judged by the other four": held_out,
            "held out, each source judged by the others": by_source,
            "fitted": fitted_errors,
            "constants": {
                name: {"value": value, "meaning": SPECIFICATION[name]["meaning"]}
                for name, value in rounded(constants).items()
            },
        }
        CONSTANTS_FILE.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    return 0
