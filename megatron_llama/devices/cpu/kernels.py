"""Kernels of the CPU: C++ and column-wise logits in compiled runs, chunks that stay in the cache in both modes."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_llama.arch.pattern import Pattern
from megatron_llama.devices import attention
from megatron_llama.devices.cpu import attention as cpu_attention
from megatron_llama.devices.cpu.products import by_amx
from megatron_llama.devices.cpu.updates import UpdateKernels
from megatron_llama.devices.visibility import AttentionInputs, Documents, first_visible_keys

ADDED_AT_ONCE = 2**18
"""Values that ``add_`` casts to fp32 together, in memory that stays in the cache."""
MOST_BY_COLUMNS = 768
"""Tokens of a chunk whose logits are stored column by column if AMX units multiply. The weight's gradient, whose matmul
reads them so, takes half the time. With more tokens the gradient of the hidden states takes twice the time."""


class CpuKernels(UpdateKernels):
    """Overrides for tensors in the host's memory."""

    def visible(self, tokens: Tensor, documents: Documents | None, pattern: Pattern) -> AttentionInputs | None:
        inputs = super().visible(tokens, documents, pattern)
        if inputs is None or not self.compiled or pattern.group:
            return inputs
        if documents is None:
            documents = Documents.whole(tokens.shape[0], tokens.shape[1], tokens.device)
        return inputs._replace(first_visible_key=first_visible_keys(documents, pattern.window))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        first = None if visible is None else visible.first_visible_key
        if torch.compiler.is_compiling() and (visible is None or first is not None) and cpu_attention.serves(q):
            return cpu_attention.attend(q, k, v, first)[0]
        if visible is None and cpu_attention.is_faster(q):
            return cpu_attention.causal_attention(q, k, v)
        return attention.attend(q, k, v, visible)

    def logits_like(self, hidden: Tensor, tokens: int, rows: int) -> Tensor:
        if self.fuses_loss and by_amx(hidden.dtype) and tokens <= MOST_BY_COLUMNS:
            return hidden.new_empty(rows, tokens).t()
        return super().logits_like(hidden, tokens, rows)

    def is_one(self, factor: Tensor) -> bool:
        return bool(factor == 1)

    def add_(self, total: Tensor, part: Tensor) -> None:
        # torch would first cast the whole part to fp32, in new memory.
        if part.element_size() >= total.element_size() or not total.is_contiguous():
            super().add_(total, part)
            return
        fp32 = total.new_empty(min(ADDED_AT_ONCE, total.numel()))
        parts = part.reshape(-1).split(ADDED_AT_ONCE)
        for sums, values in zip(total.view(-1).split(ADDED_AT_ONCE), parts, strict=True):
            sums += fp32[: values.numel()].copy_(values)

    def rows_at_once(self, width: int) -> int:
        return max(1, (1 << 18) // max(1, width))  # few enough for the cache
