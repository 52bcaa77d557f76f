"""KV cache for generation.

Position p of a row is in slot p modulo the number of slots. The attention mask follows from the positions in the slots,
so rows of different lengths need no padding mask. With a sliding window the number of slots is the window plus the next
tokens, for texts of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_llama import devices
from megatron_llama.arch.attention_pattern import pattern_of
from megatron_llama.arch.parameters import head_dim, kv_heads_per_rank
from megatron_llama.config import ModelConfig
from megatron_llama.devices.attention_inputs import AttentionInputs, is_visible
from megatron_llama.model.inputs import BlockInputs
from megatron_llama.model.llama import Attend, Llama
from megatron_llama.model.rotary import rotary_table
from megatron_llama.parallel.context_division import Division


class LayerCache:
    """Keys and values of one layer, [b, kv heads of this rank, slots, d]."""

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
            for row, positions in enumerate(cache.prompt_positions):
                self._keys[row, :, positions % cache.slots] = k[row, :, positions]
                self._values[row, :, positions % cache.slots] = v[row, :, positions]
            return attend(q, k, v, visible)
        slots = cache.positions % cache.slots
        self._keys[cache.rows, :, slots] = k.transpose(1, 2)
        self._values[cache.rows, :, slots] = v.transpose(1, 2)
        keys, values = self._keys[:, :, : cache.used], self._values[:, :, : cache.used]
        if q.shape[2] == 1:
            # One new token: the queries of a group attend to the same slots. One GEMM per group is faster than one
            # GEMV per head.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values, cache.mask).reshape(q.shape)
        return F.scaled_dot_product_attention(q, keys, values, cache.mask, enable_gqa=q.shape[1] != k.shape[1])


class KVCache:
    """KV cache of all layers. ``at`` sets the positions of the next tokens before each forward pass."""

    def __init__(
        self, model: ModelConfig, tp: int, batch: int, capacity: int, like: torch.Tensor, at_once: int = 1
    ) -> None:
        """Create a cache for ``capacity`` positions of ``batch`` rows.

        After the first forward pass it accepts at most ``at_once`` tokens at a time. ``like`` has the dtype and device.
        """
        self.device, self.capacity = like.device, capacity
        self.pattern = pattern_of(model)
        # The next tokens must not overwrite the window of the first one.
        self.slots = min(capacity, self.pattern.window + at_once - 1) if self.pattern.window else capacity
        self.rows = torch.arange(batch, device=self.device)[:, None]
        self.layers: list[Any] = self._allocate(model, kv_heads_per_rank(model, tp), like.dtype)
        self._cos, self._sin = rotary_table(model, capacity, self.device)
        self._slots = torch.arange(self.slots, device=self.device)

    def _allocate(self, model: ModelConfig, kv_heads: int, dtype: torch.dtype) -> list[Any]:
        shape = len(self.rows), kv_heads, self.slots, head_dim(model)
        return [LayerCache(self, shape, dtype) for _ in range(model.num_hidden_layers)]

    def at(self, starts: torch.Tensor, count: int, token_index: torch.Tensor | None = None) -> KVCache:
        """Set the positions of the next tokens and return the cache.

        Args:
            starts: first position of each row, int64 [b].
            count: number of tokens per row.
            token_index: last token of each row that is not padding, [b]; logits are computed only for it. None: all.
        """
        assert int(starts.max()) + count <= self.capacity, "the cache is full"
        self.positions = starts.to(self.device)[:, None] + torch.arange(count, device=self.device)
        self.token_index = None if token_index is None else token_index.to(self.device)
        multiple = devices.of(self.device).decoding_keys_multiple
        self.used = min(self.slots, -(-(int(starts.max()) + count) // multiple) * multiple)  # empty slots are masked
        self.from_the_start = bool((starts == 0).all())
        if self.from_the_start:
            lengths = [count] * len(starts) if token_index is None else (token_index + 1).tolist()
            self.prompt_positions = [torch.arange(max(0, n - self.slots), n, device=self.device) for n in lengths]
            return self
        # Each slot holds the last position written to it.
        last, slots = self.positions[:, -1:], self._slots[: self.used]
        held = (last - (last - slots) % self.slots)[:, None]
        queries = self.positions[:, :, None]
        visible = (held >= 0) & (held <= queries) & is_visible(queries, held, self.pattern)
        self.mask = visible[:, None]  # [b, 1, s, slots]
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

    def local(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the next tokens [b, s]: all of them."""
        return tokens

    def select(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``token_index`` from the ranks that have its tokens: this rank."""
        return logits

    def inputs(self, llama: Llama, tokens: torch.Tensor) -> BlockInputs:
        """Return the blocks' inputs for the next tokens [b, s]."""
        positions = self.positions.t()
        rotary = self._cos[positions][:, :, 0], self._sin[positions][:, :, 0]
        visible = llama.build_inputs.build_visible(tokens, None, self.pattern) if self.from_the_start else None
        return BlockInputs(rotary, visible)


# Caches that are divided over context-parallel ranks: a prompt is divided as in training (context_division.py). Each
# rank keeps the keys and values of its part, so a prompt may need more memory than a rank has. All ranks compute the
# tokens after the prompt and store the keys and values of every cp-th of them. Their attention is computed from each
# rank's keys and merged. With a sliding window, the keys of the whole prompt are kept.
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
        if not self.from_the_start:
            return super().inputs(llama, tokens)
        local = self.division.positions(self._unpadded, self.device).clamp(max=self.capacity - 1)
        builder: Any = llama.build_inputs
        return BlockInputs((self._cos[local], self._sin[local]), builder.visible(tokens))
