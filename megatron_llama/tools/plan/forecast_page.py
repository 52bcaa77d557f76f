"""A forecast as text and as JSON."""
from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_llama.plan.memory import USABLE
from megatron_llama.system.tables import GIB, gib, plural, short_count, text_table
from megatron_llama.tools.forecast import this_machine
from megatron_llama.tools.forecast.step_time import load_constants_file
from megatron_llama.tools.plan import forecast_run
from megatron_llama.tools.plan.forecast_run import Forecast

MOST_STAGES = 16
PARTS = {
    "matmul": "matrix products of the blocks",
    "head": "output head and loss",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "launch": "gaps between kernels, host",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "pipeline": "messages between stages",
    "bubble": "pipeline bubble",
    "data_parallel": "data parallelism",
    "offload": "offloading",
    "optimizer": "optimizer",
    "waiting": "waiting for the slowest node",
}


def report_lines(found: Forecast) -> Iterator[str]:
    """The whole page."""
    job, plan, cluster = found.job, found.plan, found.cluster
    yield f"{plan.model.name} on {found.devices} x {cluster.device} ({cluster.nodes} nodes), {job.ranks} ranks"
    grid = f"tp {job.tp} x pp {job.pp}{f' (x {job.vpp} virtual)' if job.vpp > 1 else ''} x dp {job.dp}, zero {job.zero}"
    batch = f"{job.num_microbatches} micro batches of {job.micro_batch} x {job.seq:,} tokens"
    yield f"{grid}{', sp' if job.sp else ''}, {plan.config.trainer.precision}, recompute {job.recompute}, {batch}"
    yield ""
    yield from _memory(found)
    yield ""
    yield from _time(found)
    yield ""
    yield from _run(found)
    yield ""
    yield from _scaling(found)
    yield ""
    yield "assumed"
    yield from (f"  {line}" for line in assumptions(found))
    yield from (f"  {note}" for note in plan.notes)


def _memory(found: Forecast) -> Iterator[str]:
    """One row a stage."""
    usable = USABLE * found.device.memory_bytes
    head = ("memory, GiB a rank", "weights", "gradients", "optimizer", "activations", "logits", "buffers", "peak", "")
    rows: list[tuple[str, ...]] = [head]
    order = list(range(len(found.stages)))
    shown = order if len(order) <= MOST_STAGES else [*order[: MOST_STAGES - 1], order[-1]]
    for stage in shown:
        each = found.stages[stage]
        states = (each.weights, each.gradients, each.optimizer)
        sizes = (*states, each.activation_bytes, each.logits, each.buffers, each.total)
        verdict = "fits" if each.total <= usable else "DOES NOT FIT"
        rows.append((f"stage {stage}", *(f"{size / GIB:.2f}" for size in sizes), verdict))
    yield from text_table(rows, left=1)
    heaviest = max(found.stages, key=lambda each: each.total)
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in heaviest.activations.items() if size)
    yield f"  activations of the heaviest: {kinds or 'none'}"
    yield f"  a rank has {gib(found.device.memory_bytes)}, of which {USABLE:.0%} can be filled"


def _time(found: Forecast) -> Iterator[str]:
    """One row a component, largest first."""
    total = found.time.total
    parts = sorted(found.time.parts().items(), key=lambda part: -part[1])
    rows = [("a step", "s", "share")]
    rows += [(PARTS[name], f"{part:.4g}", f"{part / total:.1%}") for name, part in parts if part]
    rows.append(("data", "0", "read ahead on a thread"))
    rows.append(("all", f"{total:.4g}", ""))
    yield from text_table(rows, left=1)


def _run(found: Forecast) -> Iterator[str]:
    rate, kept = found.tokens_per_second, found.goodput
    rows = [
        ("tokens/s", f"{rate:,.0f} in all, {rate / found.devices:,.0f} a device"),
        ("MFU", f"{found.utilisation(found.flops.causal):.2%} (causal attention counted)"),
        (
            "",
            f"{found.utilisation(found.flops.full):.2%} (full attention), of {found.job.ranks} x "
            f"{found.device.peak(found.job.format) / 1e12:,.0f} TFLOP/s in {found.job.format}",
        ),
        (
            "goodput",
            f"{kept.useful:.2%}: {kept.failures_a_day:.3g} failures a day lose {kept.lost:.2%}, a checkpoint "
            f"each {kept.interval / 60:,.0f} min {kept.waiting:.2%}",
        ),
        ("run", f"{short_count(found.tokens)} tokens in {found.days:,.3g} {plural(round(found.days), 'day')}"),
    ]
    if found.cost is not None:
        rows.append(("cost", f"{found.cost:,.0f} at {found.cluster.price:g} for a device and hour"))
    yield from text_table(rows)


def _scaling(found: Forecast) -> Iterator[str]:
    """The same work on each rank, more data-parallel ranks."""
    first = found.scaling[0]
    rows = [("devices", "global batch", "s/step", "tokens/s", "MFU", "scaling", "goodput", "tokens/s with it")]
    for each in found.scaling:
        scaling = each.tokens_per_second / first.tokens_per_second / (each.devices / first.devices)
        rows.append(
            (
                f"{each.devices:,}",
                f"{each.global_batch:,}",
                f"{each.seconds:.4g}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.mfu:.1%}",
                f"{scaling:.1%}",
                f"{each.goodput.useful:.1%}",
                f"{each.tokens_per_second * each.goodput.useful:,.0f}",
            )
        )
    yield from text_table(rows, left=0)


