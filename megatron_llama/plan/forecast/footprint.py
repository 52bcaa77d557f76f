"""Bytes on one rank of each pipeline stage, by what they are for: of our own runs and of other programs'.

Weights, gradients and optimizer states follow from parameters, precision and sharding. Activations are counted tensor
by tensor as a program's backward pass keeps them (``kept_by_layer``), times the micro batches that are under way at
once. The largest moment is the one in which the loss and its gradient are there on top, or a block is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron_llama.arch.shapes import loss_chunk
from megatron_llama.plan.forecast.training_job import Job

FP32 = 4
LOG_SUM_EXP = 4
"""Bytes that attention keeps for each row and head."""


class States(NamedTuple):
    """Bytes on one rank that do not depend on the batch."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Weights, gradients and optimizer states."""
        return sum(self)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank at the largest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: Mapping[str, int]
    """By kind."""
    logits: int
    """Logits, their fp32 copies and gradients."""
    buffers: int
    """What communication gathers and scatters, and what one block needs while it is computed."""
    host: int = 0
    """What trainer.offload puts into the host's memory; not part of the total."""

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept(self) -> int:
        """All activations."""
        return sum(self.activations.values())

    @property
    def total(self) -> int:
        """The peak."""
        return self.states + self.kept + self.logits + self.buffers

    def parts(self) -> dict[str, int]:
        """Bytes by component, the activations as one."""
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "host"}
        return {**found, "activations": self.kept}


def under_way(job: Job, stage: int) -> float:
    """Micro batches whose activations a stage holds at once, as multiples of the whole stage (arXiv:2104.04473)."""
    if job.pp == 1:
        return 1.0
    if job.vpp == 1:
        return min(job.num_microbatches, job.pp - stage)
    chunks = 2 * (job.pp - stage - 1) + (job.vpp - 1) * job.pp + 1
    return min(job.num_microbatches * job.vpp, chunks) / job.vpp


def kept_by_layer(job: Job, recompute: str | None = None) -> dict[str, float]:
    """Bytes that the backward pass of one block keeps of one micro batch, by kind."""
    recompute = recompute or job.recompute
    shape, program, width = job.shape, job.program, job.inner_bytes
    split = job.tp if job.sp else 1
    stream = job.tokens * shape.hidden * width  # [s, b, h]
    queries, keys = shape.queries / job.tp, max(shape.keys / job.tp, shape.head_dim)
    if recompute == "full":
        return {"block inputs": stream / split}
    # Our selective is elementwise and attention, whose kernels keep no scores.
    again = recompute == "elementwise" or (recompute == "selective" and program.chunks_logits)
    frozen, selective = bool(job.lora_parameters), recompute == "selective"
    # A frozen matrix needs no input for its gradient.
    inputs = (("qkv" in job.adapted) + ("gate_up" in job.adapted)) if frozen else 2
    norms = 2 * stream / split + (not again) * inputs * stream / (1 if program.keeps_gathered else split)
    attention = job.tokens * (queries + 2 * keys + queries) * width  # q, k, v and what comes out
    if program.attention != "scores":
        attention += LOG_SUM_EXP * job.tokens * shape.heads / job.tp
    if program.kernels != "fused" and not selective and not again:
        attention += job.tokens * (queries + keys) * width  # after the rotation, beside before it
    ffn = job.tokens * shape.ffn / job.tp * width
    inner = ((3 if shape.gated else 2) - again) * ffn
    if shape.gated and program.kernels == "eager" and not selective and not again:
        inner += ffn  # silu's output
    if frozen and "down" not in job.adapted and not again:
        inner -= ffn
    found = {"norms": norms, "attention": attention, "feed-forward": inner}
    if program.dropout:
        found["dropout"] = 2 * job.tokens * shape.hidden / split
    if program.attention == "scores" and not selective:
        # The softmax, its dropout's mask and output (arXiv:2205.05198).
        found["scores"] = 5 * shape.heads / job.tp * job.seq * job.tokens
    if recompute == "half":
        # torchtitan: every second product is kept, attention's output too.
        outputs = sum(columns for _, columns in shape.layer_products(job.tp)) - queries
        return {"block inputs": stream / split, "products": (outputs / 2 + 2 * queries) * job.tokens * width}
    return found


