"""A rehearsal as text, for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from megatron_llama.plan import Plan
from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import GIB, gib, short_count
from megatron_llama.tools.forecast.traffic import wire
from megatron_llama.tools.rehearse.operators import published, unlisted
from megatron_llama.tools.rehearse.report import KINDS, Rehearsal, Sighting

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
        rows.append((*map(str, line), f"{calls:,}", gib(payload), gib(int(wire(line, payload)))))
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
