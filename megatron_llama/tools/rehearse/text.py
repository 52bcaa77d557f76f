"""A rehearsal as text, for a terminal, and as JSON."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from megatron_llama.plan import Plan
from megatron_llama.system.tables import GIB, gib, short_count, text_table
from megatron_llama.tools.forecast.module_work import any_layer
from megatron_llama.tools.forecast.traffic import wire_bytes
from megatron_llama.tools.memory_picture import draw_memory
from megatron_llama.tools.rehearse.modules import RECOMPUTED, Place
from megatron_llama.tools.rehearse.report import HOST, KINDS, Holder, Rehearsal, Sighting, Timeline, published, unlisted
from megatron_llama.tools.rehearse.watch import Record

MOST_HOLDERS = 12
TITLES = {"pp": "pipeline stage", "dp": "data-parallel", "tp": "tensor-parallel"}
"""Titles of axes whose setting is short."""


def lines(rehearsal: Rehearsal, plan: Plan) -> Iterator[str]:
    """All about one rank."""
    places = [
        f"{TITLES.get(axis, axis)} {rehearsal.place[axis] + 1} of {size}"
        for axis, size in reversed(plan.grid.sizes.items())
    ]
    yield f"rank {rehearsal.rank}: {', '.join(places)}"
    count, total = rehearsal.rehearsed_microbatches, rehearsal.microbatches
    batches = "micro batch" if total == 1 else "micro batches"
    some = f"{total} {batches}" if count == total else f"{count} of {total} {batches}; the others do the same again"
    yield f"  rehearsed in {rehearsal.seconds:.0f} s: a step of {some}"
    yield from ("", *_memory(rehearsal, plan))
    yield from ("", f"  the largest at the peak, of {len(rehearsal.holders)}:", *_holders(rehearsal))
    yield from ("", "  floating-point operations of a step, by module", *_flops(rehearsal))
    yield from ("", "  bytes sent in a step", *_traffic(rehearsal))
    yield from ("", *_sightings(rehearsal.synchronizations, "the host waits for the device"))
    yield from ("", *_sightings(rehearsal.dynamic, "shapes that depend on values, or change"))
    yield from _operators(rehearsal, plan.config.device.name)


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Everything but the timeline, with names as JSON has them."""
    places = {f"{axis}_rank": position for axis, position in reversed(rehearsal.place.items())}
    others = {field.name: getattr(rehearsal, field.name) for field in fields(rehearsal)}
    del others["timeline"], others["place"]
    found = {"rank": others.pop("rank"), **places, **others}
    found["holders"] = [holder._asdict() for holder in rehearsal.holders]
    found["flops"] = {module: flops._asdict() for module, flops in rehearsal.flops.items()}
    found["traffic"] = [{**line._asdict(), **amount._asdict()} for line, amount in rehearsal.traffic.items()]
    for name in ("synchronizations", "dynamic"):
        found[name] = [vars(sighting) for sighting in found[name]]
    found["operators"] = [operator._asdict() for operator in rehearsal.operators]
    return found


def _memory(rehearsal: Rehearsal, plan: Plan) -> Iterator[str]:
    kinds = [kind for kind in KINDS if rehearsal.most.get(kind)]
    rows: list[tuple[str, ...]] = [("memory", "at the peak", "most in the step", "between steps")]
    for kind in kinds:
        columns = (rehearsal.at_peak, rehearsal.most, rehearsal.at_rest)
        rows.append((kind, *(gib(column[kind]) if column.get(kind) else "" for column in columns)))
    rows.append(("together", gib(rehearsal.peak), "", gib(sum(rehearsal.at_rest.values()))))
    yield from (f"  {row}" for row in text_table(rows, left=1))
    yield f"  the peak is in the {rehearsal.moment}"
    if (memory := plan.config.device.memory_gib) is not None:
        spare = int(memory * GIB) - rehearsal.peak
        fits = f"fits, {gib(spare)} are left" if spare >= 0 else f"does NOT fit: {gib(-spare)} too much"
        yield f"  device.memory_gib={memory:g}: {fits}, before what the allocator and libraries take"


def _holders(rehearsal: Rehearsal) -> Iterator[str]:
    rows = []
    for holder in rehearsal.holders[:MOST_HOLDERS]:
        shape = ", ".join(map(str, holder.shape))
        where = f"{holder.operation} in {holder.module}"
        rows.append((gib(holder.size), f"{holder.tensors} x {holder.dtype} [{shape}]", holder.kind, where))
    yield from (f"    {row}" for row in text_table(rows))


def _flops(rehearsal: Rehearsal) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("", "forward", "backward", "recomputed")]
    rows += [(module, *map(_count, flops)) for module, flops in rehearsal.flops.items()]
    rows.append(("together", *map(_count, rehearsal.total_flops)))
    yield from (f"    {row}" for row in text_table(rows, left=1))


def _count(count: int) -> str:
    return short_count(count) if count else ""


def _traffic(rehearsal: Rehearsal) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("axis", "kind", "ranks", "calls", "payload", "wire")]
    for line, (calls, payload) in rehearsal.traffic.items():
        rows.append((*map(str, line), f"{calls:,}", gib(payload), gib(int(wire_bytes(line, payload)))))
    yield from (f"    {row}" for row in text_table(rows, left=2))


