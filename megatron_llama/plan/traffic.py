"""What a rank sends in a training step: bytes by axis and kind of collective, from the plan alone. docs/traffic.md has
the formulas in words.

    payload  all_reduce: the buffer; all_gather: the result; reduce_scatter: the input; send, recv: the message
    wire     what a rank sends if the collective is a ring: 2 (p-1)/p of an all_reduce's payload, (p-1)/p of an
             all_gather's or reduce_scatter's, all of a message sent, for a group of p ranks

A group of one rank moves nothing and is left out. s, b, h, t, m below are sequence, micro batch size, hidden size,
tensor-parallel size and micro batches per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_llama.config.precision import BYTES
from megatron_llama.plan import Plan
from megatron_llama.plan.parameters import head_dim, kv_heads
from megatron_llama.topology import Topology, build_topology

AXES = ("tp", "pp", "dp", "world")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")
FP32, INT32, INT64 = 4, 4, 8


class Line(NamedTuple):
    """What a sum of payloads is taken over."""

    axis: str
    kind: str
    ranks: int
    """Size of the group; 2 for send and recv."""


class Amount(NamedTuple):
    """How much of it there is in a step."""

    calls: int
    payload: int
    """Bytes of all calls together."""


Traffic = dict[Line, Amount]


@dataclass(frozen=True)
class Operation:
    """One reason for a rank to communicate."""

    what: str
    line: Line
    calls: int
    """In a step."""
    payload: int
    """Bytes of one call."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element, by what it is."""

    activations: int
    """Activations, their gradients, and the weights in matrix products, which ZeRO gathers."""
    reduced: int
    """Weight gradients while data-parallel ranks sum them."""
    kept: int
    """Weight gradients afterwards, as the optimizer takes them."""


def widths(plan: Plan) -> Widths:
    """The widths that the plan's precision means."""
    precision = plan.precision
    return Widths(BYTES[precision.compute_dtype], BYTES[precision.grad_accum_dtype], BYTES[precision.param_dtype])


def wire(line: Line, payload: float) -> float:
    """Bytes that a rank sends to move ``payload``."""
    if line.kind in ("send", "recv"):
        return payload if line.kind == "send" else 0.0
    return (2 if line.kind == "all_reduce" else 1) * (line.ranks - 1) / line.ranks * payload


def totals(operations: Iterable[Operation]) -> Traffic:
    """Calls and payload per step, in the order of AXES and KINDS."""
    found: Traffic = {}
    for operation in operations:
        calls, payload = found.get(operation.line, (0, 0))
        found[operation.line] = Amount(calls + operation.calls, payload + operation.calls * operation.payload)
    return in_order(found)


def in_order(traffic: Traffic) -> Traffic:
    """The same, sorted by axis, kind and size of group."""
    return dict(sorted(traffic.items(), key=lambda item: (AXES.index(item[0][0]), KINDS.index(item[0][1]), item[0][2])))


def operations(plan: Plan, rank: int) -> list[Operation]:
    """All that ``rank`` takes part in during a training step: forward, backward, norm, update, and what the loop
    agrees on after it. Validation and checkpoints come on top.
    """
    topology = build_topology(plan, rank)
    found = (
        *_tensor_parallel(plan, topology),
        *_pipeline(plan, topology),
        *_data_parallel(plan, topology),
        *_replicated_gradients(plan, topology),
        *_world(plan),
    )
    return [operation for operation in found if operation.line.ranks > 1 and operation.calls]


def groups_of_ranks(plan: Plan) -> list[tuple[list[int], list[Operation]]]:
    """Every rank, together with those that communicate as much: (ranks, operations of each)."""
    seen: dict[tuple[int, int], list[int]] = {}
    for rank in range(plan.world_size):
        topology = build_topology(plan, rank)
        seen.setdefault((topology.pp_rank, topology.shard_rank), []).append(rank)
    alike: list[tuple[list[int], list[Operation]]] = []
    for ranks in seen.values():  # nothing else of a rank's place matters
        mine = operations(plan, ranks[0])
        same = next((group for group, theirs in alike if theirs == mine), None)
        if same is None:
            alike.append((ranks, mine))
        else:
            same.extend(ranks)
    return [(sorted(ranks), theirs) for ranks, theirs in alike]


