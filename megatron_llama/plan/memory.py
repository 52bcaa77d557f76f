"""Memory of one rank per pipeline stage, and the size of a run's files. plan/rules/memory.py rejects runs by it.

Weights, gradients and optimizer states are exact; ``footprint`` adds activations, logits and buffers. Activations
are the saved tensors (``layer_activations``) times the micro batches in flight. The peak is at the loss with its
gradient, or at a recomputed block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megatron_llama.arch.attention_pattern import SCORES_AT_ONCE
from megatron_llama.arch.parameters import StageParameters, head_dim, loss_chunk, norms_branches, qk_norm
from megatron_llama.config.precision import BYTES, quantized_bytes, state_bytes_8bit
from megatron_llama.config.settings import KEPT_BY_TIME
from megatron_llama.plan.forecast_job import Job, job_of_plan
from megatron_llama.plan.muon_division import MatrixWork
from megatron_llama.plan.plan import COPIES, PLAIN, Plan
from megatron_llama.system.tables import gib, plural

USABLE = 0.94
"""Share of a device's memory for live tensors; driver, communication library and fragmentation take the rest."""
SURE = 0.9
"""Share of the forecast peak that a run certainly needs: the forecast's error is at most 10 %
(tests/tools/forecast/test_traffic.py)."""
FP32 = 4
LOG_SUM_EXP = 4
"""Bytes that attention saves per row and head."""


