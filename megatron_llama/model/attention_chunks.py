"""Causal attention over whole sequences on a CPU: plain products, by chunks of queries with the keys that they see.

torch's FlashAttention for CPUs gains from 16-bit formats in its forward pass only, and there only with AMX units. Here
a chunk is two batched products in the forward pass and five in the backward, and its softmax is one operator of torch
on scores that are still in the cache. What lies behind a chunk's last query is not computed. The queries of a group of
heads are rows of one matrix, so key and value heads are not repeated.

The backward pass needs queries, keys and values alone. It computes the softmax again (as in Dao et al. 2022,
arXiv:2205.14135), for which torch's operator finds maximum and sum while it is at a row, and so does that of its
gradient with the mean that FlashAttention takes from the output.

Scores and the gradients of the weights are products in fp32, as in torch's kernel, and so is the output; the other
three products of the backward pass are in the tensors' dtype. Where a processor has AMX units, tensors in bf16 go
through torch's kernel in the forward pass, and the backward pass makes its fp32 products of them on these units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron_llama.model.attention_tiles import empty_like
from megatron_llama.model.cpu_products import by_amx, by_onednn, exact_in, in_512_bits

aten = torch.ops.aten
CHUNK = 128
"""Tokens whose queries go together. Of their scores with their own keys half are computed in vain."""
FASTER = range(384, 768)
"""Lengths of the sequences for which this is faster than torch's kernel where MKL multiplies: from 768 on that takes
256 queries at a time, where it takes 64 of shorter ones, and below some 384 its scores are in the nearer cache."""
FASTER_BY_ONEDNN, FASTER_IN_512_BITS = range(16, 768), range(16, 8193)
"""The same where oneDNN multiplies in fp32, which torch's kernel leaves to MKL even then, in both dtypes (Zen 4); and
for bf16 where the units have 512 bits (Zen 5). Longer ones than 8,192 were not measured."""
FASTER_BY_AMX = range(16, 768)
"""The same for bf16 where there are AMX units, which torch's forward pass uses well and its backward pass does not."""
SCORES = 2**20
"""Scores that are in memory at once, 4 MiB that stay in the cache; more where a chunk of one kv head has more."""


def is_faster(q: Tensor) -> bool:
    """Whether this is faster than torch's kernel for queries [b, heads, s, d]."""
    if q.device.type != "cpu" or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if by_amx(q.dtype):
        return q.shape[2] in FASTER_BY_AMX
    if not by_onednn():
        return q.shape[2] in FASTER
    return q.shape[2] in (FASTER_IN_512_BITS if q.dtype == torch.bfloat16 and in_512_bits() else FASTER_BY_ONEDNN)


@torch.library.custom_op("megatron_llama::causal_attention", mutates_args=())
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [b, heads, s, d] to k and v [b, kv heads, s, d]: [b, heads, s, d]."""
    if by_amx(q.dtype):
        return empty_like(q).copy_(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0])
    queries, keys, values = (_by_kv_head(x, k.shape[1], torch.float32) for x in (q, k, v))
    scale, out, memory = q.shape[3] ** -0.5, torch.empty_like(queries), _Memory(torch.float32)
    for chunk in _chunks(queries, keys):
        weights = _weights(queries, keys, chunk, scale, memory)
        out[chunk.heads, chunk.rows] = weights @ values[chunk.heads, : chunk.seen]
    return _by_head(out, q)


@torch.library.custom_op("megatron_llama::causal_attention_backward", mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output."""
    scale, kv_heads = q.shape[3] ** -0.5, k.shape[1]
    queries, keys, values, grads = (_by_kv_head(x, kv_heads, x.dtype) for x in (q, k, v, grad))
    wide_queries, wide_keys, wide_values, wide_grads = (x.float() for x in (queries, keys, values, grads))
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(keys)
    memory, second, narrow = _Memory(torch.float32), _Memory(torch.float32), _Memory(q.dtype)
    with exact_in(q.dtype):
        for chunk in _chunks(wide_queries, wide_keys):
            some, rows, seen = chunk.heads, chunk.rows, chunk.seen
            weights = _weights(wide_queries, wide_keys, chunk, scale, memory)
            # Scaled here, and with it all that is linear in it.
            by_weight = _product(wide_grads[some, rows], wide_values[some, :seen].mT, scale, second)
            factors = _narrowed(weights, narrow)
            dv[some, :seen].baddbmm_(factors.mT, grads[some, rows])
            by_score = aten._softmax_backward_data.out(by_weight, weights, -1, torch.float32, grad_input=by_weight)
            factors = _narrowed(by_score, narrow)
            dq[some, rows] = factors @ keys[some, :seen]
            dk[some, :seen].baddbmm_(factors.mT, queries[some, rows])
    return _by_head(dq, q), _by_head(dk, k), _by_head(dv, v)