@dataclass(frozen=True)
class _Chunk:
    """A virtual pipeline stage on a rank."""

    layers: int
    is_first: bool
    is_last: bool


def _chunks(plan: Plan, topology: Topology) -> list[_Chunk]:
    stages = range(topology.pp_rank, len(plan.stage_layers), topology.pp)
    last = len(plan.stage_layers) - 1
    return [_Chunk(len(plan.stage_layers[stage]), stage == 0, stage == last) for stage in stages]


def _tensor_parallel(plan: Plan, topology: Topology) -> Iterator[Operation]:
    """Sums of activations [s, b, h], or with sequence parallelism gathers and scatters of them; the cross entropy."""
    trainer, t, m = plan.config.trainer, topology.tp, plan.num_microbatches
    tokens = plan.config.data.seq_length * trainer.micro_batch_size
    activations = tokens * plan.model.hidden_size * widths(plan).activations
    chunks = _chunks(plan, topology)
    blocks = m * sum(chunk.layers for chunk in chunks)
    first = m * any(chunk.is_first for chunk in chunks)
    last = m * any(chunk.is_last for chunk in chunks)
    # A block made again stops at the last value that its backward needs: down_proj's sum is not among them.
    again = blocks * (trainer.recompute == "full")
    # For the weights' gradients megatron-core gathers inputs a second time; Inductor keeps what it has gathered.
    inputs = 0 if trainer.compile else 2 * blocks

    def op(what: str, kind: str, calls: int) -> Operation:
        return Operation(what, Line("tp", kind, t), calls, activations)

    if plan.sp:
        yield op("embedding, forward", "reduce_scatter", first)
        yield op("embedding, backward", "all_gather", first)
        yield op("blocks, forward: into qkv, gate_up", "all_gather", 2 * blocks)
        yield op("blocks, forward: out of o, down", "reduce_scatter", 2 * blocks)
        yield op("blocks, backward: gradients into down, o", "all_gather", 2 * blocks)
        yield op("blocks, backward: inputs of gate_up, qkv again", "all_gather", inputs)
        yield op("blocks, backward: gradients out of gate_up, qkv", "reduce_scatter", 2 * blocks)
        yield op("blocks made again: into qkv, gate_up", "all_gather", 2 * again)
        yield op("blocks made again: out of o", "reduce_scatter", again)
        yield op("head, forward; again in the backward", "all_gather", 2 * last)
        yield op("head, backward", "reduce_scatter", last)
    else:
        yield op("embedding, forward", "all_reduce", first)
        yield op("blocks, forward: out of o, down", "all_reduce", 2 * blocks)
        yield op("blocks, backward: out of gate_up, qkv", "all_reduce", 2 * blocks)
        yield op("blocks made again: out of o", "all_reduce", again)
        yield op("head, backward", "all_reduce", last)
    yield Operation("cross entropy: maximum, own logit, sum", Line("tp", "all_reduce", t), 3 * last, tokens * FP32)


def _pipeline(plan: Plan, topology: Topology) -> Iterator[Operation]:
    """Activations and their gradients between virtual stages; the schedule decides when, not how much."""
    trainer, m = plan.config.trainer, plan.num_microbatches
    if topology.pp == 1:
        return
    tokens = plan.config.data.seq_length * trainer.micro_batch_size
    message = tokens // (topology.tp if plan.sp else 1) * plan.model.hidden_size * widths(plan).activations
    chunks = _chunks(plan, topology)
    onwards = m * sum(not chunk.is_last for chunk in chunks)
    back = m * sum(not chunk.is_first for chunk in chunks)
    for kind, forward, backward in (("send", onwards, back), ("recv", back, onwards)):
        yield Operation("activations", Line("pp", kind, 2), forward, message)
        yield Operation("their gradients", Line("pp", kind, 2), backward, message)


