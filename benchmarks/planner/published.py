"""Predict each row of a table of published runs; print the errors by source and device.

    python -m benchmarks published runs.csv [--json]

Columns and notations: docs/guides/tools/planning.md. `python scripts/plan.py --published runs.csv` runs this command.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.planner import rows as planner_rows
from benchmarks.planner.programs import PublishedStep
from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.tables import GIB, gib, text_table
from megatron_llama.tools.forecast.step_time import load_constants

UNSTATED = "(not stated)"
LEAST_MFU = 0.01


@dataclass(frozen=True)
class ComparedRun:
    """Prediction for one published run."""

    run: planner_rows.Published
    seconds: float
    """Predicted seconds of a step."""
    memory: float
    """Predicted peak memory of a rank, bytes."""

    @property
    def time_error(self) -> float | None:
        """Relative error of the step time; None if it is not published."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory; None if it is not published."""
        return None if self.run.memory is None else self.memory / self.run.memory - 1

    def utilization(self, seconds: float) -> float:
        """Return the MFU of a step of ``seconds``, with causal attention inside documents."""
        job = self.run.job
        flops = job.tokens_per_step * planner_rows.flops_per_token(replace(job, seq=job.document or job.seq), 6)
        return flops / seconds / (job.ranks * self.run.device.peak(job.format))

    def doubts(self) -> Iterator[str]:
        """Yield the reasons why the row or its prediction may be wrong."""
        if self.run.seconds is not None and self.utilization(self.run.seconds) > 1:
            yield "published speed is above the peak"
        if not LEAST_MFU <= self.utilization(self.seconds) <= 1:
            yield f"predicted MFU is {self.utilization(self.seconds):.2%}"
        if self.memory > self.run.device.memory_bytes:
            yield f"predicted memory is {gib(round(self.memory))} of {gib(self.run.device.memory_bytes)}"

    def cell(self, column: str) -> str:
        """Return the text of a column."""
        return self.run.row.get(column) or UNSTATED


def compare_table(rows: Iterable[Mapping[str, str]]) -> tuple[list[ComparedRun], Counter[str]]:
    """Predict each row: (compared rows, number of skipped rows by reason)."""
    constants, compared, skipped = load_constants(), [], Counter[str]()
    for row in rows:
        try:
            run = planner_rows.read_run(row)
        except planner_rows.CannotPredict as reason:
            skipped[str(reason)] += 1
            continue
        try:
            predicted = PublishedStep(run.job, run.device, constants).step().total, planner_rows.predicted_memory(run)
        except ArithmeticError:  # tp leaves a matrix without rows
            skipped[planner_rows.DO_NOT_FIT] += 1
            continue
        compared.append(ComparedRun(run, *predicted))
        if run.seconds is None and run.memory is None:
            skipped["no published time or memory to compare"] += 1
    return compared, skipped


def summary(errors: Sequence[float]) -> dict[str, float | int]:
    """Summarize errors: number of rows, mean and 90th percentile of the absolute errors, and the signed mean."""
    sizes = sorted(map(abs, errors))
    ninetieth = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    return {"rows": len(sizes), "mean": fmean(sizes), "percentile_90": ninetieth, "bias": fmean(errors)}


Error = Callable[[ComparedRun], "float | None"]
QUANTITIES: dict[str, Error] = {"step time": lambda row: row.time_error, "memory": lambda row: row.memory_error}


def summaries(compared: Sequence[ComparedRun], key: Callable[[ComparedRun], str]) -> dict[str, dict[str, Any]]:
    """Summarize errors by quantity and by the group that ``key`` returns for a row."""
    result: dict[str, dict[str, Any]] = {}
    for quantity, error in QUANTITIES.items():
        groups: dict[str, list[float]] = {}
        for row in compared:
            size = error(row)
            if size is not None:
                groups.setdefault(key(row), []).append(size)
        result[quantity] = {name: summary(errors) for name, errors in groups.items()}
    return result


def source_of(row: Mapping[str, str]) -> str:
    """Return a row's paper, or repository and version, without the location inside it."""
    return re.split(r" \(|:|;| \[", row.get("source", ""))[0].strip() or UNSTATED


