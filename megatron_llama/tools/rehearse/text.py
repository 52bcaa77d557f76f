"""Format a rehearsal as text, JSON and a picture of memory over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from megatron_llama.plan import Plan
from megatron_llama.system.tables import GIB, gib, short_count, text_table, wrapped_table
from megatron_llama.system.wrapping import WIDTH
from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.parameters import any_layer
from megatron_llama.tools.forecast.traffic import wire_bytes
from megatron_llama.tools.recorder import FORWARD, RECOMPUTED, Place
from megatron_llama.tools.rehearse.report import (
    Holder,
    MemoryKind,
    OperatorCount,
    Rehearsal,
    published_operators,
    unlisted_operators,
)
from megatron_llama.tools.rehearse.watch import StorageRecord

MAX_HOLDERS = 12
TITLES = {"pp": "pipeline stage", "dp": "data-parallel", "cp": "context-parallel", "tp": "tensor-parallel"}
"""Long names of the axes."""


def lines(rehearsal: Rehearsal, plan: Plan) -> Iterator[str]:
    """Format the report of one rank."""
    places = [
        f"{TITLES.get(axis, axis)} {rehearsal.place[axis] + 1} of {plan.grid.sizes[axis]}"
        for axis in reversed(plan.grid.listed)
    ]
    yield f"rank {rehearsal.rank}: {', '.join(places)}"
    count, total = rehearsal.rehearsed_microbatches, rehearsal.microbatches
    batches = "micro batch" if total == 1 else "micro batches"
    some = f"{total} {batches}" if count == total else f"{count} of {total} {batches}; the rest repeats them"
    yield f"  rehearsed in {rehearsal.seconds:.0f} s: a step of {some}"
    yield from ("", *_memory(rehearsal, plan))
    yield from ("", f"  largest tensors at the peak, of {len(rehearsal.holders)} groups:", *_holders(rehearsal))
    yield from ("", "  FLOPs per step, by module", *_flops(rehearsal))
    yield from ("", "  bytes sent per step", *_traffic(rehearsal))
    yield from ("", *_operator_counts(rehearsal.synchronizations, "host waits for the device"))
    yield from ("", *_operator_counts(rehearsal.dynamic, "data-dependent or changing shapes"))
    yield from _operators(rehearsal, plan.config.device.name)


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return all fields except the timeline as JSON values."""
    places = {f"{axis}_rank": position for axis, position in reversed(rehearsal.place.items())}
    others = {field.name: getattr(rehearsal, field.name) for field in fields(rehearsal)}
    del others["timeline"], others["place"]
    report = {"rank": others.pop("rank"), **places, **others}
    report["holders"] = [holder._asdict() for holder in rehearsal.holders]
    report["flops"] = {module: flops._asdict() for module, flops in rehearsal.flops.items()}
    report["traffic"] = [{**line._asdict(), **amount._asdict()} for line, amount in rehearsal.traffic.items()]
    for name in ("synchronizations", "dynamic"):
        report[name] = [vars(item) for item in report[name]]
    report["operators"] = [operator._asdict() for operator in rehearsal.operators]
    return report


def _memory(rehearsal: Rehearsal, plan: Plan) -> Iterator[str]:
    kinds = [kind for kind in MemoryKind if rehearsal.most.get(kind)]
    rows: list[tuple[str, ...]] = [("memory", "at peak", "maximum", "between steps")]
    for kind in kinds:
        columns = (rehearsal.at_peak, rehearsal.most, rehearsal.at_rest)
        rows.append((kind, *(gib(column[kind]) if column.get(kind) else "" for column in columns)))
    rows.append(("total", gib(rehearsal.peak), "", gib(sum(rehearsal.at_rest.values()))))
    yield from (f"  {row}" for row in text_table(rows, left=1))
    yield f"  peak: {rehearsal.moment}"
    if (spare := free_bytes(rehearsal, plan)) is not None:
        fits = f"fits, {gib(spare)} free" if spare >= 0 else f"DOES NOT FIT, {gib(-spare)} over"
        yield f"  device memory {plan.config.device.memory_gib:g} GiB: {fits}, without allocator overhead"


def free_bytes(rehearsal: Rehearsal, plan: Plan) -> int | None:
    """Return the bytes of device memory free at the peak, negative if the rank does not fit; None if unknown."""
    memory = plan.config.device.memory_gib
    return None if memory is None else int(memory * GIB) - rehearsal.peak


def _holders(rehearsal: Rehearsal) -> Iterator[str]:
    rows = []
    for holder in rehearsal.holders[:MAX_HOLDERS]:
        shape = ", ".join(map(str, holder.shape))
        where = f"{holder.operation} in {holder.module}"
        dtype = holder.dtype.replace("float", "fp").replace("bfp", "bf")
        kind = holder.kind.removeprefix("activations: ")
        rows.append((gib(holder.size), f"{holder.tensors} x {dtype} [{shape}]", kind, where))
    yield from _indented(rows)


