"""Predicted beside published, for every row of a table: ``scripts/plan.py --published FILE.csv``."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.system.tables import GIB, gib, text_table
from megatron_llama.tools.forecast.step_time import load_constants, step_time
from megatron_llama.tools.plan.forecast_page import CannotPredict, read_table
from megatron_llama.tools.plan.published import (
    DO_NOT_FIT,
    Published,
    flops_per_token,
    predicted_memory,
    read_run,
)

UNSTATED = "(not stated)"
LEAST_MFU = 0.01


@dataclass(frozen=True)
class ComparedRun:
    """One row's numbers."""

    run: Published
    seconds: float
    memory: float

    @property
    def time_error(self) -> float | None:
        """(predicted - published) / published step time."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """(predicted - published) / published peak memory."""
        return None if self.run.memory is None else self.memory / self.run.memory - 1

    def utilisation(self, seconds: float) -> float:
        """MFU of a step of ``seconds``, causal attention counted, among the tokens that see each other."""
        job = self.run.job
        flops = job.tokens_per_step * flops_per_token(replace(job, seq=job.document or job.seq), 6)
        return flops / seconds / (job.ranks * self.run.device.peak(job.format))

    def doubts(self) -> Iterator[str]:
        """Why the row or its prediction may be wrong: what no machine does, or nobody would publish."""
        if self.run.seconds is not None and self.utilisation(self.run.seconds) > 1:
            yield "published faster than the devices' peak"
        if not LEAST_MFU <= self.utilisation(self.seconds) <= 1:
            yield f"predicted to use {self.utilisation(self.seconds):.2%} of the peak"
        if self.memory > self.run.device.memory_bytes:
            yield f"predicted to need {gib(round(self.memory))}, and a rank has {gib(self.run.device.memory_bytes)}"

    def of(self, column: str) -> str:
        """The row's text in a column."""
        return self.run.row.get(column) or UNSTATED


def compare_table(
    rows: Iterable[Mapping[str, str]], constants: Mapping[str, float] | None = None
) -> tuple[list[ComparedRun], Counter[str]]:
    """What is predicted for each row, and the reasons of those for which nothing is."""
    known, found, unspoken = constants or load_constants(), [], Counter[str]()
    for row in rows:
        try:
            run = read_run(row)
        except CannotPredict as reason:
            unspoken[str(reason)] += 1
            continue
        try:
            predicted = step_time(run.job, run.device, known).total, predicted_memory(run)
        except ArithmeticError:  # a side of a matrix that is cut to nothing
            unspoken[DO_NOT_FIT] += 1
            continue
        found.append(ComparedRun(run, *predicted))
        if run.seconds is None and run.memory is None:
            unspoken["predicted, but the row has no time or memory that can be compared"] += 1
    return found, unspoken


def summary(errors: Sequence[float]) -> dict[str, float | int]:
    """Count, mean and 90th percentile of the errors' sizes, and their mean with signs."""
    sizes = sorted(map(abs, errors))
    ninetieth = sizes[max(0, -(-9 * len(sizes) // 10) - 1)]
    return {
        "rows": len(sizes),
        "mean": statistics.fmean(sizes),
        "percentile_90": ninetieth,
        "bias": statistics.fmean(errors),
    }


Error = Callable[[ComparedRun], "float | None"]
QUANTITIES: dict[str, Error] = {"step time": lambda row: row.time_error, "memory": lambda row: row.memory_error}


def summaries(found: Sequence[ComparedRun], key: Callable[[ComparedRun], str]) -> dict[str, dict[str, Any]]:
    """Summaries by quantity and by what ``key`` says of a row."""
    result: dict[str, dict[str, Any]] = {}
    for quantity, error in QUANTITIES.items():
        groups: dict[str, list[float]] = {}
        for row in found:
            size = error(row)
            if size is not None:
                groups.setdefault(key(row), []).append(size)
        result[quantity] = {name: summary(errors) for name, errors in groups.items()}
    return result


def source_of(row: Mapping[str, str]) -> str:
    """A row's source without what points into it: the paper, or the repository and its version."""
    return re.split(r" \(|:|;| \[", row.get("source", ""))[0].strip() or UNSTATED


def as_json(found: Sequence[ComparedRun], unspoken: Mapping[str, int]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "rows": [
            {
                "id": row.of("id"),
                "source": row.of("source"),
                "model": row.of("model"),
                "device": row.of("device"),
                "confidence": row.of("confidence"),
                "step_time_s": {"published": row.run.seconds, "predicted": row.seconds, "error": row.time_error},
                "memory_bytes": {"published": row.run.memory, "predicted": row.memory, "error": row.memory_error},
                "program": row.run.job.program.name,
                "assumed": list(row.run.assumed),
                "doubts": list(row.doubts()),
            }
            for row in found
        ],
        "not_predicted_or_compared": dict(unspoken),
        "errors": {
            "by confidence": summaries(found, lambda row: row.of("confidence")),
            "by source": summaries(found, lambda row: source_of(row.run.row)),
            "by device": summaries(found, lambda row: row.of("device")),
        },
    }


def lines(found: Sequence[ComparedRun], unspoken: Mapping[str, int]) -> Iterator[str]:
    """The tables as text: every row, then errors by source, device and confidence."""
    numbers = ("published", "predicted", "error", "GiB", "predicted", "error")
    head = ("id", "model", "device", "devices", "layout", *numbers)
    yield from text_table([head, *map(_cells, found)], left=5)
    for title, key in (
        ("by source and confidence", lambda row: f"{source_of(row.run.row)} · {row.of('confidence')}"),
        ("by device", lambda row: row.of("device")),
        ("by confidence", lambda row: row.of("confidence")),
    ):
        yield ""
        rows: list[tuple[str, ...]] = [("mean absolute error " + title, "", "rows", "mean", "90th percentile", "bias")]
        for quantity, groups in summaries(found, key).items():
            for name, errors in groups.items():
                shares = (f"{100 * errors[part]:.1f} %" for part in ("mean", "percentile_90", "bias"))
                rows.append((name, quantity, str(errors["rows"]), *shares))
        yield from text_table(rows, left=2)
    doubtful = [f"  {row.of('id')}  {'; '.join(doubts)}" for row in found if (doubts := list(row.doubts()))]
    if doubtful:
        yield from ("", "rows whose numbers are to be doubted, published or predicted", *doubtful)
    if unspoken:
        yield ""
        yield "rows that are not predicted, or have nothing to compare"
        yield from (f"  {count:4d}  {reason}" for reason, count in sorted(unspoken.items()))


def _cells(row: ComparedRun) -> tuple[str, ...]:
    job, run = row.run.job, row.run
    sizes = {"tp": job.tp, "pp": job.pp, "v": job.vpp, "cp": job.cp, "dp": job.dp}
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"
    seconds = f"{run.seconds:.4g} s" if run.seconds else ""
    memory = f"{run.memory / GIB:.1f}" if run.memory else ""
    return (
        row.of("id"),
        row.of("model"),
        row.of("device"),
        row.of("n_devices"),
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
    """``compare_table`` of a file."""
    return compare_table(read_table(path))
