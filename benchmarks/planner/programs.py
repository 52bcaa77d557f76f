"""Training programs of other frameworks: their memory and step time, as differences from this project's formulas."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_llama.arch.parameters import head_dim
from megatron_llama.plan.forecast_job import Job
from megatron_llama.plan.memory import LOG_SUM_EXP, Footprint, States, microbatches_in_flight
from megatron_llama.tools.forecast import step_time
from megatron_llama.tools.forecast.hardware import HardwareSpec


@dataclass(frozen=True)
class Program:
    """Properties of a training program that affect memory and time."""

    name: str
    attention: str = "flash"
    """``scores``: all attention scores are computed and saved; ``flash``: neither, in torch's kernels (FlashAttention
    2); ``flash 1``: in FlashAttention 1; ``tuned``: in kernels for the device (cuDNN, FlashAttention 3)."""
    kernels: str = "eager"
    """Kernels between the matmuls: ``eager`` (one per operator), ``compiled`` (torch.compile), ``fused``
    (hand-written)."""
    overlaps_tp: bool = False
    """Tensor-parallel communication is chunked and overlaps the matmuls."""
    overlaps_dp: bool = True
    """Gradient reduction overlaps the backward pass, weight gathering the forward pass."""
    dropout: bool = False
    """Dropout masks are saved."""
    keeps_gathered: bool = False
    """With sequence parallelism, gathered inputs of matmuls are saved instead of each rank's part."""
    stages_by_cost: bool = False
    """Pipeline stages are filled by cost, with the head counted by its parameters; else evenly."""
    waits_for_messages: bool = False
    """The host waits for the size of each message between stages, so it never runs ahead of the device."""
    loss_in_steps: bool = False
    """The loss is computed in fp32 with one kernel per operator, as Megatron's vocabulary-parallel cross entropy; else
    one kernel reads and writes the logits a few times."""
    logit_bytes: int = 12
    """Bytes per logit when its gradient is computed: copies in 16 and 32 bits."""
    sharded_logit_bytes: int | None = None
    """``logit_bytes`` with a tp-sharded vocabulary, if it differs.

    DTensor's loss saves four fp32 tensors: log-probabilities, their gradient, the softmax, and the softmax times the
    sum of the gradient (torch's distributed/tensor/parallel/loss.py)."""


_TABLE = tomllib.loads(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))
PROGRAMS = {name: Program(**fields) for name, fields in _TABLE.items()}
"""Programs by name; rows.py assigns one to each row of a table."""


