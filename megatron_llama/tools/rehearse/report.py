"""Results of a rehearsal. Does not import torch."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from megatron_llama.tools.figures import MemoryTimeline
from megatron_llama.tools.forecast.traffic import Traffic


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