class _Chunk(NamedTuple):
    heads: slice
    """Of all rows of the batch."""
    rows: slice
    """Of the queries of a kv head."""
    seen: int
    """Keys that its last token sees."""
    hidden: Tensor
    """0 where a query sees a key of the chunk's own tokens, else -inf [rows, tokens]."""


def _chunks(queries: Tensor, keys: Tensor) -> Iterator[_Chunk]:
    """The chunks of queries [kv heads, s * group, d]."""
    kv_heads, length = keys.shape[:2]
    group = queries.shape[1] // length
    at_once = max(1, SCORES // (group * CHUNK * length))
    places = torch.arange(CHUNK)
    hidden = torch.zeros(CHUNK * group, CHUNK)
    hidden.masked_fill_(places > places.repeat_interleave(group).unsqueeze(-1), -math.inf)
    for first in range(0, kv_heads, at_once):
        heads = slice(first, min(first + at_once, kv_heads))
        for stop in range(length, 0, -CHUNK):  # the largest first, as _Memory wants
            start = max(0, stop - CHUNK)
            tokens = stop - start
            yield _Chunk(heads, slice(start * group, stop * group), stop, hidden[: tokens * group, :tokens])


class _Memory:
    """For one tensor after another, of which the first is the largest. New pages would cost as much as a softmax."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._whole: Tensor | None = None

    def of(self, *shape: int) -> Tensor:
        """A tensor with any values, which takes the place of the one before it."""
        if self._whole is None:
            self._whole = torch.empty(shape, dtype=self.dtype)
        return self._whole.view(-1)[: math.prod(shape)].view(shape)


def _weights(queries: Tensor, keys: Tensor, chunk: _Chunk, scale: float, memory: _Memory) -> Tensor:
    """The softmax of a chunk's scores [kv heads, rows, keys], fp32."""
    scores = _product(queries[chunk.heads, chunk.rows], keys[chunk.heads, : chunk.seen].mT, scale, memory)
    scores[..., -chunk.hidden.shape[1] :] += chunk.hidden
    return torch.softmax(scores, -1, out=scores)


def _product(one: Tensor, other: Tensor, scale: float, memory: _Memory) -> Tensor:
    out = memory.of(one.shape[0], one.shape[1], other.shape[2])
    return torch.baddbmm(out, one, other, beta=0, alpha=scale, out=out)


def _narrowed(x: Tensor, memory: _Memory) -> Tensor:
    """x in the memory's dtype, which may be its own."""
    return x if x.dtype == memory.dtype else memory.of(*x.shape).copy_(x)


def _by_kv_head(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """x [b, heads, s, d] as [b * kv heads, s * group, d]: a copy. A token's queries of a group are neighbours."""
    apart = x.unflatten(1, (kv_heads, -1)).transpose(2, 3)
    return apart.to(dtype, memory_format=torch.contiguous_format, copy=True).flatten(0, 1).flatten(1, 2)


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """The reverse, in the dtype and with the shape of ``like``; in memory as the layers want it."""
    b, heads, s, _ = like.shape
    group = x.shape[1] // s
    out = empty_like(like)
    out.unflatten(1, (-1, group)).transpose(2, 3).copy_(x.view(b, heads // group, s, group, x.shape[2]))
    return out


@causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return empty_like(q)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, *ctx.saved_tensors)


causal_attention.register_autograd(_gradient, setup_context=_keep)


def _flops(q: tuple[int, ...], products: int) -> int:
    """Of products for the whole square of scores, as torch counts scaled_dot_product_attention."""
    return 2 * products * math.prod(q) * q[2]


@register_flop_formula(torch.ops.megatron_llama.causal_attention)
def _forward_flops(q: tuple[int, ...], *_: Any, **__: Any) -> int:
    return _flops(q, 2)


@register_flop_formula(torch.ops.megatron_llama.causal_attention_backward)
def _backward_flops(_: tuple[int, ...], q: tuple[int, ...], *__: Any, **___: Any) -> int:
    return _flops(q, 5)
