"""What a rehearsal found out about a rank. No torch here, so that planners and tests can compare at no cost."""
from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_llama.tools.forecast.traffic import Traffic

WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER = "weights", "gathered weights", "gradients", "optimizer states"
ATTENTION, FEED_FORWARD, NORMS = "activations: attention", "activations: feed-forward", "activations: norms"
RESIDUAL, LOGITS = "activations: residual stream", "logits and loss"
IN_BACKWARD, COMMUNICATION = "made in the backward pass", "communication buffers"
TABLES, BATCH, TEMPORARY = "tables and masks", "batch", "temporary"
HOST = "in the host's memory"
KINDS = (
    *(WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, BATCH, TABLES),
    *(RESIDUAL, NORMS, ATTENTION, FEED_FORWARD, LOGITS, IN_BACKWARD, COMMUNICATION, TEMPORARY),
    HOST,
)
"""What a byte is alive for, from what is always there to what comes and goes.

weights: this rank's shard, as the optimizer updates it (or frozen). gathered weights: what ``fully_shard`` makes of the
shards for the layers. gradients: those of weights, summed or not. made in the backward pass: gradients of activations,
and those of weights before they are added to others; what is recomputed counts as activations. communication buffers:
of ``fully_shard``'s collectives, sequence parallelism and pipeline transfers. temporary: inside optimizer and norms.
in the host's memory: what trainer.offload puts there; no part of the peak, which is the device's.
"""


class Holder(NamedTuple):
    """Tensors of one origin that are alive at the peak."""

    size: int
    """Bytes together."""
    tensors: int
    kind: str
    module: str
    """Where they were made; * stands for any layer's number."""
    operation: str
    """torch's name of the operator that made them."""
    shape: tuple[int, ...]
    dtype: str


class Flops(NamedTuple):
    """Floating-point operations of one step."""

    forward: int
    backward: int
    recomputed: int
    """Forward operations that recomputation does a second time."""


@dataclass(frozen=True)
class Sighting:
    """Something that a device which compiles, or runs ahead of the host, does not like, and where it is."""

    what: str
    place: str
    """file:line (function)."""
    count: int
    """How often in a step."""


class DispatchedOperator(NamedTuple):
    """An operator of a step, where it was first called in a module."""

    namespace: str
    """aten for torch's own."""
    name: str
    """Without its overload."""
    view: bool
    """Whether its result is another description of the same memory."""
    module: str
    """Where it runs; * stands for any layer's number."""
    place: str
    """file:line (function) of its first call there."""
    calls: int
    """How often in the micro batches that were rehearsed."""


@dataclass(frozen=True)
class Timeline:
    """Bytes of one step after each change, by kind."""

    kinds: tuple[str, ...]
    bytes: Any
    """int64 array [changes, kinds]."""
    marks: tuple[tuple[int, str], ...]
    """(change, what begins there)."""


@dataclass(frozen=True)
class Rehearsal:
    """One rank's step in the steady state: all bytes are of tensors' storages that are alive, in the second step."""

    rank: int
    place: dict[str, int]
    """The position along each axis."""
    world_size: int
    microbatches: int
    """Micro batches of the step, rehearsed or not."""
    rehearsed_microbatches: int
    """Those that were run. The others repeat the same work: FLOPs and traffic are of all."""
    seconds: float
    """What the rehearsal took."""
    built: Mapping[str, int]
    """Bytes by kind once model and optimizer are built."""
    at_rest: Mapping[str, int]
    """Bytes by kind between steps."""
    reduced: int
    """Bytes of the gradients that the optimizer gets, summed over micro batches and ranks."""
    peak: int
    """Most bytes alive at once."""
    at_peak: Mapping[str, int]
    """Bytes by kind then; their sum without HOST is ``peak``."""
    most: Mapping[str, int]
    """The most bytes of each kind at any time in the step."""
    moment: str
    """What was going on at the peak."""
    holders: tuple[Holder, ...]
    """What was alive then, largest first."""
    flops: Mapping[str, Flops]
    """By module; * stands for any layer's number."""
    traffic: Traffic
    synchronizations: tuple[Sighting, ...]
    """Values that the host waits for."""
    dynamic: tuple[Sighting, ...]
    """Operations whose result's shape depends on values, and shapes that differ between batches."""
    operators: tuple[DispatchedOperator, ...]
    """All that was dispatched, by name and module, collectives and ``fully_shard``'s own operators too."""
    timeline: Timeline
    order: tuple[tuple[str, int, int], ...]
    """("forward" or "backward", chunk, micro batch) in the order in which the schedule ran them."""

    @property
    def total_flops(self) -> Flops:
        """Of all modules."""
        return Flops(*(sum(flops[phase] for flops in self.flops.values()) for phase in range(3)))


# Which operators of a rehearsed step a vendor's published list has.
#
# The lists are tables of names, operators/DEVICE.csv; operators/README.md has their sources.


LISTS = Path(__file__).with_name("operators")
# Dispatched name -> the name under which a public list has it.
_OTHER_NAMES = {
    "_to_copy": "to",
    "_unsafe_view": "view",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "split_with_sizes": "split",
    "where": "_s_where",
}


def published(device: str) -> frozenset[str] | None:
    """The names that the vendor of ``device`` lists; None where no list is kept here."""
    path = LISTS / f"{device}.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return frozenset(row["operator"] for row in csv.DictReader(file))


def listed_as(name: str, names: Collection[str]) -> str | None:
    """The name under which ``names`` has the operator ``name``: its own, its form in place or not, another; or None."""
    other_form = name.removesuffix("_") if name.endswith("_") else name + "_"
    return next((known for known in (name, other_form, _OTHER_NAMES.get(name)) if known in names), None)


def unlisted(operators: Collection[DispatchedOperator], names: Collection[str]) -> tuple[DispatchedOperator, ...]:
    """Those of torch's own ``operators`` (aten) that compute something and that ``names`` lacks.

    A view computes nothing: it is another description of the same memory, and needs no kernel.
    """
    computing = (found for found in operators if found.namespace == "aten" and not found.view)
    return tuple(found for found in computing if listed_as(found.name, names) is None)
