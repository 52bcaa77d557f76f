"""KV cache that is divided over context-parallel ranks.

A prompt is divided as in training (parallel/context.py). Each rank keeps the keys and values of its part, so a
prompt may need more memory than one rank has. All ranks compute the tokens after the prompt and store the keys and
values of every cp-th of them. Their attention is computed from each rank's keys and merged.

With a sliding window, the keys of the whole prompt are kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.arch.shapes import head_dim
from megatron_llama.config import ModelConfig
from megatron_llama.devices.attention_inputs import AttentionInputs, is_visible
from megatron_llama.model.inputs import BlockInputs
from megatron_llama.model.llama import Attend, Llama
from megatron_llama.parallel.context import Division
from megatron_llama.tools.inference.kv_cache import KVCache, LayerCache

_EMPTY = -1


class DividedLayerCache(LayerCache):
    """This rank's keys and values of one layer, [b, kv heads, slots, d]."""

    _cache: DividedCache

    def attend(
        self, attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: AttentionInputs | None
    ) -> torch.Tensor:
        """Store this rank's keys and values [b, kv heads, s, d]; return attention of the queries [b, heads, s, d].

        For a prompt, this is ``attend`` with ``visible``.
        """
        cache = self._cache
        if cache.from_the_start:
            self._keys[:, :, : k.shape[2]] = k
            self._values[:, :, : v.shape[2]] = v
            return attend(q, k, v, visible)
        for row, (tokens, slots) in enumerate(cache.stored_here):
            self._keys[row, :, slots] = k[row, :, tokens]
            self._values[row, :, slots] = v[row, :, tokens]
        return _merged_attention(q, self._keys, self._values, cache.mask, cache.division.group)


def _merged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the attention of q [b, heads, n, d] to the keys and values [b, kv heads, slots, d] of all ranks.

    Args:
        mask: whether a query attends to a slot of this rank [b, 1, 1, n, slots], bool. A query attends to a slot of
            at least one rank.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.mT.unsqueeze(2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    weights = (scores - largest).exp()
    sums = torch.cat((weights @ v.float().unsqueeze(2), weights.sum(-1, keepdim=True)), dim=-1)
    dist.all_reduce(sums, group=group)
    return (sums[..., :-1] / sums[..., -1:]).flatten(1, 2).to(q.dtype)


class DividedCache(KVCache):
    """This rank's part of the KV cache of all layers. ``at`` sets the positions of the next tokens."""

    def __init__(
        self, model: ModelConfig, tp: int, batch: int, capacity: int, like: torch.Tensor, division: Division
    ) -> None:
        """Create a cache for ``capacity`` positions of ``batch`` rows. ``like`` has the dtype and device."""
        self.division = division
        super().__init__(model, tp, batch, capacity, like)

    def _allocate(self, model: ModelConfig, kv_heads: int, dtype: torch.dtype) -> list[Any]:
        """Return no layer: the prompt determines the number of slots."""
        self._shape, self._dtype, self._num_layers = (kv_heads, head_dim(model)), dtype, model.num_hidden_layers
        return []

    def at(self, starts: torch.Tensor, count: int, token_index: torch.Tensor | None = None) -> DividedCache:
        """Set the positions of the next tokens and return the cache. See ``KVCache.at``.

        A prompt needs ``token_index``.
        """
        assert int(starts.max()) + count <= self.capacity, "the cache is full"
        self.positions = starts.to(self.device)[:, None] + torch.arange(count, device=self.device)
        self.from_the_start = bool((starts == 0).all())
        if self.from_the_start:
            assert token_index is not None
            self._begin(count, token_index.to(self.device))
            return self
        self.token_index = None if token_index is None else token_index.to(self.device)
        cp, rank = self.division.topology.sizes["cp"], self.division.topology.place["cp"]
        self.stored_here = []
        for row, positions in enumerate(self.positions):
            tokens = (positions % cp == rank).nonzero()[:, 0]
            slots = self._prompt_slots + positions[tokens] // cp - self._lengths[row] // cp
            self._held[row, slots] = positions[tokens]
            self.stored_here.append((tokens, slots))
        held, queries = self._held[:, None], self.positions[:, :, None]
        visible = (held != _EMPTY) & (held <= queries) & is_visible(queries, held, self.pattern)
        self.mask = visible[:, None, None]
        return self

    def _begin(self, count: int, last: torch.Tensor) -> None:
        """Allocate slots for a prompt of ``count`` tokens and the tokens after it. ``last``: last token per row [b]."""
        local = self.division.positions(count, self.device)
        self._unpadded, self._prompt_slots, self._lengths = count, len(local), last + 1
        after = (self.capacity - int(self._lengths.min())) // self.division.topology.sizes["cp"] + 2
        slots, (kv_heads, width) = len(local) + after, self._shape
        shape = len(last), kv_heads, slots, width
        self.layers = [DividedLayerCache(self, shape, self._dtype) for _ in range(self._num_layers)]
        self._held = torch.full((len(last), slots), _EMPTY, device=self.device)  # the position in each slot
        self._held[:, : len(local)] = torch.where(local <= last[:, None], local, _EMPTY)
        self.token_index, self._is_here = self.division.local_index(last, count)

    def local(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the next tokens [b, s]: of a prompt, the divided sequence."""
        return self.division.local(tokens) if self.from_the_start else tokens

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``token_index`` from the ranks that have its tokens. A collective for a prompt."""
        return self.division.select(logits, self._is_here) if self.from_the_start else logits

    def inputs(self, llama: Llama, tokens: torch.Tensor) -> BlockInputs:
        """Return the blocks' inputs for this rank's next tokens [b, s]."""
        positions = self.positions.t()
        if not self.from_the_start:
            return BlockInputs((self._cos[positions][:, :, 0], self._sin[positions][:, :, 0]), None)
        local = self.division.positions(self._unpadded, self.device).clamp(max=self.capacity - 1)
        builder: Any = llama.build_inputs
        return BlockInputs((self._cos[local], self._sin[local]), builder.visible(tokens))
