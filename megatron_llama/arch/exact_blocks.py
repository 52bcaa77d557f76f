"""Blocks of exact mode (``trainer.exact``): parts of heads, intermediate units and vocabulary that no layout splits.

A matmul of exact mode has the operands of one sequence and one block, so its shapes and bits do not depend on the
layout. Sums over blocks follow one binary tree.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_llama.arch.parameters import head_dim, kv_heads
from megatron_llama.config import ModelConfig

BLOCKS = 8
"""Number of blocks where it divides the model's heads and intermediate size."""
MOST_BLOCKS = 16
"""Upper bound of the number of blocks of other models."""

SPANS, LEAST_TOKENS = 8, 1024
"""Spans of a sequence that are multiplied on their own, and the length in tokens from which on sequences have them.
Shorter sequences are one span, and cannot be divided over context-parallel ranks."""


class Rows(NamedTuple):
    """Rows of a fused column-parallel matrix on one rank."""

    first: int
    stop: int
    leaf: int | None
    """Index of the block, counted from the rank's first, to which the rows contribute in the gradient of the input.
    None: another rank that holds the same kv head contributes them."""


def num_blocks(model: ModelConfig) -> int:
    """Return the number of blocks: 8 if possible, otherwise the largest one that fits the model, at most 16."""
    return BLOCKS if _fits(model, BLOCKS) else next(n for n in range(MOST_BLOCKS, 0, -1) if _fits(model, n))


def _fits(model: ModelConfig, blocks: int) -> bool:
    """Whether blocks have whole heads, and whole kv heads or a part of the queries of one."""
    kv = kv_heads(model)
    whole = model.num_attention_heads % blocks == 0 and model.intermediate_size % blocks == 0
    return whole and (kv % blocks == 0 or blocks % kv == 0)


def attention_rows(model: ModelConfig, tp: int, rank: int) -> list[Rows]:
    """Return the row blocks of ``qkv_proj`` on a tensor-parallel rank: of q, then k, then v."""
    blocks, head = num_blocks(model), head_dim(model)
    local, heads, kv = blocks // tp, model.num_attention_heads // blocks, kv_heads(model)
    q = [Rows(i * heads * head, (i + 1) * heads * head, i) for i in range(local)]
    first = rank * local
    if kv >= blocks:
        size = kv // blocks * head
        kv_rows = [Rows(i * size, (i + 1) * size, i) for i in range(local)]
    else:
        shared = blocks // kv  # blocks whose queries use one kv head
        starts = [owner * shared - first for owner in sorted({(first + i) // shared for i in range(local)})]
        kv_rows = [Rows(i * head, (i + 1) * head, leaf if leaf >= 0 else None) for i, leaf in enumerate(starts)]
    rows = q
    for _ in ("k", "v"):
        offset = rows[-1].stop
        rows = rows + [Rows(offset + row.first, offset + row.stop, row.leaf) for row in kv_rows]
    return rows


def mlp_rows(model: ModelConfig, tp: int) -> list[Rows]:
    """Return the row blocks of ``gate_up_proj`` on a tensor-parallel rank: of gate, then up."""
    local = num_blocks(model) // tp
    size = model.intermediate_size // num_blocks(model)
    return [Rows((part + i) * size, (part + i + 1) * size, i) for part in (0, local) for i in range(local)]


def span_length(tokens: int) -> int:
    """Return the tokens of a span of sequences of this length."""
    return tokens // SPANS if tokens >= LEAST_TOKENS and tokens % SPANS == 0 else tokens
