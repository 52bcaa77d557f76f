"""Bytes on one rank of each pipeline stage, by what they are for: of our own runs and of other programs'.

Weights, gradients and optimizer states follow from parameters, precision and sharding. Activations are counted tensor
by tensor as a program's backward pass keeps them (``kept_by_layer``), times the micro batches that are under way at
once. The largest moment is the one in which the loss and its gradient are there on top, or a block is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_llama.plan.forecast.training_job import Job

LOG_SUM_EXP = 4
"""Bytes that attention keeps for each row and head."""


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
        found = {part.name: getattr(self, part.name) for part in fields(self)}
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
    norms = 2 * stream / split + 2 * stream / (1 if program.keeps_gathered else split)
    attention = job.tokens * (queries + 2 * keys + queries) * width  # q, k, v and what comes out
    attention += LOG_SUM_EXP * job.tokens * shape.heads / job.tp
    if program.kernels != "fused":
        attention += job.tokens * (queries + keys) * width  # after the rotation, beside before it
    ffn = job.tokens * shape.ffn / job.tp * width
    inner = (3 if shape.gated else 2) * ffn
    if shape.gated and program.kernels == "eager":
        inner += ffn  # silu's output
    if job.lora_parameters:  # a frozen matrix needs no input for its gradient
        norms -= stream / (1 if program.keeps_gathered else split)
        inner -= ffn
    found = {"norms": norms, "attention": attention, "feed-forward": inner}
    if program.dropout:
        found["dropout"] = 2 * job.tokens * shape.hidden / split
    if program.attention == "scores" and recompute != "selective":
        # The softmax, its dropout's mask and output (arXiv:2205.05198).
        found["scores"] = 5 * shape.heads / job.tp * job.seq * job.tokens
    if recompute == "half":
        # torchtitan: every second product is kept, attention's output too.
        outputs = sum(columns for _, columns in shape.layer_products(job.tp)) - queries
        return {"block inputs": stream / split, "products": (outputs / 2 + 2 * queries) * job.tokens * width}
    return found


def footprint(job: Job, stage: int) -> Footprint:
    """The peak of one rank of pipeline stage ``stage``."""
    layers, held = job.layers_by_stage[stage], job.stage_parameters(stage)
    adapters = job.lora_parameters * layers
    trained, frozen = (adapters, held) if job.lora_parameters else (held, 0)
    state, share = job.state, job.shard_size if job.zero else 1
    whole = job.zero == 3 and job.pp == 1  # a pipeline keeps weights and gradients whole between micro batches
    by_weights = job.zero == 3
    width = state.weight
    if by_weights:
        kept_width = state.master or width
        weights = (trained * kept_width + frozen * width) / share + (0 if whole else held * width)
        gradients = trained * kept_width / share + (0 if whole else trained * state.gradient)
        optimizer = trained * state.moments / share
    else:
        weights = held * width + (adapters * width)
        gradients = trained * state.gradient / (share if job.zero == 2 else 1)
        optimizer = trained * (state.master + state.moments) / share
    times = under_way(job, stage)
    activations = {kind: round(size * layers * times) for kind, size in kept_by_layer(job).items()}
    last = stage == job.pp - 1
    logits = last * job.tokens * -(-job.shape.vocab // job.tp) * job.program.logit_bytes
    stream = job.tokens * job.shape.hidden * job.inner_bytes
    if job.program.keeps_gathered:
        activations["head's input"] = round(last * stream)
    if job.pp > 1 and job.program.kernels != "fused":  # Megatron-LM frees what it has sent
        activations["sent to the next stage"] = round((not last) * times * stream / (job.tp if job.sp else 1))
    buffers = _buffers(job, stage)
    return Footprint(round(weights), round(gradients), round(optimizer), activations, round(logits), round(buffers))


def _buffers(job: Job, stage: int) -> float:
    """Two blocks' gathered weights and one's gradients where they are sharded; a block's activations that are made
    again."""
    layer = job.shape.layer_parameters(job.tp)
    gathered = 0.0
    if job.zero == 3 and job.pp == 1:
        table = job.shape.vocab // job.tp * job.shape.hidden * (1 if job.shape.tied else 2)
        gathered = (2 * layer + table) * job.state.weight + (layer + table / 2) * job.state.gradient
    again = 0.0
    if job.recompute == "full":
        again = sum(kept_by_layer(job, "none").values())
    # The backward pass of a block: gradients of the feed-forward's inner tensors.
    inner = 0.0 if stage == job.pp - 1 else 3 * job.tokens * job.shape.ffn / job.tp * job.inner_bytes
    return gathered + again + inner
