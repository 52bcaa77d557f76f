"""Keys and values of the tokens so far, so that the next token costs one position and not the whole sequence.

Slot i of a row holds position i. So rows of different lengths need no padding mask: a query at position p sees the
slots 0 .. p, and what lies beyond is a longer row's padding, overwritten when this row gets there.
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
        self._keys = torch.zeros(shape, dtype=dtype, device=cache.device)  # zeros: 0 * NaN of a hidden slot is NaN
        self._values = torch.zeros(shape, dtype=dtype, device=cache.device)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries [b, heads, s, d] of the tokens at hand to what they find, in the same shape. Their keys and values
        [b, kv heads, s, d] are taken in first."""
        (k, v), mask = self._extended(k, v), self._cache.mask
        if q.shape[2] == 1:
            # The queries of a group see the same: as one query each they would be looked at apart, as rows of one
            # matrix together.
            out = F.scaled_dot_product_attention(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k, v, mask)
            return out.reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _extended(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values up to the furthest row, with these in their places."""
        rows, positions = self._cache.rows, self._cache.positions
        self._keys[rows, :, positions] = keys.transpose(1, 2)
        self._values[rows, :, positions] = values.transpose(1, 2)
        return self._keys[:, :, : self._cache.furthest], self._values[:, :, : self._cache.furthest]


class KVCache:
    """The cache of a batch: ``at`` says where the next tokens belong, then the model is run with it."""

    def __init__(self, model: ModelConfig, tp: int, batch: int, capacity: int, like: torch.Tensor) -> None:
        self.device, self.capacity = like.device, capacity
        self.rows = torch.arange(batch, device=self.device)[:, None]
        shape = batch, kv_heads_per_rank(model, tp), capacity, head_dim(model)
        self.layers = [LayerCache(self, shape, like.dtype) for _ in range(model.num_hidden_layers)]
        self._cos, self._sin = rotary_table(model, capacity, self.device)
        self._slots = torch.arange(capacity, device=self.device)

    def at(self, starts: torch.Tensor, count: int, wanted: torch.Tensor | None = None) -> KVCache:
        """The next ``count`` tokens of each row go to the positions that begin with ``starts`` [b].

        ``wanted`` [b] names, by its number among these ``count``, the token of each row whose logits are asked for;
        None asks for all.
        """
        assert int(starts.max()) + count <= self.capacity, "the cache is full"
        self.positions = starts.to(self.device)[:, None] + torch.arange(count, device=self.device)
        self.furthest = int(starts.max()) + count
        self.wanted = None if wanted is None else wanted.to(self.device)
        from_the_start = bool((starts == 0).all())
        seen = self._slots[: self.furthest] <= self.positions[:, :, None]
        # Which slots each query sees, [b, 1, s, furthest]; None where plain causal attention says the same.
        self.mask = None if from_the_start else seen[:, None]
        return self

    @property
    def rotary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens at hand, each [s, b, 1, d], fp32."""
        positions = self.positions.t()
        return self._cos[positions][:, :, 0], self._sin[positions][:, :, 0]

    def only_wanted(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] to [1, b, h], or to itself where all are wanted: the head's matrix is the largest."""
        return x if self.wanted is None else x[self.wanted, self.rows[:, 0]][None]