@dataclass(frozen=True)
class PublishedJob(Job):
    """A run of another program. ``recompute`` may also be half: every second GEMM is saved, as in torchtitan."""

    program: Program = PROGRAMS["megatron"]
    gated: bool = True
    """SwiGLU with three matrices; else an MLP with two."""
    learned_positions: int = 0
    """Rows of the learned position embedding."""

    @property
    def attention_kernel(self) -> str:  # type: ignore[override]
        """Kernel of attention."""
        return self.program.attention

    @property
    def loss_kernels(self) -> str:  # type: ignore[override]
        """Kernels of the loss, a constant's name after ``passes.``."""
        return "loss" if self.program.loss_in_steps else self.program.kernels

    @property
    def ffn_streams(self) -> int:  # type: ignore[override]
        """Tensors [s, b, intermediate] of the feed-forward."""
        return 3 if self.gated else 2

    @cached_property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each matmul of a block on one tensor-parallel rank: qkv, o, gate_up, down."""
        hidden, ffn, head = self.model.hidden_size, self.model.intermediate_size // self.tp, head_dim(self.model)
        queries, keys = self.queries // self.tp, max(self.keys // head // self.tp, 1) * head
        gate_up = (2 if self.gated else 1) * self.model.intermediate_size // self.tp
        return (hidden, queries + 2 * keys), (queries, hidden), (hidden, gate_up), (ffn, hidden)

    @property
    def block_recomputed(self) -> float:
        """Share of a block that recomputation repeats as a whole."""
        return {"full": 1.0, "half": 0.5}.get(self.recompute, 0.0)

    @property
    def attention_recomputed(self) -> float:
        """Share of the attention core that selective recomputation repeats."""
        return float(self.program.attention in ("scores", "tuned") and self.recompute == "selective")

    elementwise_recomputed = 0.0
    """No program repeats norms, rotary embeddings and activations."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.model.vocab_size

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """Layers of each stage: even, or filled by cost until an equal share; the last stage has the rest."""
        if not self.program.stages_by_cost:
            return super().layers_by_stage
        layers = self.model.num_hidden_layers
        head = self.vocab * self.model.hidden_size / replace(self, tp=1).block_parameters
        share, left, split = (layers + head) / self.pp, layers, []
        for stage in range(self.pp):
            split.append(left if stage == self.pp - 1 else min(left, math.ceil(share)))
            left -= split[-1]
        return tuple(split)

    def stage_parameters(self, stage: int) -> int:
        """Return the parameters that a rank of a stage holds, without LoRA's."""
        first, last, hidden = stage == 0, stage == self.pp - 1, self.model.hidden_size
        blocks = self.layers_by_stage[stage] * self.block_parameters
        return blocks + self.tables(stage) * self.table + first * self.learned_positions * hidden + last * hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of a block on one tensor-parallel rank: matrices and two norms."""
        return sum(rows * columns for rows, columns in self.matmuls) + 2 * self.model.hidden_size

    @property
    def table(self) -> int:
        """Elements of the embedding on one tensor-parallel rank."""
        return -(-self.vocab // self.tp) * self.model.hidden_size

    def tables(self, stage: int) -> int:
        """Return how many embeddings and heads a stage holds."""
        first, last = stage == 0, stage == self.pp - 1
        return first + (last and not (self.model.tie_word_embeddings and first))


class PublishedStep(step_time.StepModel):
    """Time of a step of another program."""

    job: PublishedJob

    def overlap(self, on_device: float, on_host: float) -> float:
        """Return the seconds of a stage and micro batch."""
        in_turn = self.job.pp > 1 and self.job.program.waits_for_messages
        return on_device + on_host if in_turn else super().overlap(on_device, on_host)

    def attention(self, recomputed: float) -> float:
        """Return the seconds of the attention core; materialized scores add memory traffic."""
        job, device, constants, keys = self.job, self.device, self.constants, self.job.document or self.job.seq
        if job.program.attention != "scores":
            return super().attention(recomputed)
        flops = 4 * job.tokens * keys * job.queries / job.tp
        form = device.format_used("bf16" if job.format in step_time.LOW_PRECISION else job.format)
        rate = device.peaks[form] * constants.get(f"matmul.{device.family}.{form}", device.reach[form]) * 0.6
        elements = job.tokens * keys * job.model.num_attention_heads / job.tp
        scores = elements * 2 * constants["passes.scores"] / (device.bandwidth * step_time.MEMORY_REACH)
        return (flops / rate + scores) * (3 + recomputed)

    def context_parallel(self, layer: step_time.StepTime) -> float:
        """Return the exposed seconds of a ring of keys and values."""
        job, exposed = self.job, self.constants["exposed.cp"]
        if job.cp == 1:
            return 0.0
        bandwidth = ring_bandwidth(job, self.device, self.constants["network.share"])
        passing = 3 * (job.cp - 1) * step_time.key_bytes(job) / bandwidth
        return exposed * passing + max(0.0, (1 - exposed) * passing - layer.attention)

    def gathered_bytes(self, weights: float, trained: float) -> float:
        """Return the bytes of gathered weights: frozen ones are not sharded."""
        return weights * trained

    def exposed_data(self, moving: float, window: float) -> float:
        """Return the exposed seconds of data-parallel communication."""
        return super().exposed_data(moving, window) if self.job.program.overlaps_dp else moving


def ring_bandwidth(job: Job, device: HardwareSpec, network_share: float) -> float:
    """Return the bytes/s at which context-parallel ranks pass keys and values around a ring.

    Each rank sends to the next one only. All ranks wait for the slowest transfer, so a ring over several nodes has the
    speed of one rank's network card, not of all cards of a node.
    """
    return network_share * device.network if job.tp * job.cp > device.per_node else step_time.RING_SHARE * device.link


def layer_activations(job: PublishedJob) -> dict[str, float]:
    """Return the bytes that one block saves for its backward pass of one micro batch, by kind."""
    program, width, tp, tokens = job.program, job.inner_bytes, job.tp, job.tokens
    split, hidden, heads = job.tp if job.sp else 1, job.model.hidden_size, job.model.num_attention_heads
    stream, queries, keys = tokens * hidden * width, job.queries / tp, max(job.keys / tp, head_dim(job.model))
    if job.recompute == "full":
        return {"block inputs": stream / split}
    if job.recompute == "half":  # torchtitan saves every second matmul and attention's output
        outputs = sum(columns for _, columns in job.matmuls) - queries
        return {"block inputs": stream / split, "products": (outputs / 2 + 2 * queries) * tokens * width}
    selective, frozen = job.recompute == "selective", bool(job.lora_parameters)
    # A frozen matrix needs no input for its gradient.
    inputs = ("qkv" in job.adapted) + ("gate_up" in job.adapted) if frozen else 2
    norms = 2 * stream / split + inputs * stream / (1 if program.keeps_gathered else split)
    attention = tokens * (queries + 2 * keys + queries) * width
    if program.attention != "scores":
        attention += LOG_SUM_EXP * tokens * heads / tp
    if program.kernels != "fused" and not selective:
        attention += tokens * (queries + keys) * width  # q and k both before and after the rotation
    inner = job.ffn_streams + (job.gated and program.kernels == "eager" and not selective)  # silu's output
    inner -= frozen and "down" not in job.adapted
    ffn = tokens * job.model.intermediate_size / tp * width
    saved = {"norms": norms, "attention": attention, "feed-forward": ffn * inner}
    if program.dropout:
        saved["dropout"] = 2 * tokens * hidden / split
    if program.attention == "scores" and not selective:
        saved["scores"] = 5 * heads / tp * job.seq * tokens  # softmax, dropout mask and output (arXiv:2205.05198)
    return saved


def footprint(job: PublishedJob, stage: int) -> Footprint:
    """Return the peak of one rank of a pipeline stage."""
    program, split, last = job.program, job.tp if job.sp else 1, stage == job.pp - 1
    layers, times = job.layers_by_stage[stage], microbatches_in_flight(job, stage)
    activations: dict[str, float] = defaultdict(float)
    saved = layer_activations(job)
    for kind, size in saved.items():
        activations[kind] += size * layers * times
    stream = job.tokens * job.model.hidden_size * job.inner_bytes
    if program.keeps_gathered:
        activations["head's input"] = last * stream
    if job.pp > 1 and program.kernels != "fused":  # Megatron-LM frees sent tensors
        activations["sent to the next stage"] = (not last) * times * stream / split
    per_logit = program.sharded_logit_bytes if job.tp > 1 else None
    logits = last * float(job.tokens * -(-job.vocab // job.tp) * (per_logit or program.logit_bytes))
    recomputed = 0.0
    if job.recompute == "full":
        recomputed = sum(layer_activations(replace(job, recompute="none")).values())
    working = 0.0
    if not last:  # the feed-forward's gradients, and the gradient of the largest matrix
        largest = 0 if job.lora_parameters else max(rows * columns for rows, columns in job.matmuls)
        working = (3 * job.tokens * job.model.intermediate_size / job.tp + largest) * job.inner_bytes
    rounded = {kind: round(size) for kind, size in activations.items()}
    return Footprint(*_states(job, stage), rounded, round(logits), round(recomputed + working + _gathered(job, stage)))


def _gathered(job: PublishedJob, stage: int) -> float:
    """Return the bytes of ZeRO 3's gathered weights: embedding and head together, two blocks; gradients of one each."""
    if job.zero < 3 or job.pp > 1:
        return 0.0
    layer, table = job.block_parameters, job.table * job.tables(stage)
    return (2 * layer + table) * job.state.weight + (layer + table / 2) * job.state.gradient


def _states(job: PublishedJob, stage: int) -> States:
    """Return the states from the bytes per trained and frozen parameter and the ZeRO stage."""
    held, trained = job.stage_parameters(stage), job.trained_parameters(stage)
    adapters, frozen = (trained, held) if job.lora_parameters else (0, 0)
    state, share = job.state, job.shard_size if job.zero else 1
    if job.zero < 3:
        gradients = trained * state.gradient / (share if job.zero == 2 else 1)
        optimizer = trained * (state.master + state.moments) / share
        return States(round((held + adapters) * state.weight), round(gradients), round(optimizer))
    updated = state.master or state.weight  # the optimizer updates the shards
    weights, gradients = (trained * updated + frozen * state.weight) / share, trained * updated / share
    if job.pp > 1:  # a pipeline keeps both unsharded between micro batches
        weights, gradients = weights + held * state.weight, gradients + trained * state.gradient
    return States(round(weights), round(gradients), round(trained * state.moments / share))
