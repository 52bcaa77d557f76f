"""Parameters and FLOPs of each module of a pipeline stage.

Summed over modules, ranks and tokens, they equal ``arch.flops.flops_per_token`` with full attention. Vocabulary
padding, copies of kv heads and padding tokens are added here, because the device computes them. Recomputation is not
counted, as in MFU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.arch.shapes import (
    FUSED,
    ROW_PARALLEL,
    bias_rows,
    block_norms,
    head_dim,
    matrices,
    norms_branches,
    qk_norm_shapes,
)
from megatron_llama.config.settings import FinetuneConfig, ModelConfig
from megatron_llama.plan.plan import Plan


@dataclass(frozen=True)
class ModuleWork:
    """Parameters and GEMMs of a module, without its submodules."""

    parameters: int = 0
    forward: float = 0.0
    """FLOPs per token of a micro batch."""
    backward: float = 0.0
    attention: int = 0
    """FLOPs of the forward pass per pair of tokens of one document. The backward pass has twice as many."""

    def flops(self, tokens: int, pairs: int) -> tuple[int, int]:
        """Return the FLOPs of (forward, backward) for ``tokens`` tokens and ``pairs`` pairs within documents."""
        attention = self.attention * pairs
        return round(self.forward * tokens) + attention, round(self.backward * tokens) + 2 * attention


@dataclass(frozen=True)
class _ModelShard:
    """Model and settings that determine the shapes of one rank."""

    model: ModelConfig
    finetune: FinetuneConfig
    tp: int
    sp: bool
    vocab_size: int

    def is_frozen(self, module: str) -> bool:
        return self.finetune.method == "lora" and not module.endswith(tuple(self.finetune.modules_to_save))


def rank_work(plan: Plan, layers: Sequence[int], *, first: bool, last: bool) -> dict[str, ModuleWork]:
    """Return parameters and FLOPs of the modules of a pipeline chunk on one rank, by module name."""
    shard = _ModelShard(plan.model, plan.config.finetune, plan.config.trainer.tp, plan.sp, plan.padded_vocab_size)
    return dict(_chunk(shard, layers, first, last))


def model_parameters(plan: Plan) -> dict[str, int]:
    """Return the parameters of each module of the model, with LoRA's, without padding and copies.

    A tied output head has 0: its weight belongs to the embedding.
    """
    shard = _ModelShard(plan.model, plan.config.finetune, 1, False, plan.model.vocab_size)
    return {name: work.parameters for name, work in _chunk(shard, range(plan.model.num_hidden_layers), True, True)}


def _chunk(shard: _ModelShard, layers: Sequence[int], first: bool, last: bool) -> Iterator[tuple[str, ModuleWork]]:
    hidden, vocabulary = shard.model.hidden_size, shard.vocab_size // shard.tp * shard.model.hidden_size
    if first:
        yield "embed_tokens", ModuleWork(vocabulary)
    for layer in layers:
        for name, work in _block(shard):
            yield f"layers.{layer}.{name}", work
    if last:
        yield "norm", ModuleWork(hidden)
        head = 0 if first and shard.model.tie_word_embeddings else vocabulary
        yield "lm_head", ModuleWork(head, *_gemm_flops(vocabulary, frozen=shard.is_frozen("lm_head")))


def _block(shard: _ModelShard) -> Iterator[tuple[str, ModuleWork]]:
    norms = [(name, ModuleWork(shard.model.hidden_size)) for name in block_norms(shard.model)]
    is_last = norms_branches(shard.model)
    width = shard.model.num_attention_heads // shard.tp * head_dim(shard.model)
    yield from norms[:1] * (not is_last)
    yield "self_attn", ModuleWork(attention=4 * width)  # scores, and scores times values
    yield from _matrix(shard, "self_attn.qkv_proj")
    yield from _matrix(shard, "self_attn.o_proj")
    for name, size in qk_norm_shapes(shard.model, shard.tp).items():
        yield f"self_attn.{name}", ModuleWork(size)
    yield norms[0 if is_last else 1]
    yield from _matrix(shard, "mlp.gate_up_proj")
    yield from _matrix(shard, "mlp.down_proj")
    yield from norms[1:] * is_last


def _matrix(shard: _ModelShard, name: str) -> Iterator[tuple[str, ModuleWork]]:
    """Yield a fused matrix, and its LoRA adapters."""
    fused = name.rpartition(".")[2]
    shapes = {module: matrices(shard.model)[module].local_shape(shard.tp) for module in FUSED[fused]}
    elements = sum(rows * columns for rows, columns in shapes.values())
    bias = bias_rows(shard.model, shard.tp).get(fused, 0)
    matrix = ModuleWork(elements + bias, *_gemm_flops(elements, frozen=shard.is_frozen(name)))
    adapted = shard.finetune.lora_target_modules if shard.finetune.method == "lora" else []
    targets = [shape for module, shape in shapes.items() if module in adapted]
    if targets:
        yield name, _lora(shard, targets, column=fused not in ROW_PARALLEL)
        yield f"{name}.base_layer", matrix
    else:
        yield name, matrix


def _lora(shard: _ModelShard, targets: Sequence[tuple[int, int]], *, column: bool) -> ModuleWork:
    """Return the work of A and B for target modules of shape (rows, columns).

    With sequence parallelism the replicated one of A and B multiplies only the rank's share of the tokens.
    """
    rank, split = shard.finetune.lora_rank, shard.tp if shard.sp else 1
    a, b = rank * sum(columns for _, columns in targets), rank * sum(rows for rows, _ in targets)
    forward = 2 * (a / split + b) if column else 2 * (a + b / split)
    return ModuleWork(a + b, forward, 2 * forward)


def _gemm_flops(elements: int, *, frozen: bool) -> tuple[float, float]:
    """Return (forward, backward) FLOPs per token of a GEMM; a frozen matrix has no weight gradient."""
    return 2.0 * elements, 2.0 * elements if frozen else 4.0 * elements


def any_layer(module: str) -> str:
    """Replace the layer numbers of a module name: layers.3.mlp -> layers.*.mlp."""
    return re.sub(r"\d+", "*", module)
