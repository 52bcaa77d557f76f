"""Results of a rehearsal, and their text and JSON. Does not import torch."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from megatron_llama.plan import Plan
from megatron_llama.system.tables import GIB, gib, short_count, text_table, wrapped_table
from megatron_llama.system.wrapping import WIDTH
from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.traffic import Traffic, wire_bytes


class MemoryKind(StrEnum):
    """Kind of memory, from permanent to temporary.

    - weights: this rank's shard, as the optimizer updates it (or frozen).
    - gathered weights: full weights that ``fully_shard`` gathers for the layers.
    - gradients: weight gradients, accumulated or not.
    - made in the backward pass: gradients of activations, and of weights before accumulation. Recomputed tensors
      count as activations.
    - communication buffers: of ``fully_shard``, sequence parallelism and pipeline transfers.
    - temporary: inside the optimizer and norms.
    - in the host's memory: tensors moved by trainer.offload; not part of the peak, which is device memory.
    """

    WEIGHTS = "weights"
    GATHERED = "gathered weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    BATCH = "batch"
    TABLES = "tables and masks"
    RESIDUAL = "activations: residual stream"
    NORMS = "activations: norms"
    ATTENTION = "activations: attention"
    FEED_FORWARD = "activations: feed-forward"
    LOGITS = "logits and loss"
    IN_BACKWARD = "made in the backward pass"
    COMMUNICATION = "communication buffers"
    TEMPORARY = "temporary"
    HOST = "in the host's memory"


class Holder(NamedTuple):
    """Tensors of one origin that are live at the peak."""

    size: int
    """Total bytes."""
    tensors: int
    kind: str
    module: str
    """Module that created them; * stands for any layer number."""
    operation: str
    """Name of the operator that created them."""
    shape: tuple[int, ...]
    dtype: str


class Flops(NamedTuple):
    """Floating-point operations of one step."""

    forward: int
    backward: int
    recomputed: int
    """Forward operations repeated by recomputation."""


@dataclass(frozen=True)
class OperatorCount:
    """Count of an operator that synchronizes the host or has a data-dependent shape, at one source line."""

    what: str  # operator; the JSON report has this key  prose: ok
    place: str
    """file:line (function)."""
    count: int
    """Calls per step."""


class DispatchedOperator(NamedTuple):
    """An operator of a step in one module."""

    namespace: str
    """aten for torch operators."""
    name: str
    """Name without the overload."""
    view: bool
    """Whether the result is a view of its input."""
    module: str
    """Calling module; * stands for any layer number."""
    place: str
    """file:line (function) of its first call."""
    calls: int
    """Calls in the rehearsed micro batches."""


@dataclass(frozen=True)
class Rehearsal:
    """A rank's step in the steady state (the second step); all bytes are of live tensor storages."""

    rank: int
    place: dict[str, int]
    """Position along each parallel axis."""
    world_size: int
    microbatches: int
    """Micro batches per step, including those not rehearsed."""
    rehearsed_microbatches: int
    """Micro batches that ran. The rest repeats the same work; FLOPs and traffic include it."""
    seconds: float
    """Duration of the rehearsal."""
    built: Mapping[str, int]
    """Bytes by kind after building model and optimizer."""
    at_rest: Mapping[str, int]
    """Bytes by kind between steps."""
    reduced: int
    """Bytes of the reduced gradients passed to the optimizer."""
    peak: int
    """Largest number of live bytes."""
    at_peak: Mapping[str, int]
    """Bytes by kind at the peak; their sum without HOST is ``peak``."""
    most: Mapping[str, int]
    """Largest number of bytes of each kind in the step."""
    moment: str
    """Pass and module at the peak."""
    holders: tuple[Holder, ...]
    """Tensors live at the peak, largest first."""
    flops: Mapping[str, Flops]
    """FLOPs by module; * stands for any layer number."""
    traffic: Traffic
    synchronizations: tuple[OperatorCount, ...]
    """Device-to-host synchronizations."""
    dynamic: tuple[OperatorCount, ...]
    """Operators with data-dependent shapes, and shapes that differ between batches."""
    operators: tuple[DispatchedOperator, ...]
    """All dispatched operators by name and module, including collectives and ``fully_shard``."""
    timeline: MemoryTimeline
    order: tuple[tuple[str, int, int], ...]
    """("forward" or "backward", chunk, micro batch) in the order of the schedule."""

    @property
    def total_flops(self) -> Flops:
        """FLOPs of all modules."""
        return Flops(*(sum(flops[phase] for flops in self.flops.values()) for phase in range(3)))


# Comparison of the operators of a step with the vendors' published lists.
#
# The lists are tables of names, operators/DEVICE.csv; operators/README.md has their sources.
LISTS = Path(__file__).with_name("operators")
# Dispatched name -> name in the published lists.
_OTHER_NAMES = {
    "_to_copy": "to",
    "_unsafe_view": "view",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "split_with_sizes": "split",
    "where": "_s_where",
}


def published_operators(device: str) -> frozenset[str] | None:
    """Return the operators that the vendor of ``device`` lists; None without a list."""
    path = LISTS / f"{device}.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return frozenset(row["operator"] for row in csv.DictReader(file))


def find_listed_name(name: str, names: Collection[str]) -> str | None:
    """Return the entry of ``names`` for the operator (name, in-place or out-of-place form, alias), or None."""
    other_form = name.removesuffix("_") if name.endswith("_") else name + "_"
    return next((known for known in (name, other_form, _OTHER_NAMES.get(name)) if known in names), None)


def unlisted_operators(
    operators: Collection[DispatchedOperator], names: Collection[str]
) -> tuple[DispatchedOperator, ...]:
    """Return the aten operators without an entry in ``names``, except views, which need no kernel."""
    computing = (operator for operator in operators if operator.namespace == "aten" and not operator.view)
    return tuple(operator for operator in computing if find_listed_name(operator.name, names) is None)


# A rehearsal as text and as JSON.
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
