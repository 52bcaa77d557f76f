"""Bytes that a rank sends in a training step, by axis and kind of collective, from the plan alone.

docs/guides/tools/traffic.md states the formulas.

    payload  all_reduce: the buffer; all_gather: the result; reduce_scatter: the input; send, recv: the message
    wire     bytes that a rank of a group of p sends in a ring: 2 (p-1)/p of an all_reduce's payload, (p-1)/p of an
             all_gather's or reduce_scatter's; a message is sent once

``bytes_leaving_node`` counts the bytes sent to other nodes. In a ring a rank sends to the next rank of its group only,
in an all_to_all an equal share to each rank. Groups of one rank are omitted.

s, b, h, t, m: sequence length, micro batch size, hidden size, tensor-parallel size, micro batches per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_llama.arch import parameters as arch
from megatron_llama.arch.hf_tp_mapping import MAGNITUDE
from megatron_llama.config.precision import BYTES, exchanged_bytes
from megatron_llama.plan.muon_division import MatrixWork
from megatron_llama.plan.plan import Plan
from megatron_llama.tools.forecast import rank_work
from megatron_llama.topology import AXIS_NAMES, virtual_stages_of

AXES = (*AXIS_NAMES, "world")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")
FP32, INT32, INT64 = 4, 4, 8
MLP = ("gate_up_proj", "down_proj")


class TrafficKey(NamedTuple):
    """Key under which payloads are summed."""

    axis: str
    kind: str
    ranks: int
    """Size of the group; 2 for send and recv."""


class Amount(NamedTuple):
    """Calls and bytes in one step."""

    calls: int
    payload: int
    """Total bytes of all calls."""


Traffic = dict[TrafficKey, Amount]


@dataclass(frozen=True)
class Operation:
    """Collective or message that a rank repeats in a step."""

    label: str
    """Tensors that it moves, for reports."""
    axis: str
    kind: str
    ranks: int
    """Size of the group; 2 for send and recv."""
    calls: int
    """Calls per step."""
    payload: int
    """Bytes per call."""
    stride: int = 1
    """Distance between neighboring ranks of the group. For send and recv: from this rank to the other, modulo the world
    size."""

    @property
    def key(self) -> TrafficKey:
        return TrafficKey(self.axis, self.kind, self.ranks)

    def group(self, rank: int, world_size: int) -> list[int]:
        """Return the group of ``rank`` in ring order; for send and recv [rank, other rank]."""
        if self.kind in ("send", "recv"):
            return [rank, (rank + self.stride) % world_size]
        first = rank - rank // self.stride % self.ranks * self.stride
        return [first + number * self.stride for number in range(self.ranks)]


def bytes_leaving_node(kind: str, group: Sequence[int], rank: int, payload: int, per_node: int) -> int:
    """Return the bytes that ``rank`` sends to other nodes in one call.

    Args:
        group: ranks in ring order; for send [rank, other rank].
    """
    if kind == "all_to_all":
        return payload * sum(other // per_node != rank // per_node for other in group) // len(group)
    following = group[(group.index(rank) + 1) % len(group)]
    if following // per_node == rank // per_node:
        return 0
    return round(wire_bytes(TrafficKey("", kind, len(group)), payload))


def between_nodes(operations: Iterable[Operation], rank: int, world_size: int, per_node: int) -> Traffic:
    """Sum the calls and bytes of ``operations`` with which ``rank`` sends to other nodes of ``per_node`` ranks."""
    traffic: Traffic = {}
    for operation in operations:
        group = operation.group(rank, world_size)
        size = bytes_leaving_node(operation.kind, group, rank, operation.payload, per_node)
        if size:
            add_traffic(traffic, operation.key, operation.calls, size)
    return sort_traffic(traffic)


def wire_bytes(key: TrafficKey, payload: float) -> float:
    """Return the bytes that a rank sends for a payload of ``payload`` bytes."""
    if key.kind in ("send", "recv"):
        return payload if key.kind == "send" else 0.0
    return (2 if key.kind == "all_reduce" else 1) * (key.ranks - 1) / key.ranks * payload


def totals(operations: Iterable[Operation]) -> Traffic:
    """Sum calls and payload per step, in the order of AXES and KINDS."""
    traffic: Traffic = {}
    for operation in operations:
        add_traffic(traffic, operation.key, operation.calls, operation.payload)
    return sort_traffic(traffic)


def add_traffic(traffic: Traffic, key: TrafficKey, calls: int, payload: int) -> None:
    """Add ``calls`` of ``payload`` bytes each."""
    before = traffic.get(key, Amount(0, 0))
    traffic[key] = Amount(before.calls + calls, before.payload + calls * payload)


def sort_traffic(traffic: Traffic) -> Traffic:
    """Sort by axis, kind and group size."""
    return dict(sorted(traffic.items(), key=lambda item: (AXES.index(item[0][0]), KINDS.index(item[0][1]), item[0][2])))


def step_operations(plan: Plan, pp_rank: int, shard_rank: int, tp_rank: int = 0, replica: int = 0) -> list[Operation]:
    """Return a rank's communication in a training step: forward, backward, gradient norm, update and loop control.

    Validation, checkpoints and comparisons of copies are not included. With random-LTD the step has the largest length,
    max_value.

    Args:
        shard_rank: position among the ranks that share one sharded copy of the states.
        tp_rank: tensor-parallel rank. Only 1-bit Adam and Muon depend on it: the last ranks have padding of the
            vocabulary, and ranks own different matrices.
        replica: number of the sharded copy. Only Muon depends on it.
    """
    last = len(plan.stage_layers) - 1
    stages = virtual_stages_of(pp_rank, plan.config.trainer.pp, plan.config.trainer.vpp)
    chunks = [_Chunk(plan.stage_layers[stage], stage == 0, stage == last) for stage in stages]
    world = ("world", "all_reduce", plan.world_size)
    operations = (
        *_tensor_parallel(plan, chunks),
        *_context_parallel(plan, chunks),
        *_pipeline(plan, chunks),
        *_data_parallel(plan, chunks, tp_rank),
        *_replicated_gradients(plan, chunks, shard_rank),
        *_attention_logits(plan, chunks),
        *_whole_matrices(plan, pp_rank, (replica * plan.shard_size + shard_rank) * plan.config.trainer.tp + tp_rank),
        Operation("token and document counts of the batch", *world, 1, 3 * INT64),
        Operation("loss", *world, 1, FP32),
        Operation("gradient norm", *world, 1, FP32),
        Operation("weight norm", *world, int(plan.config.logging.parameter_norm), FP32),
        Operation("stop, due, save and failure flags", *world, 1, 4 * INT32),
    )
    return [operation for operation in operations if operation.ranks > 1 and operation.calls]


def comparison_of_copies(plan: Plan) -> list[Operation]:
    """Return a rank's communication in a comparison of copies (parallel/compare_copies.py) after the first.

    It occurs every ``trainer.check_copies_every`` steps, and is not in ``step_operations``.
    """
    world, size = plan.world_size, plan.world_size * len(plan.copies) * INT64
    return [Operation("digests of copies", "world", "all_gather", world, 1, size)] if size else []


class _Chunk(NamedTuple):
    """A virtual pipeline stage on a rank."""

    layers: Sequence[int]
    is_first: bool
    is_last: bool


def _block_passes(plan: Plan, layers: Iterable[int]) -> tuple[int, int, int]:
    """Return the passes of ``layers`` in a step, and how many the backward pass recomputes in full or selectively.

    Selective recomputation repeats attention and elementwise operations.
    """
    kinds = [plan.recompute(layer) for layer in layers]
    m = plan.num_microbatches
    return m * len(kinds), m * kinds.count("full"), m * kinds.count("selective")


def _tensor_parallel(plan: Plan, chunks: list[_Chunk]) -> Iterator[Operation]:
    """Yield all-reduces of activations [s, b, h], with sequence parallelism gathers and scatters; the loss."""
    trainer, t, m = plan.config.trainer, plan.config.trainer.tp, plan.num_microbatches
    tokens = plan.grid.share("tokens", plan.config.data.length) * trainer.micro_batch_size
    activations = tokens * plan.model.hidden_size * BYTES[plan.precision.compute_dtype]
    first = m * any(chunk.is_first for chunk in chunks)
    last = m * any(chunk.is_last for chunk in chunks)

    def op(label: str, kind: str, calls: int) -> Operation:
        return Operation(label, "tp", kind, t, calls, activations)

    if plan.sp:
        yield op("embedding, forward", "reduce_scatter", first)
        yield op("embedding, backward", "all_gather", first * rank_work.is_trained(plan, "embed_tokens"))
        yield op("head", "all_gather", last)
        yield op("head, gradient", "reduce_scatter", last)
    else:
        yield op("embedding, forward", "all_reduce", first)
        yield op("head, gradient", "all_reduce", last)
    ltd, layers = plan.random_ltd, [layer for chunk in chunks for layer in chunk.layers]
    dropping = ltd.layers if ltd is not None and ltd.max_value < ltd.seq_length else ()
    whole = _block_passes(plan, (layer for layer in layers if layer not in dropping))
    yield from _blocks(plan, "blocks", *whole, activations)
    subset = _block_passes(plan, (layer for layer in layers if layer in dropping))
    if ltd is not None and subset[0]:
        some = activations // ltd.seq_length * ltd.max_value
        yield from _blocks(plan, "blocks with dropped tokens", *subset, some)
        if plan.sp:
            for kind in ("reduce_scatter", "all_gather"):  # into the subset and out of it, forward and backward
                yield Operation(f"tokens of random-LTD's layers: {kind}", "tp", kind, t, 2 * subset[0], some)
    at_once = min(tokens, arch.loss_chunk(plan.model.hidden_size))
    for size, count in ((at_once, tokens // at_once), (tokens % at_once, int(tokens % at_once > 0))):
        label = "chunked cross entropy: maximum, sum, target logit"
        yield Operation(label, "tp", "all_gather", t, count * last, 3 * t * size * FP32)


def _blocks(
    plan: Plan, label: str, blocks: int, recomputed: int, selective: int, activations: int
) -> Iterator[Operation]:
    """Yield the operations of block passes on ``activations`` bytes. ``selective`` of them recompute attention."""
    # Recomputation stops at the last tensor that the backward pass needs. down_proj's sum is needed only by LoRA's B
    # and by a norm after it. For weight gradients megatron-core gathers the inputs a second time. Inductor saves the
    # gathered inputs, and frozen weights have no gradients. Networks in chunks are always recomputed, with their sum.
    t, lora, chunked = plan.config.trainer.tp, plan.config.finetune.method == "lora", plan.config.trainer.mlp_chunks > 1
    inputs = 0 if plan.config.trainer.compile or lora else blocks
    mlp_recomputed, last_sums = recomputed, 0
    if rank_work.adapters_of(plan, 0, "down_proj") or arch.norms_branches(plan.model):
        last_sums = recomputed
    if chunked:
        mlp_recomputed = last_sums = blocks + (recomputed if arch.norms_branches(plan.model) else 0)
    chunks = _mlp_chunks(plan, activations)

    def op(of: str, kind: str, attention: int, mlp: int) -> Iterator[Operation]:
        yield Operation(f"{label}{of}", "tp", kind, t, attention if chunked else attention + mlp, activations)
        for size, count in chunks.items() if chunked else ():
            yield Operation(f"{label}{of}, MLP chunks", "tp", kind, t, count * mlp, size)

    if plan.sp:
        yield from op(", forward: into qkv, gate_up", "all_gather", blocks, blocks)
        yield from op(", forward: out of o, down", "reduce_scatter", blocks, blocks)
        yield from op(", backward: gradients into down, o", "all_gather", blocks, blocks)
        yield from op(", backward: inputs of gate_up, qkv", "all_gather", inputs, inputs)
        yield from op(", backward: gradients out of gate_up, qkv", "reduce_scatter", blocks, blocks)
        yield from op(" recomputed: into qkv, gate_up", "all_gather", recomputed, mlp_recomputed)
        yield from op(" recomputed: out of o", "reduce_scatter", recomputed, last_sums)
    else:
        yield from op(", forward: out of o, down", "all_reduce", blocks, blocks)
        yield from op(", backward: out of gate_up, qkv", "all_reduce", blocks, blocks)
        yield from op(" recomputed: out of o", "all_reduce", recomputed, last_sums)
    yield from _float8_maxima(plan, label, blocks, blocks + recomputed, activations)
    if arch.qk_norm(plan.model) == "projection":
        values = activations // (plan.model.hidden_size * BYTES[plan.precision.compute_dtype]) * FP32
        # Compiled blocks save the results of collectives in selective recomputation.
        calls = 2 * (2 * blocks + recomputed + (0 if plan.config.trainer.compile else selective))
        yield Operation(f"{label}: mean squares of q and k, and gradients", "tp", "all_reduce", t, calls, values)
    for matrix in arch.FUSED if lora else ():
        sizes, repeated = (chunks, mlp_recomputed) if matrix in MLP else ({activations: 1}, recomputed)
        for size, count in sizes.items():
            yield from _lora(plan, label, matrix, size, count * blocks, count * repeated)


def _mlp_chunks(plan: Plan, activations: int) -> dict[int, int]:
    """Return the number of chunks of trainer.mlp_chunks by their bytes; ``activations`` are the bytes of all."""
    trainer, unit = plan.config.trainer, plan.config.trainer.tp if plan.sp else 1
    token = trainer.micro_batch_size * plan.model.hidden_size * BYTES[plan.precision.compute_dtype]
    rows = activations // token // unit  # torch splits this rank's rows
    size = -(-rows // trainer.mlp_chunks)
    whole, rest = divmod(rows, size)
    return {size * token * unit: whole} | ({rest * token * unit: 1} if rest else {})


def _lora(plan: Plan, label: str, matrix: str, activations: int, blocks: int, recomputed: int) -> Iterator[Operation]:
    """Yield the operations of x Aᵀ, which is gathered or summed like the matrix's input or output."""
    stack, t = rank_work.adapters_of(plan, 0, matrix), plan.config.trainer.tp
    size = sum(stack.ranks) * (activations // plan.model.hidden_size) if stack else 0
    forward, backward = blocks + recomputed, blocks
    if plan.sp:
        kinds = {"reduce_scatter": forward, "all_gather": backward}
        if matrix not in arch.ROW_PARALLEL:
            kinds = {"all_gather": forward, "reduce_scatter": backward}
    else:
        kinds = {"all_reduce": forward if matrix in arch.ROW_PARALLEL else backward}
    for kind, calls in kinds.items():
        yield Operation(f"{label}: LoRA of {matrix}", "tp", kind, t, calls * (size > 0), size)
    if plan.config.finetune.use_dora and matrix in arch.ROW_PARALLEL:
        norms = sum(stack.rows) * FP32 if stack else 0
        yield Operation(f"{label}: DoRA's norms of {matrix}", "tp", "all_reduce", t, forward * (norms > 0), norms)


def _float8_maxima(plan: Plan, label: str, blocks: int, forward: int, activations: int) -> Iterator[Operation]:
    """Yield the all-reduces of maxima behind float8 scales, of eager blocks: ``forward`` and ``blocks`` backward."""
    recipe, hidden = plan.config.trainer.float8, plan.model.hidden_size
    if recipe is None:
        return
    key = ("tp", "all_reduce", plan.config.trainer.tp)
    columns = len(arch.FUSED) - len(arch.ROW_PARALLEL)
    if recipe == "tensorwise":
        with_gradient = int(plan.config.finetune.method != "lora")
        calls = forward * (columns + 2 * len(arch.ROW_PARALLEL))
        calls += blocks * (columns * (2 + with_gradient) + len(arch.ROW_PARALLEL) * (1 + with_gradient))
        yield Operation(f"{label}: maxima of float8 operands", *key, calls, FP32)
        return
    tokens = activations // (hidden * BYTES[plan.precision.compute_dtype])
    calls = forward * len(arch.ROW_PARALLEL) + blocks * columns
    yield Operation(f"{label}: maxima of float8 rows", *key, calls, tokens * FP32)
    yield Operation(f"{label}: maxima of float8 columns", *key, calls, hidden * FP32)


def _context_parallel(plan: Plan, chunks: list[_Chunk]) -> Iterator[Operation]:
    """Yield the exchanges of attention: keys and values, or with ulysses queries, keys, values and outputs."""
    trainer, cp = plan.config.trainer, plan.config.trainer.cp
    if cp == 1:
        return
    head = plan.config.data.length * trainer.micro_batch_size * arch.head_dim(plan.model)  # of the whole sequence
    head *= BYTES[plan.precision.compute_dtype]
    layers, full, selective = _block_passes(plan, (layer for chunk in chunks for layer in chunk.layers))
    stride, kv = plan.grid.stride("cp"), arch.kv_heads_per_rank(plan.model, trainer.tp)
    if trainer.cp_comm == "all_gather":
        both = 2 * kv * head
        yield Operation("keys and values, forward", "cp", "all_gather", cp, layers + full + selective, both, stride)
        yield Operation("keys and values, backward", "cp", "all_gather", cp, layers, both, stride)
        yield Operation("their gradients", "cp", "reduce_scatter", cp, layers, both, stride)
        return
    exchange, inputs = ("cp", "all_to_all", cp), 2 * layers + full + selective
    queries = plan.model.num_attention_heads // trainer.tp * head // cp
    yield Operation("queries", *exchange, inputs, queries, stride)
    yield Operation("keys, values", *exchange, 2 * inputs, max(kv, cp) * head // cp, stride)
    # Selective recomputation ends at the kernel.
    yield Operation("outputs", *exchange, 2 * layers + full, queries, stride)


def _attention_logits(plan: Plan, chunks: list[_Chunk]) -> Iterator[Operation]:
    """Yield the communication of QK-Clip: keys of whole sequences, and the largest logits of all heads."""
    model, trainer = plan.model, plan.config.trainer
    if plan.config.optim.qk_clip is None:
        return
    tokens, width = plan.config.data.length * trainer.micro_batch_size, BYTES[plan.precision.compute_dtype]
    keys = arch.kv_heads_per_rank(model, trainer.tp) * arch.head_dim(model) * tokens * width
    calls, stride = plan.num_microbatches * sum(len(chunk.layers) for chunk in chunks), plan.grid.stride("cp")
    yield Operation("keys for the largest logits", "cp", "all_gather", trainer.cp, calls, keys, stride)
    size = model.num_hidden_layers * model.num_attention_heads * FP32
    yield Operation("largest logits", "world", "all_reduce", plan.world_size, 1, size)


def _pipeline(plan: Plan, chunks: list[_Chunk]) -> Iterator[Operation]:
    """Yield the activations and gradients sent between virtual stages. The schedule does not change their number."""
    trainer, m = plan.config.trainer, plan.num_microbatches
    if trainer.pp == 1:
        return
    tokens = plan.grid.share(plan.sequence_split, plan.config.data.length * trainer.micro_batch_size)
    message = tokens * plan.model.hidden_size * BYTES[plan.precision.compute_dtype]
    onwards = m * sum(not chunk.is_last for chunk in chunks)
    back = m * sum(not chunk.is_first for chunk in chunks)
    following = plan.grid.stride("pp")
    for kind, forward, backward, way in (("send", onwards, back, following), ("recv", back, onwards, -following)):
        yield Operation("activations", "pp", kind, 2, forward, message, way)
        yield Operation("their gradients", "pp", kind, 2, backward, message, -way)


def _data_parallel(plan: Plan, chunks: list[_Chunk], tp_rank: int) -> Iterator[Operation]:
    """Yield the gathers and reduce-scatters of ``fully_shard`` per unit. Rows are padded to the shard size."""
    trainer, m, n = plan.config.trainer, plan.num_microbatches, plan.shard_size
    zero, inside = trainer.zero, trainer.secondary_group or plan.shard_size
    spacing = plan.grid.stride(plan.grid.same_weights[0])
    backward_gathers = m if zero == 3 else 0  # all blocks except the one that the backward pass starts with
    gathers = m if zero == 3 else 1
    sums = m if zero >= 2 else 1
    held: list[int] = []
    for chunk in chunks:
        for label, count, parameters in rank_work.units(plan, len(chunk.layers), chunk.is_first, chunk.is_last):
            held += [size for parameter in parameters for size in _rectangle_sizes(plan, parameter, tp_rank)] * count
            whole = n * sum(rank_work.gathered_bytes(plan, parameter, n) for parameter in parameters)
            sizes = [parameter.shard(n) for parameter in parameters]
            weights = n * exchanged_bytes(trainer.param_gather, sizes) if trainer.param_gather else whole
            yield Operation(f"{label}: weights", "dp", "all_gather", n, count * gathers, weights, spacing)
            in_backward = backward_gathers * (count - chunk.is_last) if label == "blocks" else 0
            size = whole if trainer.secondary_group else weights
            yield Operation(f"{label}: weights, backward", "dp", "all_gather", inside, in_backward, size, spacing)
            trained = [parameter.shard(n) for parameter in parameters if parameter.trained]
            for reason, kind, ranks, payload, stride in _reductions(plan, trained) if trained else ():
                yield Operation(f"{label}: {reason}", "dp", kind, ranks, count * sums, payload, stride)
    if plan.exchanges_signs:
        yield from _signs(plan.data_ranks, held, spacing)


def _reductions(plan: Plan, sizes: list[int]) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield (label, kind, ranks, payload, stride) of the gradient reductions of a unit: over shards, then over copies.

    ``sizes`` are the values per shard of each parameter.
    """
    n, copies, kind = plan.shard_size, plan.data_ranks // plan.shard_size, plan.config.trainer.grad_reduce
    stride = plan.grid.stride(plan.grid.same_weights[0])
    if kind is None:
        shard = sum(sizes) * BYTES[plan.precision.grad_accum_dtype]
        yield "gradients", "reduce_scatter", n, n * shard, stride
        if not plan.exchanges_signs:
            yield "gradients, over copies", "all_reduce", copies, shard, stride * n
        return
    inside, whole = plan.config.trainer.reduce_group, n * exchanged_bytes(kind, sizes)
    if inside is None:
        yield "gradients", "all_to_all", n, whole, stride
    else:
        yield "gradients, inside nodes", "all_to_all", inside, whole, stride
        yield "gradient sums, across nodes", "all_to_all", n // inside, whole // inside, stride * inside
    part = copies * exchanged_bytes(kind, [-(-size // copies) for size in sizes])
    yield "gradients, over copies", "all_to_all", copies, part, stride * n
    yield "gradient sums, over copies", "all_gather", copies, part, stride * n


def _rectangle_sizes(plan: Plan, parameter: rank_work.Parameter, tp_rank: int) -> list[int]:
    """Return the values of each rectangle of a Hugging Face tensor in a trained parameter (arch/hf_tp_mapping.py).

    Rows that pad the vocabulary are in none.
    """
    if not parameter.trained:
        return []
    if parameter.name in ("embed_tokens", "lm_head"):
        real = min(parameter.rows, plan.model.vocab_size - tp_rank * parameter.rows)
        return [real * parameter.columns] if real > 0 else []
    matrix, _, adapter = parameter.name.partition(".")
    if adapter in ("lora_A", "lora_B", MAGNITUDE):
        stack = rank_work.adapters_of(plan, 0, matrix)
        assert stack is not None
        a = [rank * parameter.columns for rank in stack.ranks]
        b = [rows * rank for rows, rank in zip(stack.rows, stack.ranks, strict=True)]
        return {"lora_A": a, "lora_B": b}.get(adapter, [*stack.rows])
    if matrix in arch.FUSED and not (matrix in arch.ROW_PARALLEL and adapter == "bias"):
        parts = arch.fused_rows(plan.model, matrix, plan.config.trainer.tp).values()
        return [rows * parameter.columns for rows in parts]
    return [parameter.rows * parameter.columns]


def _signs(ranks: int, sizes: list[int], stride: int) -> Iterator[Operation]:
    """Yield the exchange of 1-bit Adam after its warm-up (optim/onebit_adam.py), for rectangles of ``sizes`` values.

    During the warm-up it is one all_reduce of all gradients in fp32.
    """
    signs = ranks * sum(-(-size // (8 * ranks)) for size in sizes)
    scales = ranks * len(sizes) * FP32
    yield Operation("signs of momenta", "dp", "all_to_all", ranks, 1, signs, stride)
    yield Operation("signs of averages", "dp", "all_gather", ranks, 1, signs, stride)
    yield Operation("scales of momenta and averages", "dp", "all_gather", ranks, 2, scales, stride)


def _whole_matrices(plan: Plan, pp_rank: int, member: int) -> Iterator[Operation]:
    """Yield the exchanges of Muon (plan/muon_division.py). Rounds with equal payloads are one operation."""
    if not plan.config.optim.row.gathers_matrices:
        return
    work, width = MatrixWork(plan, pp_rank), BYTES[plan.precision.compute_dtype]
    axis = "dp" if plan.data_ranks > 1 else "tp"
    to_owners, results = zip(*work.sent_values(member), strict=True)
    rounds = [("orthogonalized matrices", results)]
    if len(work.same_replica(member)) > 1:
        rounds.insert(0, ("matrices to their owners", to_owners))
    for label, values in rounds:
        for size, calls in Counter(values).items():
            yield Operation(label, axis, "all_to_all", work.members, calls, size * width)


def _replicated_gradients(plan: Plan, chunks: list[_Chunk], shard_rank: int) -> Iterator[Operation]:
    """Yield the gradient all-reduces of parallel/replicated_gradients.py, for the rows of this rank's shard."""
    model, t, h, width = plan.model, plan.config.trainer.tp, plan.model.hidden_size, BYTES[plan.precision.param_dtype]

    def held(rows: int, requested: tuple[int, int]) -> int:
        """Return how many of the ``requested`` rows are in this rank's shard of ``rows``."""
        per_rank = -(-rows // plan.shard_size)
        start = shard_rank * per_rank
        return max(0, min(requested[1], start + per_rank, rows) - max(requested[0], start))

    layers = sum(len(chunk.layers) for chunk in chunks)
    first, last = (any(getattr(chunk, end) for chunk in chunks) for end in ("is_first", "is_last"))
    named = {parameter.name: parameter for parameter in rank_work.block_parameters(plan)}
    ends = {
        parameter.name: parameter
        for chunk in chunks
        for unit in rank_work.units(plan, len(chunk.layers), chunk.is_first, chunk.is_last)
        if unit.label != "blocks"
        for parameter in unit.parameters
    }
    trained = [name for name, parameter in named.items() if parameter.trained]
    vectors = [name for name in trained if arch.is_summed_over_tp(name, model, tp=t, sp=plan.sp)]
    if plan.sp or vectors:
        values = layers * sum(held(named[name].rows, (0, named[name].rows)) * named[name].columns for name in vectors)
        calls = int(bool(vectors) and layers > 0)
        if plan.sp and "norm" in ends and ends["norm"].trained:
            values, calls = values + held(h, (0, h)), 1
        label = "gradients of norms, biases and replicated LoRA matrices"
        yield Operation(label, "tp", "all_reduce", t, calls, values * width)
    copies = arch.kv_copies(model, t)
    shared = [name for name in arch.KV_HEADS if name in trained and name not in vectors]
    if copies > 1 and shared:
        values = 0
        for name in shared:
            rows, columns = named[name].rows, named[name].columns
            values += layers * held(rows, (0 if name == "k_norm" else rows - rank_work.key_rows(plan), rows)) * columns
        calls = int(values > 0)
        yield Operation("gradients of shared kv heads", "tp", "all_reduce", copies, calls, values * width)
    if model.tie_word_embeddings and plan.config.trainer.pp > 1 and rank_work.is_trained(plan, "lm_head"):
        vocabulary_rows = plan.padded_vocab_size // t
        payload = held(vocabulary_rows, (0, vocabulary_rows)) * h * width
        apart = (plan.config.trainer.pp - 1) * plan.grid.stride("pp")
        calls = int(first or last)
        yield Operation("gradient of the tied embedding", "pp", "all_reduce", 2, calls, payload, apart)
