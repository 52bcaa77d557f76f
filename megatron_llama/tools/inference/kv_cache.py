"""The KV cache for generation: keys and values of earlier tokens, so that the next token costs one position.

Position p of a row is in slot p modulo the number of slots, so rows of different lengths need no padding mask: what a
query sees follows from the positions that the slots hold. With a sliding window there are only as many slots as the
window and the next tokens need, however long a text becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron_llama.arch.pattern import pattern_of
from megatron_llama.arch.shapes import head_dim, kv_heads_per_rank
from megatron_llama.config import ModelConfig
from megatron_llama.devices.visibility import AttentionInputs, is_visible
from megatron_llama.model.inputs import BlockInputs
from megatron_llama.model.llama import Attend, Llama
from megatron_llama.model.rotary import rotary_table


class LayerCache:
    """One layer's keys and values [b, kv heads of this rank, slots, d]."""

    def __init__(self, cache: KVCache, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self._cache = cache
        self._keys = torch.zeros(shape, dtype=dtype, device=cache.device)  # not empty: 0 * NaN is NaN
        self._values = torch.zeros(shape, dtype=dtype, device=cache.device)

    def attend(
        self, attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: AttentionInputs | None
    ) -> torch.Tensor:
        """Store the keys and values [b, kv heads, s, d] of new tokens; return attention of their queries
        [b, heads, s, d].

        The first tokens have no others in the cache: for them this is ``attend``, with ``visible``.
        """
        cache = self._cache
        if cache.from_the_start:
            for row, positions in enumerate(cache.kept):
                self._keys[row, :, positions % cache.slots] = k[row, :, positions]
                self._values[row, :, positions % cache.slots] = v[row, :, positions]
            return attend(q, k, v, visible)
        keys, values = self._extended(k, v)
        if q.shape[2] == 1:
            # One new token: the queries of a group see the same slots, so they can be the rows of one matrix, which is
            # faster than a product of one row for each head.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values, cache.mask).reshape(q.shape)
        return F.scaled_dot_product_attention(q, keys, values, cache.mask, enable_gqa=q.shape[1] != k.shape[1])

    def _extended(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values; returns all, each [b, kv heads, used slots, d]."""
        cache = self._cache
        slots = cache.positions % cache.slots
        self._keys[cache.rows, :, slots] = keys.transpose(1, 2)
        self._values[cache.rows, :, slots] = values.transpose(1, 2)
        return self._keys[:, :, : cache.used], self._values[:, :, : cache.used]


class KVCache:
    """The cache of all layers of a batch. ``at`` sets the positions of the next tokens before each forward pass."""

    def __init__(
        self, model: ModelConfig, tp: int, batch: int, capacity: int, like: torch.Tensor, at_once: int = 1
    ) -> None:
        """For ``capacity`` positions of ``batch`` rows; after the first pass at most ``at_once`` tokens at a time."""
        self.device, self.capacity = like.device, capacity
        self.pattern = pattern_of(model)
        # The first of the next tokens sees a window that they must not overwrite.
        self.slots = min(capacity, self.pattern.window + at_once - 1) if self.pattern.window else capacity
        self.rows = torch.arange(batch, device=self.device)[:, None]
        shape = batch, kv_heads_per_rank(model, tp), self.slots, head_dim(model)
        self.layers = [LayerCache(self, shape, like.dtype) for _ in range(model.num_hidden_layers)]
        self._cos, self._sin = rotary_table(model, capacity, self.device)
        self._slots = torch.arange(self.slots, device=self.device)

    def at(self, starts: torch.Tensor, count: int, token_index: torch.Tensor | None = None) -> KVCache:
        """Sets the positions of each row's next ``count`` tokens: from ``starts`` [b], int64. Returns itself.

        ``token_index`` [b] selects one of these tokens in each row, the last one that is not padding and the only one
        whose logits are computed; None: all.
        """
        assert int(starts.max()) + count <= self.capacity, "the cache is full"
        self.positions = starts.to(self.device)[:, None] + torch.arange(count, device=self.device)
        self.token_index = None if token_index is None else token_index.to(self.device)
        self.used = min(self.slots, int(starts.max()) + count)
        self.from_the_start = bool((starts == 0).all())
        if self.from_the_start:
            lengths = [count] * len(starts) if token_index is None else (token_index + 1).tolist()
            self.kept = [torch.arange(max(0, n - self.slots), n, device=self.device) for n in lengths]
            return self
        # A slot holds the last position that was written to it.
        last, slots = self.positions[:, -1:], self._slots[: self.used]
        held = (last - (last - slots) % self.slots)[:, None]
        queries = self.positions[:, :, None]
        seen = (held >= 0) & (held <= queries) & is_visible(queries, held, self.pattern)
        self.mask = seen[:, None]  # [b, 1, s, slots]
        return self

    @contextmanager
    def attached(self, llama: Llama) -> Iterator[None]:
        """Let the model's tokens follow the cached ones: pass ``inputs`` and ``token_index`` to its forward.

        Sequence and pipeline parallelism are not supported.
        """
        attentions: list[Any] = [block.self_attn for block in llama.layers.values()]
        originals = [attention.attend for attention in attentions]
        for attention, original, layer in zip(attentions, originals, self.layers, strict=True):
            attention.attend = partial(layer.attend, original)
        try:
            yield
        finally:
            for attention, original in zip(attentions, originals, strict=True):
                attention.attend = original

    def inputs(self, llama: Llama, tokens: torch.Tensor) -> BlockInputs:
        """Return the blocks' inputs for the next tokens [b, s]."""
        positions = self.positions.t()
        rotary = self._cos[positions][:, :, 0], self._sin[positions][:, :, 0]
        visible = llama.build_inputs.build_visible(tokens, None, self.pattern) if self.from_the_start else None
        return BlockInputs(rotary, visible)