def _flops(rehearsal: Rehearsal) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "forward", "backward", "recomputed")]
    for module, flops in (*rehearsal.flops.items(), ("total", rehearsal.total_flops)):
        rows.append((module, *(short_count(count) if count else "" for count in flops)))
    yield from (f"    {row}" for row in text_table(rows, left=1))


def _traffic(rehearsal: Rehearsal) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("axis", "kind", "ranks", "calls", "payload", "wire")]
    for line, (calls, payload) in rehearsal.traffic.items():
        rows.append((*map(str, line), f"{calls:,}", gib(payload), gib(int(wire_bytes(line, payload)))))
    yield from (f"    {row}" for row in text_table(rows, left=2))


def _operator_counts(counts: Sequence[OperatorCount], title: str) -> Iterator[str]:
    if not counts:
        yield f"  {title}: none"
        return
    yield f"  {title}, calls per step:"
    yield from _indented([(f"{item.count:,}", item.what, item.place) for item in counts])


def _operators(rehearsal: Rehearsal, device: str) -> Iterator[str]:
    names = published_operators(device)
    if names is None:
        return
    missing = unlisted_operators(rehearsal.operators, names)
    title = f"  operators missing from the vendor's list for device={device}"
    yield from ("", title, "  (with calls in the rehearsed micro batches):") if missing else ("", f"{title}: none")
    yield from _indented(
        [(f"{each.calls:,}", each.name, ", ".join(filter(None, (each.module, each.place)))) for each in missing]
    )


def _indented(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as an indented table; the last column is wrapped."""
    yield from (f"    {line}" for line in wrapped_table(rows, WIDTH - 4))


class History:
    """Memory of the step that begins at construction."""

    def __init__(self, records: Sequence[StorageRecord], changes: Sequence[tuple[int, int]]) -> None:
        self._records, self._changes, self._begin = records, changes, len(changes)

    def summary(self, marks: Sequence[tuple[int, Place]], runs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the memory fields of ``Rehearsal``. ``runs`` are (chunk, micro batch) of the forward passes."""
        changes = np.array(self._changes, dtype=np.int64).reshape(-1, 2)
        numbers: dict[str, int] = {kind: number for number, kind in enumerate(MemoryKind)}
        kinds = np.array([numbers[record.kind] for record in self._records], dtype=np.int64)
        before, after = changes[: self._begin], changes[self._begin :]
        start = np.bincount(kinds[before[:, 0]], before[:, 1], len(MemoryKind)).astype(np.int64)
        steps = np.zeros((len(after) + 1, len(MemoryKind)), np.int64)
        steps[0] = start
        steps[np.arange(1, len(steps)), kinds[after[:, 0]]] = after[:, 1]
        alive = steps.cumsum(axis=0)
        totals = alive[:, : numbers[MemoryKind.HOST]].sum(axis=1)  # HOST is the last kind
        peak = int(totals.argmax())
        marked = [(change - self._begin, place) for change, place in marks]
        last = [place for change, place in marked if change <= peak]
        storage = self._records[after[peak - 1, 0]] if peak else None
        where = f", in {storage.module}: {storage.operation}" if storage else ""
        return {
            "peak": int(totals[peak]),
            "at_peak": _nonzero_kinds(alive[peak]),
            "most": _nonzero_kinds(alive.max(axis=0)),
            "moment": (_pass_name(last[-1], runs) if last else "before the first pass") + where,
            "holders": self._holders(changes[: self._begin + peak]),
            "timeline": MemoryTimeline(tuple(MemoryKind), np.arange(len(alive)), alive, tuple(_passes(marked, runs))),
        }

    def _holders(self, changes: Any) -> tuple[Holder, ...]:
        sizes = np.bincount(changes[:, 0], changes[:, 1], len(self._records)).astype(np.int64)
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
        for number in np.flatnonzero(sizes):
            record = self._records[int(number)]
            group = groups[record.kind, any_layer(record.module), record.operation, record.shape, record.dtype]
            group[0] += int(sizes[number])
            group[1] += 1
        holders = [Holder(size, count, *key) for key, (size, count) in groups.items()]
        return tuple(sorted(holders, key=lambda holder: -holder.size))


def _nonzero_kinds(row: Any) -> Mapping[str, int]:
    return {kind: int(size) for kind, size in zip(MemoryKind, row, strict=True) if size}


def _pass_name(place: Place, runs: Sequence[tuple[int, int]]) -> str:
    if place.run < 0:
        return "outside of forward and backward"
    chunk, microbatch = runs[place.run]
    several = f", chunk {chunk}" if any(other for other, _ in runs) else ""
    phase = "recomputation" if place.phase == RECOMPUTED else place.phase
    return f"{phase} of micro batch {microbatch}{several}"


def _passes(marked: Sequence[tuple[int, Place]], runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str]]:
    """Yield the change at which each pass begins, and its name; recomputation belongs to the backward pass."""
    last, several = "", any(chunk for chunk, _ in runs)
    for change, place in marked:
        if place.run >= 0:
            chunk, microbatch = runs[place.run]
            name = f"{'F' if place.phase == FORWARD else 'B'}{microbatch}" + (f"'{chunk}" if several else "")
            if name != last:
                yield change, name
            last = name