def assumptions(found: Forecast) -> Iterator[str]:
    """What the numbers stand on."""
    device, cluster, page = found.device, found.cluster, load_constants_file()
    yield f"device: {device.source}"
    if device.name == this_machine.NAME:
        yield "nothing runs beside anything else: ranks share the cores, and wait for what is sent"
        return
    yield (
        f"{device.per_node} ranks on fast links of {device.link / 1e9:,.0f} GB/s, between nodes "
        f"{device.network / 1e9:,.4g} GB/s for each"
    )
    if f"matmul.{device.family}.{found.job.format}" in page["constants"]:
        yield f"speed: constants of {page['date']}, fitted to {page['data']}"
    else:
        yield f"speed: no runs are published for {device.name} in {found.job.format}; products as fast as benchmarks"
    yield "attention as fast as FlashAttention 2, as torch has it"
    yield (
        f"a device fails each {cluster.failure_hours:,.0f} h, a start takes {cluster.restart_minutes:g} min, a node "
        f"writes {cluster.storage_gbps:g} GB/s of a checkpoint beside training; checkpoints as often as is best"
    )
    yield "no other job on the network; data are read faster than they are needed"


def report_json(found: Forecast) -> dict[str, Any]:
    """The same for programs."""
    return {
        "devices": found.devices,
        "ranks": found.job.ranks,
        "memory_bytes": {
            "device": found.device.memory_bytes,
            "usable_share": USABLE,
            "stages": [
                {**each.parts(), "activations_by_kind": dict(each.activations), "peak": each.total}
                for each in found.stages
            ],
        },
        "step_time_s": {**found.time.parts(), "total": found.time.total},
        "tokens_per_second": found.tokens_per_second,
        "mfu": {"causal": found.utilisation(found.flops.causal), "full": found.utilisation(found.flops.full)},
        "goodput": asdict(found.goodput),
        "tokens": found.tokens,
        "days": found.days,
        "cost": found.cost,
        "scaling": [asdict(each) for each in found.scaling],
        "assumed": list(assumptions(found)),
    }


# Tables of published runs as people write them: which file is one, and what its cells say.


Row = Mapping[str, str]
NO = ("no", "off", "none", "false", "0", "0.0", "n", "disabled")
_NOTHING = ("?", "-", "n/a", "na", "null", "unknown", "not stated")
_CAPITALS = {name.lower(): name for name in ("peak_mem_GiB", "GPUs")}
"""Columns that have capitals, by their names without."""
_NUMBER = re.compile(r"[~≈<>]?\s*(\d[\d_]*\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*(%|[a-z/ .]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d)[,\s'](?=\d{3}(?!\d))")
_REMARK = re.compile(r"\(.*?\)")
_TIMES = re.compile(r"\s*[x×*]\s*")


class CannotPredict(ValueError):
    """A row that nothing can be predicted for, and why."""


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of published runs, or of a sweep; columns that are not there are empty.

    Columns may stand in any order and be written in capitals or not; commas, semicolons or tabs may separate them.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        file.seek(0)
        lines = csv.reader(file, delimiter=max(",;\t", key=head.count))
        names = [_CAPITALS.get(name.strip().lower(), name.strip().lower()) for name in next(lines, [])]
        cells = [list(map(str.strip, line)) for line in lines]
    rows = [dict.fromkeys(names, "") | dict(zip(names, row, strict=False)) for row in cells if any(row)]
    for row in rows:
        row["confidence"] = row.get("confidence", "").lower()
    return forecast_run.published_rows(rows) if forecast_run.is_sweep(rows) else rows


def number(row: Row, column: str) -> float | None:
    """What a cell says: "4,096", "2 x 8" devices, "8k" tokens, "870 ms"; None where it is no positive number."""
    plain = _THOUSANDS.sub("", _REMARK.sub("", row.get(column, ""))).strip()
    value = 1.0
    for part in map(_NUMBER.fullmatch, _TIMES.split(plain)):
        if part is None:
            return None
        unit = part[2].strip().lower().partition(" ")[0]
        scale = {"k": 1024 if column == "seq" else 1000, "ms": 1e-3 if column == "step_time_s" else 1}
        value *= float(part[1]) * scale.get(unit, 1)
    return value if 0 < value < float("inf") else None


def whole(row: Row, column: str) -> int | None:
    """The same where it is a whole number."""
    value = number(row, column)
    return int(value) if value is not None and value >= 1 and value == int(value) else None


def need(row: Row, column: str, what: str) -> int:
    """The same of a column that a prediction needs. Raises NotSpoken."""
    value = whole(row, column)
    if value is None:
        raise CannotPredict(f"{what} is not stated")
    return value


def said(row: Row, column: str) -> bool | None:
    """Whether a cell says yes or no; None where it says nothing."""
    words = row.get(column, "").lower()
    if not words or words in _NOTHING:
        return None
    return words not in NO and not words.startswith("no ")
