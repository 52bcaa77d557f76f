"""A plan as input of the memory and time formulas. benchmarks/published extends ``Job`` for other programs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.arch.lora_targets import adapted_modules
from megatron_llama.arch.parameters import (
    FUSED,
    fused_matrix,
    fused_shape,
    head_dim,
    kv_heads,
    lora_parameters,
    matrices,
    padded_vocab_size,
    parameters_per_layer,
    stage_parameters,
)
from megatron_llama.config.precision import BYTES, EXCHANGE_BLOCK, STATE_BLOCK, exchanged_bytes, state_bytes_8bit
from megatron_llama.config.settings import FinetuneConfig, ModelConfig
from megatron_llama.devices import INDUCTOR, find_device
from megatron_llama.plan.muon_division import MatrixWork
from megatron_llama.plan.plan import SHARDS, Plan
from megatron_llama.plan.stage_split import split_evenly
from megatron_llama.topology import AXIS_NAMES


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
class Job:
    """A training run as input of the formulas."""

    model: ModelConfig
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
    """trainer.cp_comm=ulysses: heads are exchanged for tokens; else keys and values are gathered."""
    dp: int = 1
    sp: bool = False
    """Activations outside the matmuls are split over tp."""
    zero: int = 1
    shard_size: int = 1
    """Ranks over which optimizer states, gradients or parameters are split."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; an even split if empty."""
    recompute: str = "none"
    """A value of trainer.recompute."""
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
    """Parameters of LoRA's adapters in one block on one rank, on the stage with most; 0: every weight is trained."""
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
    inner_bytes: int = 2
    """Bytes of an activation."""
    kernels: str = "eager"
    """Kernels between the matmuls: ``eager`` (one per operator) or ``compiled`` (torch.compile)."""
    overlaps_tp: bool = False
    """trainer.async_tp: tensor-parallel communication is chunked, in symmetric memory, and overlaps the matmuls."""
    upcasts_logits: bool = True
    """A chunk's 16-bit logits have an fp32 copy; else the loss reads and writes 16-bit logits (model/loss.py,
    ``fused``)."""

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
    def vocab(self) -> int:
        """Rows of the embedding, with padding."""
        return padded_vocab_size(self.model.vocab_size, self.tp)

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.model.num_attention_heads * head_dim(self.model)

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return kv_heads(self.model) * head_dim(self.model)

    @cached_property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each matmul of a block on one tensor-parallel rank: qkv, o, gate_up, down."""
        shapes = (fused_shape(self.model, matrix, self.tp) for matrix in FUSED)
        return tuple((columns, rows) for rows, columns in shapes)

    attention_kernel = "flash"
    """Attention saves no scores, in torch's kernels (FlashAttention 2)."""
    loss_kernels = "loss"
    """The loss is computed in fp32 with one kernel per operator, as Megatron's vocabulary-parallel cross entropy."""
    ffn_streams = 3
    """Tensors [s, b, intermediate] of the SwiGLU feed-forward."""

    @property
    def block_recomputed(self) -> float:
        """Share of a block that trainer.recompute repeats as a whole."""
        return float(self.recompute == "full")

    @property
    def attention_recomputed(self) -> float:
        """Share of the attention core that selective recomputation repeats (arXiv:2205.05198)."""
        return (self.recompute == "selective") / self.recompute_every

    @property
    def elementwise_recomputed(self) -> float:
        """Share of norms, rotary embeddings and activations that is repeated."""
        return (self.recompute in ("elementwise", "selective")) / self.recompute_every

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return self.stage_layers or tuple(split_evenly(self.model.num_hidden_layers, self.pp))

    @property
    def block_parameters(self) -> int:
        """Parameters of a block on one tensor-parallel rank, without LoRA's."""
        return parameters_per_layer(self.model, self.tp)

    def stage_parameters(self, stage: int) -> int:
        """Return the parameters that a rank of a stage holds, without LoRA's."""
        ends = {"first": stage == 0, "last": stage == self.pp - 1}
        return stage_parameters(self.model, FinetuneConfig(), range(self.layers_by_stage[stage]), self.tp, **ends).held

    def trained_parameters(self, stage: int) -> int:
        """Return the parameters that a rank of a stage trains: all, or only LoRA's adapters."""
        if self.lora_parameters:
            return self.lora_parameters * self.layers_by_stage[stage]
        return self.stage_parameters(stage)


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
    targets = [matrices(plan.model)[module] for module in adapted_modules(plan.model, finetune)]
    divided = tp if plan.sp else 1
    rows = (matrix.local_shape(tp)[0] / (divided if matrix.cut else 1) for matrix in targets)
    return sum(rows) if finetune.use_dora else 0.0


