"""Fits the planner's constants to published step times, and judges them on rows that the fit has not seen.

    python -m benchmarks fit_planner FILE.csv ...            fits, and prints the errors on held-out rows
    python -m benchmarks fit_planner FILE.csv ... --write    and writes megatron_llama/tools/forecast/constants.json

The constants are few: one share of the peak for each chip and number format, one for each kind of attention kernel,
and what kinds of kernels, networks and hosts cost. None belongs to a row, a model or a release of a framework. Each
stays between physical bounds and is drawn towards a value that was chosen before the fit. Rows of high confidence count
fully, of medium less, those of a sweep over one machine's layouts little, of low not at all. Held out is each fifth of
the rows in turn, while the other four are fitted, and then each source in turn, which says what to expect of pages that
nobody has read; what is written is fitted to all of them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.system.tables import text_table
from megatron_llama.tools.forecast.step_time import CONSTANTS_FILE, step_time
from megatron_llama.tools.plan.compare_published import source_of, summary
from megatron_llama.tools.plan.forecast_page import CannotPredict, read_table
from megatron_llama.tools.plan.published import Published, read_run

FOLDS = 5
WEIGHTS = {"high": 1.0, "medium": 0.25, "sweep": 0.05}
BEND = 0.05  # errors below count by their square, larger ones by their size: a wild row must not decide
ITERATIONS = 5  # from the constants of all rows on, those of most of them are near
PULL = 0.02  # towards the values that were chosen before the fit
SHARE = "share of the peak that large matrix products reach, "
ATTENTION = "share of the peak that attention reaches, "
PASSES = "bytes moved between products, as multiples of the least, "
HIDDEN = "share of the communication that is not hidden, "
SPECIFICATION = {
    # name: (start, least, most, meaning)
    "matmul": (0.9, 0.6, 1.1, "of what a benchmark of large products reaches, on chips without a share of their own"),
    "matmul.a100.bf16": (0.80, 0.4, 0.95, SHARE + "A100"),
    "matmul.h100.bf16": (0.70, 0.4, 0.95, SHARE + "H100 and H200"),
    "matmul.h100.fp8": (0.60, 0.3, 0.95, SHARE + "H100 and H200"),
    "matmul.h100-500w.bf16": (0.60, 0.3, 0.95, SHARE + "H100 held to 500 W"),
    "matmul.h100-500w.fp8": (0.50, 0.2, 0.95, SHARE + "H100 held to 500 W"),
    "matmul.blackwell.bf16": (0.72, 0.4, 0.95, SHARE + "B200 and GB200"),
    "matmul.blackwell.fp8": (0.60, 0.3, 0.95, SHARE + "B200 and GB200"),
    "matmul.blackwell.fp4": (0.45, 0.2, 0.95, SHARE + "B200 and GB200"),
    "matmul.blackwell-ultra.fp8": (0.65, 0.3, 0.95, SHARE + "B300 and GB300"),
    "matmul.trn1.bf16": (0.60, 0.2, 0.95, SHARE + "Trainium 1"),
    "matmul.gaudi2.fp8": (0.80, 0.3, 0.97, SHARE + "Gaudi 2"),
    "matmul.mi300x.bf16": (0.50, 0.2, 0.90, SHARE + "MI300X and MI325X"),
    "matmul.mi300x.fp8": (0.50, 0.2, 0.90, SHARE + "MI300X and MI325X"),
    "tile.bf16": (80, 16, 300, "rows, columns or depth of a product that are lost to starting and ending"),
    "tile.fp8": (150, 16, 500, "the same in fp8 and fp4"),
    "attention.flash": (0.35, 0.1, 0.8, ATTENTION + "FlashAttention 2"),
    "attention.flash 1": (0.30, 0.1, 0.8, ATTENTION + "the first FlashAttention"),
    "attention.tuned": (0.50, 0.1, 0.8, ATTENTION + "kernels made for the device"),
    "attention.a100.flash 1": (0.36, 0.2, 0.8, ATTENTION + "the first FlashAttention on A100"),
    "attention.h100.flash 1": (0.20, 0.1, 0.8, ATTENTION + "the first FlashAttention on H100"),
    "attention.h100.tuned": (0.50, 0.2, 0.8, ATTENTION + "cuDNN or FlashAttention 3 on H100"),
    "attention.blackwell.tuned": (0.50, 0.2, 0.8, ATTENTION + "cuDNN on B200 and GB200"),
    "tile.attention": (200, 20, 1000, "tokens of a sequence that attention loses to starting and ending"),
    "tile.head": (10, 1, 100, "width of a head that attention loses to its softmax"),
    "passes.eager": (3.0, 1.0, 6.0, PASSES + "a kernel for each operation"),
    "passes.compiled": (1.2, 0.7, 3.0, PASSES + "torch.compile"),
    "passes.fused": (1.0, 0.7, 3.0, PASSES + "fused by hand"),
    "passes.scores": (8.0, 3.0, 15.0, "times that the square of attention scores is read or written"),
    "passes.loss": (3.0, 1.0, 10.0, PASSES + "a loss of a kernel for each operation"),
    "passes.per tensor": (1.0, 0.2, 5.0, PASSES + "casts to fp8 with a scale for a tensor"),
    "passes.per row": (3.0, 0.2, 20.0, PASSES + "casts to fp8 with a scale for a row"),
    "passes.per block": (1.3, 0.2, 5.0, PASSES + "casts to fp8 and fp4 with a scale for a block"),
    "host.operation": (2e-5, 5e-6, 5e-5, "seconds that a host takes to start a kernel; those of A100"),
    "gap.eager": (4e-6, 5e-7, 8e-6, "seconds that a kernel takes of the device besides its work: start and end"),
    "gap.compiled": (3e-6, 5e-7, 6e-6, "the same under torch.compile"),
    "gap.fused": (3e-6, 5e-7, 6e-6, "the same, fused by hand"),
    "launch.step": (0.01, 0.002, 0.05, "seconds that the host takes once a step"),
    "network.share": (0.7, 0.4, 1.0, "share of the network cards' speed that collectives reach"),
    "latency.node": (3e-5, 1e-5, 1e-4, "seconds that a collective takes to start inside a node"),
    "latency.network": (6e-5, 2e-5, 5e-4, "seconds that a collective takes to start over the network"),
    "exposed.tp": (0.9, 0.4, 1.0, HIDDEN + "tensor parallelism"),
    "exposed.tp overlapped": (0.4, 0.05, 1.0, HIDDEN + "tensor parallelism cut in pieces"),
    "exposed.cp": (0.2, 0.02, 1.0, HIDDEN + "context parallelism"),
    "exposed.pp": (0.7, 0.1, 1.0, HIDDEN + "between pipeline stages"),
    "exposed.dp": (0.15, 0.02, 1.0, HIDDEN + "data parallelism"),
    "waiting": (0.004, 0.0005, 0.03, "share of a step lost to the slowest, for each doubling of the nodes"),
}
NAMES = tuple(SPECIFICATION)
Vector = np.ndarray[Any, np.dtype[np.float64]]


def named(logs: Vector) -> dict[str, float]:
    """The constants of a vector of their logarithms."""
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))


def log_errors(runs: Sequence[Published], constants: Mapping[str, float]) -> Vector:
    """log(predicted / published) of each row's step time."""
    return np.array([math.log(step_time(run.job, run.device, constants).total / run.seconds) for run in runs])  # type: ignore[operator]


