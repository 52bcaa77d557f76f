"""A training run as input of the memory and time formulas: model shape, layout and training program.

A ``Job`` describes runs of this project (``job_of_plan``) and of other programs (tools/forecast/programs.py) for the
same formulas. ``Program`` has the differences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_llama.arch.pattern import pattern_of
from megatron_llama.arch.shapes import fused_matrix, kv_heads, lora_parameters, matrices, norms_branches, qk_norm
from megatron_llama.config.precision import BYTES, EXCHANGE_BLOCK, STATE_BLOCK, exchanged_bytes, state_bytes_8bit
from megatron_llama.config.settings import TrainerConfig
from megatron_llama.devices import INDUCTOR, find_device
from megatron_llama.plan.derive import split_evenly
from megatron_llama.plan.matrix_work import MatrixWork
from megatron_llama.plan.plan import Plan
from megatron_llama.plan.storage import SHARDS
from megatron_llama.topology import AXIS_NAMES


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder, including properties that are fixed in a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    """SwiGLU with three matrices; else an MLP with two."""
    tied: bool = False
    """Whether output head and embedding share a weight."""
    qk_norm: str | None = None
    """RMSNorm of q and k: of each ``head``, of the whole ``projection``, or None."""
    norms_branches: bool = False
    """Whether a block's norms follow attention and feed-forward; otherwise they precede them."""
    learned_positions: int = 0
    """Rows of the learned position embedding."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def layer_matmuls(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (in, out) of each matmul of a block on one of ``tp`` ranks."""
        keys = max(self.kv_heads // tp, 1) * self.head_dim
        return (
            (self.hidden, self.queries // tp + 2 * keys),
            (self.queries // tp, self.hidden),
            (self.hidden, (2 if self.gated else 1) * self.ffn // tp),
            (self.ffn // tp, self.hidden),
        )

    def layer_parameters(self, tp: int = 1) -> int:
        """Return the parameters of a block on one of ``tp`` ranks: matrices and two norms."""
        return sum(rows * columns for rows, columns in self.layer_matmuls(tp)) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        tables = (1 if self.tied else 2) * self.vocab + self.learned_positions
        return self.layers * self.layer_parameters() + self.hidden * (tables + 1)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trained parameter."""

    weight: int = 2
    """Weights in the compute dtype."""
    gradient: int = 4
    """Gradient sums."""
    master: int = 4
    """Master weights; 0 if the optimizer updates the compute weights."""
    moments: float = 8
    """Adam's two averages."""


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
    symmetric_memory: bool = False
    """Chunks of tensor-parallel communication use symmetric memory, which all tp ranks map."""
    overlaps_dp: bool = True
    """Gradient reduction overlaps the backward pass, weight gathering the forward pass."""
    dropout: bool = False
    """Dropout masks are saved."""
    keeps_gathered: bool = False
    """With sequence parallelism, gathered inputs of matmuls are saved instead of each rank's part."""
    chunks_logits: bool = False
    """Logits are computed in chunks of tokens with their gradients and freed before the first block's backward pass."""
    upcasts_logits: bool = True
    """A chunk's 16-bit logits have an fp32 copy; else the loss reads and writes 16-bit logits (model/loss.py,
    ``fused``)."""
    reshards: bool = False
    """ZeRO 3 frees gathered weights after each block, also in a pipeline."""
    shards_frozen: bool = False
    """ZeRO also shards LoRA's frozen weights and gathers them in each step."""
    repeats_elementwise: bool = False
    """Selective recomputation also repeats norms, rotations and the activation function."""
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


OURS = Program(
    "megatron_llama",
    chunks_logits=True,
    reshards=True,
    shards_frozen=True,
    repeats_elementwise=True,
    loss_in_steps=True,
)
COMPILED = replace(OURS, name="megatron_llama, compiled", kernels="compiled", upcasts_logits=False)
OUR_PROGRAMS = {
    "ours": OURS,
    "ours, compiled": COMPILED,
    "ours, other compiler": replace(COMPILED, name="the same, not by Inductor", upcasts_logits=True),
    "ours, overlapped": replace(COMPILED, name="the same, trainer.async_tp", overlaps_tp=True, symmetric_memory=True),
}
"""Variants of this project's program."""


@dataclass(frozen=True)
class Job:
    """A training run as input of the formulas."""

    shape: ModelShape
    seq: int
    """Tokens in a sequence."""
    micro_batch: int
    """Sequences in a forward pass."""
    num_microbatches: int
    """Forward passes of a data-parallel rank in a step."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    """Ranks that share a sequence (context parallelism)."""
    exchanges_heads: bool = False
    """trainer.cp_comm=ulysses: heads are exchanged for tokens; else keys and values are gathered or passed on."""
    dp: int = 1
    sp: bool = False
    """Activations outside the matmuls are split over tp."""
    zero: int = 1
    shard_size: int = 1
    """Ranks over which optimizer states, gradients or parameters are split."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage."""
    recompute: str = "none"
    """A value of trainer.recompute, or half (other programs)."""
    recompute_every: int = 1
    """Only every n-th block recomputes."""
    mlp_chunks: int = 1
    """Chunks of tokens in which the feed-forward network runs, again in the backward pass."""
    offloads_activations: bool = False
    """Saved tensors of blocks are in host memory."""
    offloads_optimizer: bool = False
    """Optimizer states are in host memory."""
    format: str = "bf16"
    """Number format of the matmuls: fp32, bf16, fp8 or fp4."""
    scaling: str = "per tensor"
    """Granularity of scales in fp8 and fp4: ``per tensor``, ``per row`` or ``per block``."""
    state: StateBytes = field(default_factory=StateBytes)
    lora_parameters: int = 0
    """Parameters of LoRA's adapters in one block on one rank; 0: every weight is trained."""
    scaled_outputs: float = 0.0
    """Outputs per token of one block, on one rank, that DoRA scales."""
    adapted: frozenset[str] = frozenset()
    """Matmuls whose inputs LoRA's adapters need: qkv, o, gate_up, down."""
    unpacked_bytes: int = 0
    """Bytes per value of a quantized matrix while it is dequantized; 0 without quantized weights."""
    document: int | None = None
    """Effective length of attention, tokens, with several documents in a sequence or a sparse pattern."""
    sent_gradient: float | None = None
    """Bytes per exchanged gradient, if not ``state.gradient``."""
    gathered_weight: float | None = None
    """Bytes per gathered weight, if not ``state.weight``."""
    reduce_group: int | None = None
    """Ranks that sum gradients before they exchange the sums with other groups."""
    secondary_group: int | None = None
    """Ranks that share a second copy of the weights, from which ZeRO 3 gathers in the backward pass."""
    exchanges_signs: bool = False
    """1-bit Adam: ranks exchange signs of momenta instead of gradients."""
    matrix_flops: int = 0
    """Muon: FLOPs of Newton-Schulz on the rank with the most work of the stage with the most layers."""
    matrix_bytes: float = 0.0
    """Muon: bytes that a rank of this stage sends for its matrices, on average."""
    records_logits: bool = False
    """QK-Clip: the largest scores of attention are computed by blocks."""
    program: Program = OURS
    inner_bytes: int = 2
    """Bytes of an activation."""

    @property
    def ranks(self) -> int:
        """Processes."""
        return math.prod(getattr(self, name) for name in {*AXIS_NAMES, "cp"})

    @property
    def global_batch(self) -> int:
        """Sequences in a step."""
        return self.micro_batch * self.num_microbatches * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step."""
        return self.global_batch * self.seq

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on one rank, before tp splits them along the sequence."""
        return self.micro_batch * self.seq // self.cp

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; an even or cost-based split if ``stage_layers`` is empty."""
        if self.stage_layers:
            return self.stage_layers
        return _by_cost(self.shape, self.pp) if self.program.stages_by_cost else _evenly(self.shape.layers, self.pp)

    def stage_parameters(self, stage: int) -> int:
        """Return the parameters that a rank of a stage holds, without LoRA's."""
        shape, first, last = self.shape, stage == 0, stage == self.pp - 1
        table = -(-shape.vocab // self.tp) * shape.hidden
        tables = first + (last and not (shape.tied and first))
        positions = first * shape.learned_positions * shape.hidden
        layers = self.layers_by_stage[stage] * shape.layer_parameters(self.tp)
        return layers + tables * table + positions + last * shape.hidden

    def trained_parameters(self, stage: int) -> int:
        """Return the parameters that a rank of a stage trains: all, or only LoRA's adapters."""
        if self.lora_parameters:
            return self.lora_parameters * self.layers_by_stage[stage]
        return self.stage_parameters(stage)


@functools.cache
def _evenly(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(split_evenly(layers, stages))


@functools.cache
def _by_cost(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, filled until the cost reaches an equal share; the last stage has the rest."""
    head = shape.vocab * shape.hidden / shape.layer_parameters()
    share, left, split = (shape.layers + head) / stages, shape.layers, []
    for stage in range(stages):
        count = left if stage == stages - 1 else min(left, math.ceil(share))
        split.append(count)
        left -= count
    return tuple(split)


def _matrix_work(plan: Plan) -> dict[str, Any]:
    """Return ``Job.matrix_flops`` and ``Job.matrix_bytes``; nothing for other optimizers than Muon."""
    if not plan.config.optim.row.gathers_matrices:
        return {}
    pp, layers = plan.config.trainer.pp, [len(stage) for stage in plan.stage_layers]
    work = MatrixWork(plan, max(range(pp), key=lambda stage: sum(layers[stage::pp])))
    values = sum(math.prod(work.shape(name)) for names in work.flops for name in names)
    sent = values * (1 + plan.data_ranks // plan.shard_size) * BYTES[plan.precision.compute_dtype]
    return {"matrix_flops": max(sum(names.values()) for names in work.flops), "matrix_bytes": sent / work.members}


def _scaled_outputs(plan: Plan) -> float:
    """Return ``Job.scaled_outputs``. Sequence parallelism divides the tokens of row-parallel outputs."""
    finetune, tp = plan.config.finetune, plan.config.trainer.tp
    targets = [matrices(plan.model)[module] for module in finetune.lora_target_modules]
    divided = tp if plan.sp else 1
    rows = (matrix.local_shape(tp)[0] / (divided if matrix.cut else 1) for matrix in targets)
    return sum(rows) if finetune.use_dora else 0.0


def _adapted(targets: Sequence[str]) -> frozenset[str]:
    return frozenset(fused_matrix(target).removesuffix("_proj") for target in targets)


def _unpacked_bytes(plan: Plan) -> int:
    """Return the bytes per value of a dequantized matrix: the matmul's operand and, in eager code, the fp32 values."""
    if not plan.quantized:
        return 0
    compute, fp32 = BYTES[plan.precision.compute_dtype], BYTES["float32"]
    fused = _program(plan.config.trainer, plan.config.device.name) != "ours"
    return compute if fused or compute == fp32 else compute + fp32


def _state_bytes(plan: Plan) -> float:
    """Return the bytes of an optimizer state per value of a matrix."""
    if plan.config.optim.state_bits == 8:
        return state_bytes_8bit(STATE_BLOCK) / STATE_BLOCK
    return BYTES[plan.precision.optimizer_state_dtype]


def _exchanged(kind: str | None) -> float | None:
    """Return the bytes per value in one of the formats of parallel/exchange.py."""
    return None if kind is None else exchanged_bytes(kind, [EXCHANGE_BLOCK]) / EXCHANGE_BLOCK


def _program(trainer: TrainerConfig, device: str) -> str:
    """Return the key of OUR_PROGRAMS. An unknown device counts as a CPU, as in plan/choices.py."""
    if trainer.async_tp:
        return "ours, overlapped"
    if not trainer.compile:
        return "ours"
    known = find_device(device)
    return "ours, compiled" if known is None or known.compiler == INDUCTOR else "ours, other compiler"


SCALING = {"tensorwise": "per tensor", "rowwise": "per row"}
"""``Job.scaling`` by recipe of ``trainer.float8``."""


def job_of_plan(plan: Plan) -> Job:
    """Return the Job of a plan."""
    model, trainer, precision = plan.model, plan.config.trainer, plan.precision
    assert model.head_dim is not None, "resolve fills it in"
    shape = ModelShape(
        hidden=model.hidden_size,
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
        kv_heads=kv_heads(model),
        head_dim=model.head_dim,
        ffn=model.intermediate_size,
        vocab=plan.padded_vocab_size,
        tied=model.tie_word_embeddings,
        qk_norm=qk_norm(model),
        norms_branches=norms_branches(model),
    )
    lora, compute = plan.config.finetune.method == "lora", BYTES[precision.compute_dtype]
    return Job(
        shape=shape,
        seq=plan.config.data.length,
        micro_batch=trainer.micro_batch_size,
        num_microbatches=plan.num_microbatches,
        tp=trainer.tp,
        pp=trainer.pp,
        vpp=trainer.vpp,
        cp=plan.grid.divisor("tokens"),
        exchanges_heads=trainer.cp_comm == "ulysses" and trainer.cp > 1,
        dp=plan.dp,
        sp=plan.sp,
        zero=trainer.zero if plan.storage.kind == SHARDS else 0,  # other kinds of storage gather nothing
        shard_size=plan.shard_size,
        stage_layers=tuple(trainer.pipeline_layers or ()),
        recompute=trainer.recompute,
        recompute_every=trainer.recompute_every,
        mlp_chunks=trainer.mlp_chunks,
        offloads_activations="activations" in trainer.offload,
        offloads_optimizer="optimizer" in trainer.offload,
        format="fp8" if trainer.float8 else precision.compute_format,
        scaling=SCALING[trainer.float8] if trainer.float8 else "per tensor",
        state=StateBytes(
            weight=compute,
            gradient=BYTES[precision.grad_accum_dtype],
            master=BYTES[precision.param_dtype] if precision.master else 0,
            moments=2 * _state_bytes(plan),
        ),
        document=round(pattern_of(model).span(plan.config.data.length)),
        lora_parameters=lora_parameters(model, plan.config.finetune, 1, trainer.tp) if lora else 0,
        scaled_outputs=_scaled_outputs(plan) if lora else 0.0,
        adapted=_adapted(plan.config.finetune.lora_target_modules) if lora else frozenset(),
        unpacked_bytes=_unpacked_bytes(plan),
        sent_gradient=_exchanged(trainer.grad_reduce),
        gathered_weight=_exchanged(trainer.param_gather),
        reduce_group=trainer.reduce_group,
        secondary_group=trainer.secondary_group,
        exchanges_signs=plan.exchanges_signs,
        **_matrix_work(plan),
        records_logits=plan.config.optim.qk_clip is not None,
        program=OUR_PROGRAMS[_program(trainer, plan.config.device.name)],
        inner_bytes=compute,
    )