def _data_parallel(plan: Plan, topology: Topology) -> Iterator[Operation]:
    """What ``fully_shard`` gathers and scatters, unit by unit: each parameter's rows are filled up to a multiple of the
    shard size."""
    zero, m, n = plan.config.trainer.zero, plan.num_microbatches, topology.shard_size
    width, replicas = widths(plan), topology.dp // topology.shard_size
    gathers = 2 * m if zero == 3 else 1
    sums = m if zero >= 2 else 1
    for chunk in _chunks(plan, topology):
        for what, units, parameters in (
            ("blocks", chunk.layers, block_parameters(plan)),
            ("embedding, norm, head", 1, _other_parameters(plan, chunk)),
        ):
            if not parameters:
                continue
            filled = sum(-(-rows // n) * n * columns for rows, columns in parameters)
            weights, gradients = filled * width.activations, filled * width.reduced
            yield Operation(f"{what}: weights", Line("dp", "all_gather", n), units * gathers, weights)
            yield Operation(f"{what}: gradients", Line("dp", "reduce_scatter", n), units * sums, gradients)
            yield Operation(
                f"{what}: gradients, over copies", Line("dp", "all_reduce", replicas), units * sums, gradients // n
            )


def block_parameters(plan: Plan) -> list[tuple[int, int]]:
    """(rows, columns) of a block's parameters on one tensor-parallel rank; a vector has one column."""
    model, tp = plan.model, plan.config.trainer.tp
    h, queries, feed_forward = model.hidden_size, _query_rows(plan), model.intermediate_size // tp
    return [(h, 1), (queries + 2 * _kv_rows(plan), h), (h, queries), (h, 1), (2 * feed_forward, h), (h, feed_forward)]


def _other_parameters(plan: Plan, chunk: _Chunk) -> list[tuple[int, int]]:
    h = plan.model.hidden_size
    table = (plan.padded_vocab_size // plan.config.trainer.tp, h)
    found = [table] if chunk.is_first else []
    if chunk.is_last:
        found.append((h, 1))
        if not (plan.model.tie_word_embeddings and chunk.is_first):
            found.append(table)
    return found


def _query_rows(plan: Plan) -> int:
    return plan.model.num_attention_heads // plan.config.trainer.tp * head_dim(plan.model)


def _kv_rows(plan: Plan) -> int:
    """Rows of the keys, and as many of the values, on one tensor-parallel rank."""
    return max(1, kv_heads(plan.model) // plan.config.trainer.tp) * head_dim(plan.model)


def _replicated_gradients(plan: Plan, topology: Topology) -> Iterator[Operation]:
    """The sums of parallel/tensor.py, of the rows that this rank's shard holds."""
    model, t, h, width = plan.model, topology.tp, plan.model.hidden_size, widths(plan).kept
    chunks = _chunks(plan, topology)
    layers = sum(chunk.layers for chunk in chunks)
    first, last = (any(getattr(chunk, end) for chunk in chunks) for end in ("is_first", "is_last"))
    if plan.sp:
        vectors = 2 * layers + last
        payload = vectors * _overlap(h, (0, h), topology) * width
        yield Operation("gradients of norms", Line("tp", "all_reduce", t), int(vectors > 0), payload)
    copies = max(1, t // kv_heads(model))
    if copies > 1:
        queries, both = _query_rows(plan), 2 * _kv_rows(plan)
        rows = _overlap(queries + both, (queries, queries + both), topology)
        line = Line("tp", "all_reduce", copies)
        yield Operation("gradients of shared kv heads", line, int(layers * rows > 0), layers * rows * h * width)
    if model.tie_word_embeddings and topology.pp > 1:
        table = plan.padded_vocab_size // t
        payload = _overlap(table, (0, table), topology) * h * width
        yield Operation("gradient of the tied table", Line("pp", "all_reduce", 2), int(first or last), payload)


def _overlap(rows: int, wanted: tuple[int, int], topology: Topology) -> int:
    """How many of the rows ``wanted`` this rank's shard of ``rows`` holds."""
    per_rank = -(-rows // topology.shard_size)
    start = topology.shard_rank * per_rank
    return max(0, min(wanted[1], start + per_rank, rows) - max(wanted[0], start))


def _world(plan: Plan) -> Iterator[Operation]:
    """Single numbers that all ranks agree on."""
    line = Line("world", "all_reduce", plan.world_size)
    yield Operation("tokens of the batch", line, 1, INT64)
    yield Operation("loss", line, 1, FP32)
    yield Operation("gradient norm", line, 1, FP32)
    yield Operation("weight norm", line, int(plan.config.logging.parameter_norm), FP32)
    yield Operation("whether to stop, to wait for a save, to report its failure", line, 1, 3 * INT32)


def compact(ranks: Sequence[int]) -> str:
    """0-3, 8-11 for the ranks 0 1 2 3 8 9 10 11."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