def _sightings(sightings: Sequence[Sighting], what: str) -> Iterator[str]:
    if not sightings:
        yield f"  {what}: nowhere"
        return
    yield f"  {what}, times in a step:"
    rows = [(f"{sighting.count:,}", sighting.what, sighting.place) for sighting in sightings]
    yield from (f"    {row}" for row in text_table(rows))


def _operators(rehearsal: Rehearsal, device: str) -> Iterator[str]:
    names = published(device)
    if names is None:
        return
    missing = unlisted(rehearsal.operators, names)
    yield ""
    if not missing:
        yield f"  operators that the vendor's published list for device={device} lacks: none"
        return
    yield f"  operators that the vendor's published list for device={device} lacks, in the micro batches rehearsed:"
    rows = [(f"{found.calls:,}", found.name, found.module, found.place) for found in missing]
    yield from (f"    {row}" for row in text_table(rows))


# A rehearsed step's memory as a picture.


def draw(rehearsal: Rehearsal, title: str, memory_gib: float | None = None) -> bytes:
    """The bytes of a PNG: what is alive, by kind, over the changes of a step, with its passes below."""
    alive = rehearsal.timeline.bytes
    return draw_memory(
        np.arange(len(alive)),
        alive,
        KINDS,
        _passes(rehearsal),
        title=title,
        axis="a step, from one birth or death of a tensor to the next; F: forward, B: backward of a micro batch",
        memory_gib=memory_gib,
    )


def _passes(rehearsal: Rehearsal) -> list[tuple[float, str]]:
    """Where each pass begins, as a letter and its micro batch's number."""
    begins: list[tuple[float, str]] = []
    for change, name in rehearsal.timeline.marks:
        if " of micro batch " in name and (not begins or begins[-1][1] != _letter(name)):
            begins.append((change, _letter(name)))
    return begins


def _letter(name: str) -> str:
    """F3 for the forward pass of micro batch 3; recomputation belongs to the backward pass."""
    phase, _, batch = name.partition(" of micro batch ")
    return ("F" if phase == "forward" else "B") + batch.replace(", chunk ", "'")


# The bytes of a step over time, from the births, changes and deaths of storages.


class History:
    """A step that begins when this is made."""

    def __init__(self, records: Sequence[Record], changes: Sequence[tuple[int, int]]) -> None:
        self._records, self._changes, self._begin = records, changes, len(changes)

    def summary(self, marks: Sequence[tuple[int, Place]], runs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The fields of a ``Rehearsal`` about memory. ``runs`` are (chunk, micro batch) of the forward passes."""
        changes = np.array(self._changes, dtype=np.int64).reshape(-1, 2)
        numbers = {kind: number for number, kind in enumerate(KINDS)}
        kinds = np.array([numbers[record.kind] for record in self._records], dtype=np.int64)
        before, after = changes[: self._begin], changes[self._begin :]
        start = np.bincount(kinds[before[:, 0]], before[:, 1], len(KINDS)).astype(np.int64)
        steps = np.zeros((len(after) + 1, len(KINDS)), np.int64)
        steps[0] = start
        steps[np.arange(1, len(steps)), kinds[after[:, 0]]] = after[:, 1]
        alive = steps.cumsum(axis=0)
        totals = alive[:, : numbers[HOST]].sum(axis=1)  # it is the last kind
        peak = int(totals.argmax())
        named = [(change - self._begin, _name(place, runs)) for change, place in marks]
        last = [name for change, name in named if change <= peak]
        born = self._records[after[peak - 1, 0]] if peak else None
        where = f", in {born.module}: {born.operation}" if born else ""
        return {
            "peak": int(totals[peak]),
            "at_peak": _named(alive[peak]),
            "most": _named(alive.max(axis=0)),
            "moment": (last[-1] if last else "before the first pass") + where,
            "holders": self._holders(changes[: self._begin + peak]),
            "timeline": Timeline(KINDS, alive, tuple(named)),
        }

    def _holders(self, changes: Any) -> tuple[Holder, ...]:
        sizes = np.bincount(changes[:, 0], changes[:, 1], len(self._records)).astype(np.int64)
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
        for number in np.flatnonzero(sizes):
            record = self._records[int(number)]
            group = groups[record.kind, any_layer(record.module), record.operation, record.shape, record.dtype]
            group[0] += int(sizes[number])
            group[1] += 1
        found = [Holder(size, count, *key) for key, (size, count) in groups.items()]
        return tuple(sorted(found, key=lambda holder: -holder.size))


def _named(row: Any) -> Mapping[str, int]:
    return {kind: int(size) for kind, size in zip(KINDS, row, strict=True) if size}


def _name(place: Place, runs: Sequence[tuple[int, int]]) -> str:
    if place.run < 0:
        return "outside of forward and backward"
    chunk, microbatch = runs[place.run]
    several = f", chunk {chunk}" if any(other for other, _ in runs) else ""
    phase = "recomputation" if place.phase == RECOMPUTED else place.phase
    return f"{phase} of micro batch {microbatch}{several}"
