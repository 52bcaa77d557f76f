"""The KV cache for generation: keys and values of earlier tokens, so that the next token costs one position.

Slot i of a row holds position i, so rows of different lengths need no padding mask: a query at position p sees slots
0 to p. Slots beyond a row's length hold padding that came with longer rows; they are overwritten before they are seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_llama.config import ModelConfig
from megatron_llama.model.rotary import rotary_table
from megatron_llama.plan.shapes import head_dim, kv_heads_per_rank


class LayerCache:
    """One layer's keys and values [b, kv heads of this rank, capacity, d]."""

    def __init__(self, cache: KVCache, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self._cache = cache
        self._keys = torch.zeros(shape, dtype=dtype, device=cache.device)  # not empty: 0 * NaN is NaN
        self._values = torch.zeros(shape, dtype=dtype, device=cache.device)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores the keys and values [b, kv heads, s, d] of new tokens; attention of their queries [b, heads, s, d]."""
        (k, v), mask = self._extended(k, v), self._cache.mask
        if q.shape[2] == 1:
            # One new token: the queries of a group see the same slots, so they can be the rows of one matrix, which is
            # faster than a product of one row for each head.
            out = F.scaled_dot_product_attention(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, mask)
            return out.reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _extended(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values; returns all, up to the longest row, each [b, kv heads, furthest, d]."""
        rows, positions = self._cache.rows, self._cache.positions
        self._keys[rows, :, positions] = keys.transpose(1, 2)
        self._values[rows, :, positions] = values.transpose(1, 2)
        return self._keys[:, :, : self._cache.furthest], self._values[:, :, : self._cache.furthest]


class KVCache:
    """The cache of all layers of a batch. ``at`` sets the positions of the next tokens before each forward pass."""

    def __init__(self, model: ModelConfig, tp: int, batch: int, capacity: int, like: torch.Tensor) -> None:
        self.device, self.capacity = like.device, capacity
        self.rows = torch.arange(batch, device=self.device)[:, None]
        shape = batch, kv_heads_per_rank(model, tp), capacity, head_dim(model)
        self.layers = [LayerCache(self, shape, like.dtype) for _ in range(model.num_hidden_layers)]
        self._cos, self._sin = rotary_table(model, capacity, self.device)
        self._slots = torch.arange(capacity, device=self.device)

    def at(self, starts: torch.Tensor, count: int, wanted: torch.Tensor | None = None) -> KVCache:
        """Sets the positions of each row's next ``count`` tokens: from ``starts`` [b], int64. Returns itself.

        ``wanted`` [b] selects one of these tokens in each row, the only one whose logits are computed; None: all.
        """
        assert int(starts.max()) + count <= self.capacity, "the cache is full"
        self.positions = starts.to(self.device)[:, None] + torch.arange(count, device=self.device)
        self.furthest = int(starts.max()) + count
        self.wanted = None if wanted is None else wanted.to(self.device)
        from_the_start = bool((starts == 0).all())
        seen = self._slots[: self.furthest] <= self.positions[:, :, None]
        # Slots that each query sees, [b, 1, s, furthest]; None for plain causal attention, which has faster kernels.
        self.mask = None if from_the_start else seen[:, None]
        return self

    @property
    def rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for the next tokens, each [s, b, 1, d], fp32."""
        positions = self.positions.t()
        return self._cos[positions][:, :, 0], self._sin[positions][:, :, 0]

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to [1, b, h], the ``wanted`` token of each row: the output head is the largest matrix."""
        return x if self.wanted is None else x[self.wanted, self.rows[:, 0]][None]