GROUPS: dict[str, Callable[[ComparedRun], str]] = {
    "by device": lambda row: row.cell("device"),
    "by confidence": lambda row: row.cell("confidence"),
    "by context-parallel ranks": lambda row: str(row.run.job.cp),
}
"""Group of a row, by the title of the errors."""


def as_json(compared: Sequence[ComparedRun], skipped: Mapping[str, int]) -> dict[str, Any]:
    """Return the comparison as JSON."""
    return {
        "rows": [
            {
                **{name: row.cell(name) for name in ("id", "source", "model", "device", "confidence")},
                "step_time_s": {"published": row.run.seconds, "predicted": row.seconds, "error": row.time_error},
                "memory_bytes": {"published": row.run.memory, "predicted": row.memory, "error": row.memory_error},
                "program": row.run.job.program.name,
                "assumed": list(row.run.assumed),
                "doubts": list(row.doubts()),
            }
            for row in compared
        ],
        "not_predicted_or_compared": dict(skipped),
        "errors": {
            title: summaries(compared, key)
            for title, key in {"by source": lambda row: source_of(row.run.row), **GROUPS}.items()
        },
    }


def lines(compared: Sequence[ComparedRun], skipped: Mapping[str, int]) -> Iterator[str]:
    """Yield the report: each row, then errors by source, device, confidence and context parallelism."""
    numbers = ("published", "predicted", "error", "GiB", "predicted", "error")
    head = ("id", "model", "device", "devices", "layout", *numbers)
    yield from text_table([head, *map(_cells, compared)], left=5)
    by_source = {"by source and confidence": lambda row: f"{source_of(row.run.row)} · {row.cell('confidence')}"}
    for title, key in (by_source | GROUPS).items():
        yield ""
        rows: list[tuple[str, ...]] = [("mean absolute error " + title, "", "rows", "mean", "90th percentile", "bias")]
        for quantity, groups in summaries(compared, key).items():
            for name, errors in groups.items():
                shares = (f"{100 * errors[part]:.1f} %" for part in ("mean", "percentile_90", "bias"))
                rows.append((name, quantity, str(errors["rows"]), *shares))
        yield from text_table(rows, left=2)
    doubtful = [f"  {row.cell('id')}  {'; '.join(doubts)}" for row in compared if (doubts := list(row.doubts()))]
    if doubtful:
        yield from ("", "implausible rows (published or predicted numbers)", *doubtful)
    if skipped:
        yield ""
        yield "skipped rows"
        yield from (f"  {count:4d}  {reason}" for reason, count in sorted(skipped.items()))


def _cells(row: ComparedRun) -> tuple[str, ...]:
    job, run = row.run.job, row.run
    sizes = {"tp": job.tp, "pp": job.pp, "v": job.vpp, "cp": job.cp, "dp": job.dp}
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"
    seconds = f"{run.seconds:.4g} s" if run.seconds else ""
    memory = f"{run.memory / GIB:.1f}" if run.memory else ""
    return (
        *map(row.cell, ("id", "model", "device", "n_devices")),
        layout,
        seconds,
        f"{row.seconds:.4g} s",
        _percent(row.time_error),
        memory,
        f"{row.memory / GIB:.1f}",
        _percent(row.memory_error),
    )


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def compare_file(path: Path) -> tuple[list[ComparedRun], Counter[str]]:
    """Compare the rows of a CSV file (``compare_table``)."""
    return compare_table(planner_rows.read_table(path))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("table", nargs="*", help="CSV file of published runs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the comparison; return the exit status. Raises ConfigError for a missing or unreadable file."""
    flag = "--published"
    if len(options.table) != 1 or not Path(options.table[0]).is_file():
        rule = "needs the path of one CSV file" if len(options.table) != 1 else "file not found"
        raise ConfigError([Problem(flag, " ".join(options.table) or None, rule, f"write {flag} runs.csv")])
    try:
        rows, skipped = compare_file(Path(options.table[0]))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        advice = "write a UTF-8 CSV file with the column names in its first line"
        raise ConfigError([Problem(flag, options.table[0], f"cannot be read: {error}", advice)]) from error
    text = json.dumps(as_json(rows, skipped), indent=1) if options.json else "\n".join(lines(rows, skipped))
    sys.stdout.write(text + "\n")
    return 0