class _Read(dict[str, float]):
    """Constants that know which of them were asked for."""

    def __init__(self, constants: Mapping[str, float]) -> None:
        super().__init__(constants)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The constant, if there is one."""
        return self[name] if name in self else default


def rows_by_constant(runs: Sequence[Published]) -> list[Vector]:
    """For each constant, the numbers of the rows whose step time asks for it: the others do not move with it."""
    start, reads = named(np.log([SPECIFICATION[name][0] for name in NAMES])), []
    for run in runs:
        constants = _Read(start)
        step_time(run.job, run.device, constants)
        reads.append(constants.names)
    return [np.array([row for row, names in enumerate(reads) if name in names], dtype=np.intp) for name in NAMES]


def fit(runs: Sequence[Published], begin: Mapping[str, float] | None = None, iterations: int = 12) -> dict[str, float]:
    """The constants with the least weighted error: Gauss and Newton's steps from ``begin`` on, or from what was chosen
    before, each damped until it helps."""
    start, low, high = (np.log([SPECIFICATION[name][column] for name in NAMES]) for column in (0, 1, 2))
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
            tried = np.clip(logs - np.clip(np.linalg.solve(damped, gradient), -0.5, 0.5), low, high)
            found = log_errors(runs, named(tried))
            if cost(found, tried) < best:
                logs, errors, best, damping = tried, found, cost(found, tried), damping / 3
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    return named(logs)


def usable(rows: Iterable[Mapping[str, str]]) -> list[Published]:
    """The rows that have a step time, and a confidence that counts."""
    found = []
    for row in rows:
        try:
            run = read_run(row)
        except CannotPredict:
            continue
        if run.seconds is not None and row.get("confidence") in WEIGHTS:
            found.append(run)
    return found


def fold_of(run: Published) -> int:
    """The fifth in which a row is held out: by its number, so that it never changes."""
    return int.from_bytes(hashlib.sha256(run.row["id"].encode()).digest()[:4], "big") % FOLDS


def held_out_errors(runs: Sequence[Published], constants: Mapping[str, float]) -> dict[str, list[float]]:
    """By confidence: (predicted - published) / published of each row, by constants fitted without its fifth, from
    ``constants``, those of all rows, on."""
    errors: dict[str, list[float]] = {confidence: [] for confidence in WEIGHTS}
    for fold in range(FOLDS):
        judged = [run for run in runs if fold_of(run) == fold]
        without = fit([run for run in runs if fold_of(run) != fold], constants, ITERATIONS)
        for run, error in zip(judged, np.expm1(log_errors(judged, without)), strict=True):
            errors[run.row["confidence"]].append(float(error))
        print(f"fifth {fold + 1} of {FOLDS} judged", flush=True)
    return errors


def left_out_errors(runs: Sequence[Published], constants: Mapping[str, float]) -> dict[str, list[tuple[str, float]]]:
    """By source: (confidence, error) of each of its rows, by constants fitted without any of them, from ``constants``,
    those of all rows, on."""
    sources = sorted({source_of(run.row) for run in runs})
    errors = {}
    for number, source in enumerate(sources, 1):
        judged = [run for run in runs if source_of(run.row) == source]
        without = fit([run for run in runs if source_of(run.row) != source], constants, ITERATIONS)
        found = np.expm1(log_errors(judged, without)).tolist()
        errors[source] = [(run.row["confidence"], error) for run, error in zip(judged, found, strict=True)]
        print(f"source {number} of {len(sources)} judged: {source}", flush=True)
    return errors


def print_left_out(errors: Mapping[str, Sequence[tuple[str, float]]]) -> dict[str, dict[str, float]]:
    """Prints the table by source, the worst first; returns the summaries by confidence."""
    by_source = {source: summary([error for _, error in rows]) for source, rows in errors.items()}
    rows: list[tuple[str, ...]] = [("left out", "rows", "mean", "90th percentile", "bias")]
    for source, numbers in sorted(by_source.items(), key=lambda item: -item[1]["mean"]):
        shares = (f"{100 * numbers[part]:.1f} %" for part in ("mean", "percentile_90", "bias"))
        rows.append((source, str(numbers["rows"]), *shares))
    print("\n".join(text_table(rows, left=1)))
    by_confidence: dict[str, list[float]] = {}
    for confidence, error in (row for rows in errors.values() for row in rows):
        by_confidence.setdefault(confidence, []).append(error)
    return {name: rounded(summary(by_confidence[name])) for name in WEIGHTS if name in by_confidence}


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """Four digits are more than the data tell."""
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def _name_and_hash(table: Path) -> str:
    return f"{table.name} (sha256 {hashlib.sha256(table.read_bytes()).hexdigest()[:16]})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "tables", type=Path, nargs="+", help="published runs, with the columns that docs/guides/tools/planning.md lists"
    )
    parser.add_argument("--write", action="store_true", help="write constants.json")


def run(options: argparse.Namespace) -> int:
    """Fits, judges and writes; returns the exit status."""
    runs = usable(row for table in options.tables for row in read_table(table))
    constants = fit(runs)
    held_out = {name: rounded(summary(errors)) for name, errors in held_out_errors(runs, constants).items() if errors}
    fitted_errors = {
        name: rounded(summary(np.expm1(log_errors(part, constants)).tolist()))
        for name in WEIGHTS
        if (part := [run for run in runs if run.row["confidence"] == name])
    }
    left_out = print_left_out(left_out_errors(runs, constants))
    for name, value in constants.items():
        print(f"{name:30s} {SPECIFICATION[name][0]:10.4g} -> {value:10.4g}   {SPECIFICATION[name][3]}")
    for title, errors in (("held out", held_out), ("source left out", left_out), ("fitted", fitted_errors)):
        for name, numbers in errors.items():
            mean, most = numbers["mean"], numbers["percentile_90"]
            print(f"{title}, confidence {name}: mean {mean:.1%}, 90th percentile {most:.1%}")
    if options.write:
        page = {
            "date": datetime.date.today().isoformat(),
            "data": f"{len(runs)} step times of " + " and ".join(map(_name_and_hash, options.tables)),
            "script": "python -m benchmarks fit_planner",
            "held out, each fifth judged by the other four": held_out,
            "held out, each source judged by the others": left_out,
            "fitted": fitted_errors,
            "constants": {
                name: {"value": value, "meaning": SPECIFICATION[name][3]} for name, value in rounded(constants).items()
            },
        }
        CONSTANTS_FILE.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    return 0