def stage_footprints(plan: Plan) -> list[Footprint]:
    """Return the bytes on one rank of each pipeline stage at the peak of a step, with activations."""
    job, footprints = job_of_plan(plan), []
    for number, stage in enumerate(plan.stages):
        states = rank_memory(plan, stage)
        on_host = 0
        if "optimizer" in plan.config.trainer.offload:  # states, and copies of weights and gradients
            shard = BYTES[plan.precision.param_dtype] * -(-stage.trained // plan.shard_size)
            states, on_host = states._replace(optimizer=0), states.optimizer + 2 * shard
        at_update = Footprint(*states, activations={}, logits=0, buffers=_update_buffers(plan, number))
        if plan.config.trainer.batch_schedule or microbatches_in_flight(job, number) < job.num_microbatches:
            needed = footprint(job, number, states)
            needed = max(needed, at_update, key=lambda moment: moment.total)
            footprints.append(replace(needed, host=needed.host + on_host))
            continue
        # All forward passes precede the first backward pass: compare the peak before it, without gradients, with the
        # peak after it, with one micro batch less.
        if job.num_microbatches == 1:
            after = Footprint(*states, activations={}, logits=0, buffers=0)
            working = min(states.gradients, _working(plan, stage))  # copies that gradients replace
            if plan.storage.frees_embedding_of(is_first=number == 0, is_last=number == plan.config.trainer.pp - 1):
                table = plan.padded_vocab_size // plan.config.trainer.tp * plan.model.hidden_size
                working -= min(working, table * BYTES[plan.precision.compute_dtype])
        else:
            after, working = footprint(replace(job, num_microbatches=job.num_microbatches - 1), number, states), 0
        before = footprint(job, number, States(states.weights, working, states.optimizer))
        largest = max(before, after, at_update, key=lambda moment: moment.total)
        footprints.append(replace(largest, host=before.host + on_host))
    return footprints


def _update_buffers(plan: Plan, stage: int) -> int:
    """Return the bytes of an optimizer's matrices at their peak in an update (optim/muon.py), or of exact gradients."""
    shard = -(-plan.stages[stage].trained // plan.shard_size)
    summed = BYTES[plan.precision.param_dtype] * shard if plan.config.trainer.exact else 0  # gradients, next to int64
    if not plan.config.optim.row.gathers_matrices:
        return summed
    work, width = MatrixWork(plan, stage), BYTES[plan.precision.compute_dtype]
    replicas = plan.data_ranks // plan.shard_size
    largest = max((work.shape(name) for names in work.flops for name in names), key=math.prod)
    whole, gram = math.prod(largest), min(largest) ** 2
    # The matrix, its normalized copy, the next iterate and two Gram matrices; later the result, its parts for each
    # replica as tensors and as one buffer, and this rank's parts of the round's matrices.
    received = whole * -(-work.members // (work.tp * work.shard_size))
    return width * max(3 * whole + 2 * gram, whole + 2 * replicas * whole * (work.members > 1) + received)


def _working(plan: Plan, stage: StageParameters) -> int:
    """Return the bytes of the compute-dtype weights that exist in addition to the parameters.

    fully_shard gathers them into a buffer, also in a group of one rank that casts. ZeRO 3 gathers block by block, which
    the buffers count. With ``copies`` storage only cast weights have a copy.
    """
    kind = plan.storage.kind
    if kind == PLAIN or plan.config.trainer.zero == 3:
        return 0
    quantized = stage.quantizable if plan.quantized else 0
    if kind == COPIES:
        cast = stage.trained if plan.frozen_dtype == plan.precision.compute_dtype else stage.held - quantized
        return cast * BYTES[plan.precision.compute_dtype]
    packed = quantized_bytes(plan.quantized, quantized) if plan.quantized else 0
    return (stage.held - quantized) * BYTES[plan.precision.compute_dtype] + packed


def rank_memory(plan: Plan, stage: StageParameters) -> States:
    """Return the bytes of one rank's weights, gradients and optimizer states."""
    trainer, precision, storage = plan.config.trainer, plan.precision, plan.storage
    quantized = stage.quantizable if plan.quantized else 0
    # LoRA's frozen weights are stored quantized or in frozen_dtype.
    packed = quantized_bytes(plan.quantized, quantized) if plan.quantized else 0
    shard = -(-stage.trained // plan.shard_size)
    frozen = -(-(stage.held - stage.trained - quantized) // plan.shard_size)
    # Weights that the optimizer updates: this rank's share from ZeRO 1 on.
    param_bytes = BYTES[precision.param_dtype]
    weights = param_bytes * shard + BYTES[plan.frozen_dtype] * frozen + -(-packed // plan.shard_size)
    working = _working(plan, stage)
    # Reduced gradients have the parameters' dtype unless Storage.keeps_bf16_grads. Below ZeRO 2 the sums are unsharded
    # until the last micro batch, in the accumulation dtype.
    bf16_grads = shard - stage.summed if storage.keeps_bf16_grads else 0
    gradients = param_bytes * (shard - bf16_grads) + BYTES[precision.compute_dtype] * bf16_grads
    if trainer.zero < 2 and not storage.one_micro_batch:
        gradients = max(gradients, stage.trained * BYTES[precision.grad_accum_dtype])
    if trainer.exact:  # int64 sums; ZeRO 2 and 3 scatter them after each micro batch
        gradients = 8 * (stage.trained if trainer.zero < 2 else shard)
    elif storage.one_micro_batch:
        # Each block frees its compute-dtype copy when its gradient exists, so only the larger of the two counts.
        working -= min(working, gradients)
    states = optimizer_bytes(plan, stage, plan.shard_size)
    if plan.exchanges_signs:  # compression errors of the averaged part
        states += BYTES[precision.optimizer_state_dtype] * -(-shard // plan.data_ranks)
    return States(weights + working, gradients, states)


def optimizer_bytes(plan: Plan, stage: StageParameters, ranks: int = 1) -> int:
    """Return the bytes of the optimizer states of ``stage`` on one of the ``ranks`` that share them."""
    row, width = plan.config.optim.row, BYTES[plan.precision.optimizer_state_dtype]
    in_blocks = stage.in_blocks if plan.config.optim.state_bits == 8 else 0
    in_matrices = stage.quantizable if row.matrix_states is not None else 0
    rest = -(-(stage.trained - in_blocks - in_matrices) // ranks) * width
    matrices = len(row.states_of(is_matrix=True)) * -(-in_matrices // ranks) * width
    return row.state_tensors * (rest + state_bytes_8bit(-(-in_blocks // ranks))) + matrices


class States(NamedTuple):
    """Bytes on one rank that do not depend on the batch."""

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: Mapping[str, int]
    """Saved activations by kind."""
    logits: int
    """Logits, their fp32 copies and gradients."""
    buffers: int
    """Buffers of communication, and temporary tensors of one block."""
    host: int = 0
    """Host memory of trainer.offload; not part of the total."""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def activation_bytes(self) -> int:
        """All activations."""
        return sum(self.activations.values())

    @property
    def total(self) -> int:
        """The peak."""
        return self.states + self.activation_bytes + self.logits + self.buffers

    def parts(self) -> dict[str, int]:
        """Return the bytes by component, with all activations together."""
        sizes = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "host"}
        return {**sizes, "activations": self.activation_bytes}


def microbatches_in_flight(job: Job, stage: int) -> float:
    """Return the micro batches in flight on a stage, in multiples of the whole stage (arXiv:2104.04473)."""
    if job.vpp == 1:
        return min(job.num_microbatches, job.pp - stage)
    chunks = 2 * (job.pp - stage - 1) + (job.vpp - 1) * job.pp + 1
    return min(job.num_microbatches * job.vpp, chunks) / job.vpp


def layer_activations(job: Job, recompute: str | None = None) -> dict[str, float]:
    """Return the bytes that one block saves for its backward pass of one micro batch, by kind."""
    recompute = recompute or job.recompute
    width, split = job.inner_bytes, job.tp if job.sp else 1
    stream = job.tokens * job.model.hidden_size * width  # [s, b, h]
    head = head_dim(job.model)
    queries, keys = job.queries / job.tp, max(job.keys / job.tp, head)
    if recompute == "full":
        return {"block inputs": stream / split}
    # Selective recomputes elementwise operators and attention, whose kernels save no scores.
    elementwise = recompute in ("elementwise", "selective")
    frozen, selective, chunked = bool(job.lora_parameters), recompute == "selective", job.mlp_chunks > 1
    # A frozen matrix needs no input for its gradient.
    inputs = (("qkv" in job.adapted) + (chunked or "gate_up" in job.adapted)) if frozen else 2
    norms = 2 * stream / split
    if not elementwise or norms_branches(job.model):  # else the inputs of qkv and gate_up are recomputed from norms
        norms += inputs * stream / split
    attention = job.tokens * (queries + 2 * keys + queries) * width  # q, k, v and the output
    if job.exchanges_heads:  # the output before and after the exchange; kv heads may be copied
        attention += job.tokens * (queries + 2 * (_exchanged_keys(job) - keys)) * width
    attention += LOG_SUM_EXP * job.tokens * job.model.num_attention_heads / job.tp
    if not elementwise:
        attention += job.tokens * (queries + keys) * width  # q and k both before and after the rotation
    if (norm := qk_norm(job.model)) and not selective:  # 1 / rms of each norm; q and k before the norm exist anyway
        attention += job.tokens * ((queries + keys) / head if norm == "head" else 2) * FP32
    ffn = job.tokens * job.model.intermediate_size / job.tp * width
    inner = 0.0
    if not chunked:
        inner = ffn * _inner_tensors(job, elementwise=elementwise, keeps_silu=not elementwise)
    saved = {"norms": norms, "attention": attention, "feed-forward": inner}
    if job.scaled_outputs:  # DoRA's outputs before the factors
        saved["DoRA"] = job.scaled_outputs * job.tokens * width
    return saved


def _inner_tensors(job: Job, *, elementwise: bool, keeps_silu: bool) -> int:
    """Return the number of tensors [s, b, intermediate] that the feed-forward network saves."""
    count = 3 - elementwise
    if job.kernels == "eager" and keeps_silu:
        count += 1  # silu's output
    if job.lora_parameters and "down" not in job.adapted and not elementwise:
        count -= 1
    return count


def footprint(job: Job, stage: int, states: States) -> Footprint:
    """Return the peak of one rank of a pipeline stage; ``states``: its weights, gradients and optimizer states."""
    layers, times, last = job.layers_by_stage[stage], microbatches_in_flight(job, stage), stage == job.pp - 1
    recomputing = -(-layers // job.recompute_every)  # number of blocks
    activations: dict[str, float] = defaultdict(float)
    for blocks, recompute in ((recomputing, job.recompute), (layers - recomputing, "none")):
        for kind, size in layer_activations(job, recompute).items() if blocks else ():
            activations[kind] += size * blocks * times
    host, back = 0.0, 0.0
    if job.offloads_activations:  # on the device: the current block's activations, and the next block's in transfer
        host, back = sum(activations.values()), min(2, layers) * sum(layer_activations(job).values())
        activations.clear()
    stream = job.tokens * job.model.hidden_size * job.inner_bytes
    split = job.tp if job.sp else 1
    activations["last norm"] = last * stream / split
    if job.pp > 1:
        activations["sent to the next stage"] = (not last) * times * stream / split
    head, buffers = last * _head(job), back + max(_block(job), _logits_of_attention(job))
    # Symmetric memory for overlapped matmuls: two parts of a stream, allocated at the first matmul (torch's
    # _pipelined_produce_and_all2all).
    exchanged = 2 * stream / job.tp if job.overlaps_tp else 0.0
    buffers += _gathered(job, stage) + exchanged
    # The peak is in the head, or in a block's backward pass.
    in_head = _gathered(job, stage, in_head=True) + exchanged
    head, buffers = (head, in_head) if last and head + in_head >= buffers else (0.0, buffers)
    saved = {kind: round(size) for kind, size in activations.items()}
    return Footprint(*states, saved, round(head), round(buffers), round(host))


def _head(job: Job) -> float:
    """Return the bytes of logits and loss, with the gradients that exist at the same time."""
    width, table, hidden = job.inner_bytes, job.vocab // job.tp, job.model.hidden_size
    chunk, weight = min(job.tokens, loss_chunk(hidden)), table * hidden
    fp32_copy = FP32 if job.upcasts_logits and width < FP32 else 0
    logits = chunk * table * (width + fp32_copy)
    stream = job.tokens * hidden * width  # the norm's output and its gradient, sharded or not
    streams = stream + stream / (job.tp if job.sp else 1)
    if job.lora_parameters:
        return logits + streams
    if chunk == job.tokens:
        return logits + streams + weight * width
    # The fp32 sum over chunks, plus a chunk's logits or the rounded sum.
    return weight * FP32 + max(logits, weight * width if width < FP32 else 0) + streams


def _gathered(job: Job, stage: int, in_head: bool = False) -> float:
    """Return the bytes of ZeRO 3's gathered weights: the current and the next block; in the head the last block, and
    the head's weight with its buffer; and the second copy of trainer.secondary_group."""
    if job.zero < 3:
        return 0.0
    layer, table = job.block_parameters, job.vocab // job.tp * job.model.hidden_size
    last = stage == job.pp - 1
    second = (job.layers_by_stage[stage] - last) * layer / job.secondary_group if job.secondary_group else 0
    return ((layer + 2 * table if in_head else 2 * layer) + second) * job.state.weight


def _block(job: Job) -> float:
    """Return the bytes of a block in the backward pass: recomputed tensors, the feed-forward's gradients, a matrix."""
    saved = layer_activations(job, "none" if job.recompute == "full" else None)
    recomputed = sum(saved.values()) if job.recompute == "full" else 0.0
    gradients, largest = 3, 0.0
    recomputed_in_chunk = _inner_tensors(job, elementwise=False, keeps_silu=True) if job.mlp_chunks > 1 else 0
    inner = (gradients + recomputed_in_chunk) * job.tokens * job.model.intermediate_size / job.tp / job.mlp_chunks
    if divided := _divided_attention(job):
        # The feed-forward's part of the block is freed before attention's backward pass. Offloaded blocks have copies.
        freed = 0 if job.offloads_activations else saved.get("feed-forward", 0) + saved.get("norms", 0) / 2
        inner = max(inner, (divided - freed) / job.inner_bytes)
    matrix = max(rows * columns for rows, columns in job.matmuls)
    if not job.lora_parameters:
        largest = matrix
    made = (inner + largest) * job.inner_bytes + matrix * job.unpacked_bytes
    if job.mlp_chunks > 1:  # a norm's backward pass: four tensors in fp32, two gradients of the stream
        stream = job.tokens * job.model.hidden_size / (job.tp if job.sp else 1)
        made = max(made, stream * (4 * FP32 + 2 * job.inner_bytes))
    return recomputed + made


def _logits_of_attention(job: Job) -> float:
    """Return the bytes of QK-Clip's block of scores, and of gathered keys, in the forward pass of a block."""
    if not job.records_logits:
        return 0.0
    gathered = job.tokens * job.cp * job.keys / job.tp * job.inner_bytes * 2 if job.cp > 1 else 0.0
    heads = job.micro_batch * job.model.num_attention_heads / job.tp
    step = math.isqrt(int(SCORES_AT_ONCE // heads))
    queries = job.seq // (2 * job.cp) if job.cp > 1 else job.seq  # adjacent ones
    # Full recomputation has this block's tensors too; otherwise the block has not saved its feed-forward yet.
    saved = layer_activations(job, "none")
    block = saved["attention"] if job.recompute == "full" else -saved["feed-forward"]
    return FP32 * heads * min(step, queries) * min(step, job.seq) + gathered + block


def _exchanged_keys(job: Job) -> float:
    """Return the width of the keys that ulysses exchanges: at least one head per context-parallel rank."""
    return max(job.keys / job.tp, job.cp * head_dim(job.model))


def _divided_attention(job: Job) -> float:
    """Return the bytes of buffers in attention's backward pass over context-parallel ranks.

    all_gather: keys and values of whole sequences, and their fp32 gradients with a rounded copy. ulysses: gradients of
    queries, keys and values, with a copy.
    """
    if job.cp == 1:
        return 0.0
    width, queries, keys = job.inner_bytes, job.queries / job.tp, job.keys / job.tp
    if job.exchanges_heads:
        return 2 * job.tokens * (queries + 2 * _exchanged_keys(job)) * width
    whole = 2 * job.tokens * job.cp * max(keys, head_dim(job.model))
    copies = width + FP32 + (width if width < FP32 else 0)
    return whole * copies + job.tokens * queries * FP32


# Size of the files that a run writes to its folder.

LOG_BYTES, LOG_BYTES_PER_STEP = 1 << 20, 1 << 10
"""Margin for metrics, events, loss.png and the plan."""


@dataclass(frozen=True)
class DiskUse:
    """Bytes that a run adds to its folder."""

    checkpoint: int
    """Size of a checkpoint."""
    sure: int
    """New checkpoints that exist at the same time in any case, with the one in progress."""
    most: int | None
    """Checkpoints if the run lasts long enough for each save by time; None: unlimited."""
    export: int
    """Size of the exported weights."""
    logs: int

    @property
    def sure_bytes(self) -> int:
        """Bytes that the run needs in any case."""
        return self.sure * self.checkpoint + self.export + self.logs

    def describe(self) -> str:
        """Return the sizes in words."""
        if self.most == 0:
            return f"{gib(self.logs)} of logs"
        parts = [f"{self.most} {plural(self.most, 'checkpoint')} of {gib(self.checkpoint)}"] if self.most else []
        parts = parts or [f"{gib(self.checkpoint)} per checkpoint"]
        parts += [f"exported weights {gib(self.export)}"] if self.export else []
        total = f" = {gib(self.most * self.checkpoint + self.export + self.logs)}" if self.most else ""
        return " + ".join([*parts, f"logs {gib(self.logs)}"]) + total


def disk_use(plan: Plan, first: int, saved: int) -> DiskUse:
    """Return the bytes that a run adds to its folder.

    Args:
        first: Step from which the run starts.
        saved: Checkpoints in the folder, which later ones replace if a limit is set.
    """
    saves, steps = plan.config.checkpoint, plan.config.trainer.steps
    every, trains = saves.every_steps, steps > first
    periodic = steps // every - first // every if every and trains else 0
    last = saves.save_last and (trains or steps == 0) and not (periodic and every and steps % every == 0)
    sure, most = periodic + last, None if saves.every_minutes and trains else periodic + last
    if saves.dir is not None:  # the run's folder has no checkpoint
        sure, most = 0, 0
    limit = None if saves.dir else saves.keep or (KEPT_BY_TIME if plan.replaces_checkpoints and not every else None)
    if limit is not None:
        distance = math.lcm(every or 1, saves.keep_every or 0)
        permanent = steps // distance - first // distance if distance else 0
        # The one in progress is complete before the oldest is deleted.
        peak = max(1, limit + 1 + max(0, permanent - limit) - saved)
        sure = min(sure, peak)
        most = peak + saves.keep_best if most is None else min(most, peak + saves.keep_best)
    export = BYTES[plan.precision.compute_dtype] * plan.whole.held if saves.export_hf else 0
    logs = LOG_BYTES + LOG_BYTES_PER_STEP * max(0, steps - first)
    weights = BYTES[plan.precision.param_dtype] * plan.whole.trained
    return DiskUse(weights + optimizer_bytes(plan, plan.whole), sure, most, export, logs)