def _adapter_parameters(plan: Plan) -> int:
    """Return ``Job.lora_parameters``."""
    pp, tp = plan.config.trainer.pp, plan.config.trainer.tp
    stages = [[layer for chunk in plan.stage_layers[stage::pp] for layer in chunk] for stage in range(pp)]
    return max(-(-lora_parameters(plan.model, plan.config.finetune, each, tp) // len(each)) for each in stages)


def _unpacked_bytes(plan: Plan) -> int:
    """Return the bytes per value of a dequantized matrix: the matmul's operand and, in eager code, the fp32 values."""
    if not plan.quantized:
        return 0
    compute, fp32 = BYTES[plan.precision.compute_dtype], BYTES["float32"]
    return compute if plan.config.trainer.compile or compute == fp32 else compute + fp32


def _state_bytes(plan: Plan) -> float:
    """Return the bytes of an optimizer state per value of a matrix."""
    if plan.config.optim.state_bits == 8:
        return state_bytes_8bit(STATE_BLOCK) / STATE_BLOCK
    return BYTES[plan.precision.optimizer_state_dtype]


def _exchanged(kind: str | None) -> float | None:
    """Return the bytes per value in one of the formats of parallel/quantized_comm.py."""
    return None if kind is None else exchanged_bytes(kind, [EXCHANGE_BLOCK]) / EXCHANGE_BLOCK


def _upcasts_logits(plan: Plan) -> bool:
    """Return ``Job.upcasts_logits``. An unknown device counts as a CPU, as in plan/defaults_and_notes.py."""
    known = find_device(plan.config.device.name)
    inductor = known is None or known.compiler == INDUCTOR
    return not (plan.config.trainer.async_tp or (plan.config.trainer.compile and inductor))


SCALING = {"tensorwise": "per tensor", "rowwise": "per row"}
"""``Job.scaling`` by recipe of ``trainer.float8``."""


def job_of_plan(plan: Plan) -> Job:
    """Return the Job of a plan."""
    model, trainer, precision = plan.model, plan.config.trainer, plan.precision
    lora, compute = plan.config.finetune.method == "lora", BYTES[precision.compute_dtype]
    targets = adapted_modules(model, plan.config.finetune)
    return Job(
        model=model,
        seq=plan.config.data.length,
        micro_batch=trainer.micro_batch_size,
        num_microbatches=plan.num_microbatches,
        tp=trainer.tp,
        pp=trainer.pp,
        vpp=trainer.vpp,
        recompute=trainer.recompute,
        recompute_every=trainer.recompute_every,
        mlp_chunks=trainer.mlp_chunks,
        reduce_group=trainer.reduce_group,
        secondary_group=trainer.secondary_group,
        cp=plan.grid.divisor("tokens"),
        exchanges_heads=trainer.cp_comm == "ulysses" and trainer.cp > 1,
        dp=plan.dp,
        sp=plan.sp,
        zero=trainer.zero if plan.storage.kind == SHARDS else 0,  # other kinds of storage gather nothing
        shard_size=plan.shard_size,
        stage_layers=tuple(trainer.pipeline_layers or ()),
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
        lora_parameters=_adapter_parameters(plan) if lora else 0,
        scaled_outputs=_scaled_outputs(plan) if lora else 0.0,
        adapted=frozenset(fused_matrix(name).removesuffix("_proj") for name in targets),
        unpacked_bytes=_unpacked_bytes(plan),
        sent_gradient=_exchanged(trainer.grad_reduce),
        gathered_weight=_exchanged(trainer.param_gather),
        exchanges_signs=plan.exchanges_signs,
        **_matrix_work(plan),
        records_logits=plan.config.optim.qk_clip is not None,
        inner_bytes=compute,
        kernels="compiled" if trainer.compile or trainer.async_tp else "eager",
        overlaps_tp=bool(trainer.async_tp),
        upcasts_logits=_upcasts_logits(plan),
    )