def footprint(job: Job, stage: int, states: States | None = None) -> Footprint:
    """The peak of one rank of pipeline stage ``stage``; ``states`` where more is known of them than ``job.state``."""
    weights, gradients, optimizer = states or _states(job, stage)
    layers, times, last = job.layers_by_stage[stage], under_way(job, stage), stage == job.pp - 1
    again = -(-layers // job.recompute_every)  # blocks that recompute
    activations: dict[str, float] = defaultdict(float)
    for blocks, recompute in ((again, job.recompute), (layers - again, "none")):
        for kind, size in kept_by_layer(job, recompute).items() if blocks else ():
            activations[kind] += size * blocks * times
    host, back = 0.0, 0.0
    if job.offloads_activations:  # the block that computes has its own back, and the next one's are on their way
        host, back = sum(activations.values()), min(2, layers) * sum(kept_by_layer(job).values())
        activations.clear()
    stream = job.tokens * job.shape.hidden * job.inner_bytes
    split = job.tp if job.sp else 1
    if job.program.chunks_logits:
        activations["last norm"] = last * stream / split
    if job.program.keeps_gathered:
        activations["head's input"] = last * stream
    if job.pp > 1 and job.program.kernels != "fused":  # Megatron-LM frees what it has sent
        activations["sent to the next stage"] = (not last) * times * stream / split
    head, buffers = last * _head(job), back + _block(job, stage) + _gathered(job, stage) + _exchanged(job)
    if job.program.chunks_logits:  # the head's moment, or that of a block in the backward pass
        in_head = _gathered(job, stage, in_head=True) + _exchanged(job)
        head, buffers = (head, in_head) if last and head + in_head >= buffers else (0.0, buffers)
    kept = {kind: round(size) for kind, size in activations.items()}
    return Footprint(weights, gradients, optimizer, kept, round(head), round(buffers), round(host))


def _states(job: Job, stage: int) -> States:
    """Of other programs: what is kept of each trained and each frozen parameter, shared as ZeRO's stage says."""
    held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
    adapters, frozen = (trained, held) if job.lora_parameters else (0, 0)
    state, share = job.state, job.shard_size if job.zero else 1
    if job.zero < 3:
        gradients = trained * state.gradient / (share if job.zero == 2 else 1)
        optimizer = trained * (state.master + state.moments) / share
        return States(round((held + adapters) * state.weight), round(gradients), round(optimizer))
    kept = state.master or state.weight  # the shards are what the optimizer updates
    weights, gradients = (trained * kept + frozen * state.weight) / share, trained * kept / share
    if job.pp > 1:  # a pipeline keeps both whole between micro batches
        weights, gradients = weights + held * state.weight, gradients + trained * state.gradient
    return States(round(weights), round(gradients), round(trained * state.moments / share))


def _head(job: Job) -> float:
    """Logits and loss, with the gradients that are there at the same time."""
    width, table = job.inner_bytes, -(-job.shape.vocab // job.tp)
    if not job.program.chunks_logits:
        sharded = job.program.sharded_logit_bytes if job.tp > 1 else None
        return float(job.tokens * table * (sharded or job.program.logit_bytes))
    chunk, weight = min(job.tokens, loss_chunk(job.shape.hidden)), table * job.shape.hidden
    wide = FP32 if job.program.widens_logits and width < FP32 else 0
    logits = chunk * table * (width + wide)
    stream = job.tokens * job.shape.hidden * width  # the norm's output and the gradient of it, in parts or whole
    streams = stream + stream / (job.tp if job.sp else 1)
    if job.lora_parameters:
        return logits + streams
    if chunk == job.tokens:
        return logits + streams + weight * width
    # The sum over chunks, beside a chunk's logits or beside what it is rounded to.
    return weight * FP32 + max(logits, weight * width if width < FP32 else 0) + streams


def _exchanged(job: Job) -> float:
    """Symmetric memory in which overlapped products exchange pieces: two parts of a stream, from the first product on
    (torch's _pipelined_produce_and_all2all)."""
    return 2 * job.tokens / job.tp * job.shape.hidden * job.inner_bytes if job.program.symmetric_memory else 0.0


def _gathered(job: Job, stage: int, in_head: bool = False) -> float:
    """ZeRO 3's buffers. Of our own runs: the block that computes and the next one; in the head the last block, and the
    head's weight with the buffer that it came in; and the second copy of the blocks that a node keeps. Of others:
    tables that are gathered as one, and two blocks, with gradients of one of each."""
    if job.zero < 3 or (job.pp > 1 and not job.program.reshards):
        return 0.0
    first, last = stage == 0, stage == job.pp - 1
    layer = job.shape.layer_parameters(job.tp)
    tables = first + (last and not (job.shape.tied and first))
    table = -(-job.shape.vocab // job.tp) * job.shape.hidden
    if job.program.reshards:
        kept = (job.layers_by_stage[stage] - last) * layer / job.secondary_group if job.secondary_group else 0
        return ((layer + 2 * table if in_head else 2 * layer) + kept) * job.state.weight
    return (2 * layer + table * tables) * job.state.weight + (layer + table * tables / 2) * job.state.gradient


def _block(job: Job, stage: int) -> float:
    """A block in the backward pass: what is computed again, and gradients of the feed-forward's inner tensors."""
    again = sum(kept_by_layer(job, "none").values()) if job.recompute == "full" else 0.0
    if stage == job.pp - 1 and not job.program.chunks_logits:
        return again
    inner = 3 * job.tokens * job.shape.ffn / job.tp
    largest = 0 if job.lora_parameters else max(rows * columns for rows, columns in job.shape.layer_products(job.tp))
    return again + (inner + largest) * job.inner_bytes
