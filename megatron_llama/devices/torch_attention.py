"""Attention in plain torch: causal, with a dense mask, or by tiles for documents and patterns.

Whole sequences without a pattern use torch's causal scaled_dot_product_attention, whose fused kernels support grouped
heads. A dense mask computes all scores. Tiles compute the visible rectangles and little else. Uncompiled, tiles read
the documents' lengths on the host. Inside a compiled block they are one operator that reads the lengths at run time, so
that new documents need no new graph. No kernel repeats key and value heads in memory.

A tile is one call, for queries and keys of one document. The calls of a document (``Pattern.tiles``) need not have all
keys of a query. A call returns the log-sum-exp of its scores with its output, so outputs for parts of the keys are
merged exactly. An output is a mean with weights exp(scores), and the log-sum-exp is the logarithm of the weights' sum
(Milakov & Gimelshein 2018, arXiv:1805.02867). With the final log-sum-exp and output, the gradients of the parts add up
to the full gradient. A call is the CPU's or the GPU's FlashAttention, or memory-efficient attention for fp32 on a GPU.
For other dtypes and heads it is plain matmuls with all scores of the call in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef

from megatron_llama.arch.attention_pattern import (
    CAUSAL,
    LARGEST_FLASH_HEAD,
    SCORES_AT_ONCE,
    KeyRange,
    Keys,
    Lengths,
    Pattern,
    Tile,
)
from megatron_llama.devices.attention_inputs import AttentionInputs, is_visible

aten = torch.ops.aten

Chunks = Sequence[range]
"""Positions of queries in their sequence, in the order of q."""


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of x's shape [b, heads, s, d] with memory order [s, b, heads, d], as the layers use it."""
    b, heads, s, d = x.shape
    return torch.empty(s, b, heads, d, dtype=dtype or x.dtype, device=x.device).permute(1, 2, 0, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None) -> Tensor:
    """Return the attention of q [b, heads, s, d] to k and v [b, kv heads, s, d] as [b, heads, s, d]."""
    if visible is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if visible.mask is not None:
        # scaled_dot_product_attention with a mask has no grouped heads: loop over the members of a group.
        members = q.unflatten(1, (k.shape[1], -1)).unbind(2)
        outs = [F.scaled_dot_product_attention(member, k, v, attn_mask=visible.mask) for member in members]
        return torch.stack(outs, dim=2).flatten(1, 2)
    return attend_documents(q, k, v, visible, visible.kernel)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs, kernel: str) -> Tensor:
    """Return the attention inside documents, by the ``kernel`` of that name in ``KERNELS``."""
    if visible.lengths is None:
        out, _ = _operator(q, k, v, visible.host_cu_seqlens, visible.cu_seqlens, kernel, [*astuple(visible.pattern)])
        return out
    return AttentionOp.apply(q, k, v, _forward, _backward, visible._replace(kernel=kernel))


def attend_whole(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """Return the causal attention of whole sequences, by the ``kernel`` of that name, which takes no ``cu_seqlens``."""
    pattern = Pattern()
    if torch.compiler.is_compiling():
        out, _ = _operator(q, k, v, None, None, kernel, [*astuple(pattern)])
        return out
    visible = AttentionInputs(pattern, kernel, document_lengths(None, q.shape[0], q.shape[2]))
    return AttentionOp.apply(q, k, v, _forward, _backward, visible)


class _Document(NamedTuple):
    row: int
    rows: int
    start: int
    length: int


def _documents(lengths: Lengths) -> Iterator[_Document]:
    """Yield the documents of all rows. Sequences of one document each form one batch."""
    if all(len(row) == 1 for row in lengths):
        yield _Document(0, len(lengths), 0, lengths[0][0])
        return
    for number, row in enumerate(lengths):
        start = 0
        for length in row:
            yield _Document(number, 1, start, length)
            start += length


def _of(tensors: tuple[Tensor, ...], document: _Document) -> tuple[Tensor, ...]:
    row, rows, start, length = document
    return tuple(tensor.narrow(0, row, rows).narrow(2, start, length) for tensor in tensors)


def _tokens(x: Tensor, start: int, stop: int) -> Tensor:
    """Return x[:, :, start:stop]. torch cannot index tensors of an unavailable device, as in rehearsals."""
    return x.narrow(2, start, stop - start)


class _Queries(NamedTuple):
    """Queries of one document, which are adjacent in q."""

    document: _Document
    offset: int
    """Index of the first one in q."""
    first: int
    """Its position in the document."""
    end: int
    """Position after the last one."""


def _queries(lengths: Lengths, chunks: Chunks | None) -> Iterator[_Queries]:
    """Yield the queries of each document; of each chunk, if q has only the queries at positions ``chunks``."""
    for document in _documents(lengths):
        if chunks is None:
            yield _Queries(document, document.start, 0, document.length)
            continue
        offset = 0
        for chunk in chunks:
            first = max(chunk.start - document.start, 0)
            end = min(chunk.stop - document.start, document.length)
            if first < end:
                yield _Queries(document, offset + document.start + first - chunk.start, first, end)
            offset += len(chunk)


def _rows_of(x: Tensor, queries: _Queries, tile: Tile) -> Tensor:
    """Return the queries of a tile in a tensor of q's length."""
    start, document = queries.offset + tile.start - queries.first, queries.document
    return x.narrow(0, document.row, document.rows).narrow(2, start, tile.stop - tile.start)


def tiles_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, pattern: Pattern, chunks: Chunks | None = None
) -> tuple[Tensor, Tensor]:
    """Return (attention [b, heads, n, d], log-sum-exp of scores [b, heads, n], fp32).

    Args:
        chunks: positions of the n queries in the sequence of k and v. Default: all.
    """
    outs, lses = empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for queries in _queries(lengths, chunks):
        keys, values = _of((k, v), queries.document)
        global_kv = _global(pattern, keys, values)
        for tile in pattern.tiles(queries.document.length, queries.first, queries.end):
            tile_q, out, lse = (_rows_of(x, queries, tile) for x in (q, outs, lses))
            results = [_call(tile_q, *_part(keys, values, global_kv, part), part.keys) for part in tile.parts]
            tile_out, tile_lse = functools.reduce(_merge, results)
            out.copy_(tile_out)
            lse.copy_(tile_lse)
    return outs, lses


def tiles_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    pattern: Pattern,
    chunks: Chunks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output's gradient and the results of ``tiles_forward``.

    With ``chunks``, the gradients of k and v are this rank's part: the sum over these queries.
    """
    # Sums over calls are in fp32.
    is_sum = chunks is not None or any(pattern.is_sparse(length) for row in lengths for length in row)
    grads = tuple(empty_like(x, torch.float32 if is_sum else None) for x in (q, k, v))
    if is_sum:
        for x in grads:
            x.zero_()
    for queries in _queries(lengths, chunks):
        if chunks is not None or pattern.is_sparse(queries.document.length):
            _sum_of_calls(grads, (grad, q, k, v, out, lse), queries, pattern)
        else:
            grad_of, q_of, k_of, v_of, out_of, lse_of = _of((grad, q, k, v, out, lse), queries.document)
            results = _call_backward(grad_of, q_of, k_of, v_of, out_of, lse_of, Keys.CAUSAL)
            for target, result in zip(_of(grads, queries.document), results, strict=True):
                target.copy_(result)
    dq, dk, dv = (x.to(like.dtype) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _sum_of_calls(grads: tuple[Tensor, ...], inputs: tuple[Tensor, ...], queries: _Queries, pattern: Pattern) -> None:
    """Add the gradients of ``queries`` to ``grads`` of q, k and v. ``inputs`` are the tensors of ``tiles_backward``."""
    grad, q, k, v, out, lse = inputs
    keys, values, *dkv = _of((k, v, *grads[1:]), queries.document)
    global_kv = _global(pattern, keys, values)
    global_grads = [torch.zeros_like(x, dtype=torch.float32) for x in global_kv]
    for tile in pattern.tiles(queries.document.length, queries.first, queries.end):
        tile_grad, tile_q, outs, lses, dq = (_rows_of(x, queries, tile) for x in (grad, q, out, lse, grads[0]))
        for part in tile.parts:
            result = _call_backward(tile_grad, tile_q, *_part(keys, values, global_kv, part), outs, lses, part.keys)
            dq.add_(result[0])
            sums = global_grads if part.keys is Keys.GLOBAL else dkv
            for total, more in zip(sums, result[1:], strict=True):
                _tokens(total, part.start, part.stop).add_(more)
    if global_kv:
        for total, more in zip(dkv, global_grads, strict=True):
            view = _global_view(pattern, total)
            view.add_(more.view(view.shape))


def _part(keys: Tensor, values: Tensor, global_kv: tuple[Tensor, ...], part: KeyRange) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a part of a tile."""
    keys, values = global_kv if part.keys is Keys.GLOBAL else (keys, values)
    return _tokens(keys, part.start, part.stop), _tokens(values, part.start, part.stop)


def _global(pattern: Pattern, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy the global keys and values of a document to contiguous tensors. Empty if the document is too short."""
    if not pattern.global_keys(tensors[0].shape[2])[0]:
        return ()
    return tuple(_global_view(pattern, x).flatten(2, 3) for x in tensors)


def _global_view(pattern: Pattern, x: Tensor) -> Tensor:
    """Return the global keys among x [b, kv heads, s, d] as a view [b, kv heads, groups, keys of a group, d]."""
    groups, first, size = pattern.global_keys(x.shape[2])
    return x.narrow(2, 0, groups * size).unflatten(2, (groups, size)).narrow(3, first, size - first)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge (output, log-sum-exp) over two sets of keys."""
    lse = torch.logaddexp(one[1], other[1])
    parts = (out.float() * (part - lse).exp().unsqueeze(-1) for out, part in (one, other))
    return sum(parts), lse  # type: ignore[return-value]


class _Kernel(Enum):
    CPU_FLASH = "the CPU's FlashAttention"
    FLASH = "FlashAttention"
    EFFICIENT = "CUTLASS's memory-efficient attention, in fp32 on GPUs, with repeated key and value heads"
    MATMUL = "matmuls, with all scores of a call in memory"


def _kernel(q: Tensor, mask: Tensor | None) -> _Kernel:
    """Return the kernel of a call."""
    if q.device.type == "cpu":
        return _Kernel.CPU_FLASH
    if mask is None and q.dtype.itemsize == 2 and q.shape[3] <= LARGEST_FLASH_HEAD and q.shape[3] % 8 == 0:
        return _Kernel.FLASH
    return _Kernel.EFFICIENT if mask is None and takes_efficient(q) else _Kernel.MATMUL


def takes_efficient(q: Tensor) -> bool:
    """Whether the memory-efficient kernel exists for q."""
    return q.device.type == "cuda" and q.dtype == torch.float32 and q.shape[3] % 4 == 0


def _repeated(q: Tensor, *keys_or_values: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of [b, kv heads, m, d] with a head per head of q."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in keys_or_values)


def _mask(q: Tensor, k: Tensor, keys: Keys) -> Tensor | None:
    """Return a window's mask [n, m]: 0 where query i attends to key j (i <= j <= i + m - n), else -inf."""
    if keys is not Keys.WINDOW:
        return None
    n, m = q.shape[2], k.shape[2]
    offset = torch.arange(m, device=q.device) - torch.arange(n, device=q.device).unsqueeze(-1)
    return q.new_zeros(n, m).masked_fill_((offset < 0) | (offset > m - n), -torch.inf)


def _call(q: Tensor, k: Tensor, v: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """Return (output [b, heads, n, d], log-sum-exp [b, heads, n], fp32) of n queries and m keys [b, kv heads, m, d]."""
    causal, mask = keys is Keys.CAUSAL, _mask(q, k, keys)
    kernel = _kernel(q, mask)
    if kernel is _Kernel.CPU_FLASH:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        return out, lse
    if kernel is _Kernel.FLASH:
        flat = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse, *_ = aten._flash_attention_forward(
            *flat, None, None, q.shape[2], k.shape[2], 0.0, causal, return_debug_mask=False
        )
        return out.transpose(1, 2), lse
    if kernel is _Kernel.EFFICIENT:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, *_repeated(q, k, v), None, True, 0.0, causal)
        return out, lse.narrow(2, 0, q.shape[2])
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(v.dtype)
    return _rows(weights.flatten(2, 3) @ v, q), lse.flatten(1, 2)


def _call_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Keys
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the keys of this call.

    ``grad``, ``out`` and ``lse`` belong to the merged result of all calls of these queries.
    """
    causal, mask = keys is Keys.CAUSAL, _mask(q, k, keys)
    kernel = _kernel(q, mask)
    if kernel is _Kernel.CPU_FLASH:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        result = op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask)
        return result[0], result[1], result[2]
    if kernel is _Kernel.FLASH:
        flat = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        sizes = q.shape[2], k.shape[2]
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        result = aten._flash_attention_backward(*flat, lse.contiguous(), None, None, *sizes, 0.0, causal, *no_dropout)
        return result[0].transpose(1, 2), result[1].transpose(1, 2), result[2].transpose(1, 2)
    if kernel is _Kernel.EFFICIENT:
        padded = F.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)  # kAlignLSE rows, as the forward pass writes them
        state = [torch.zeros((), dtype=torch.int64, device=q.device)] * 2
        op = aten._scaled_dot_product_efficient_attention_backward
        dq, *dkv, _ = op(grad, q, *_repeated(q, k, v), None, out, padded, *state, 0.0, [True] * 3 + [False], causal)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in dkv)
        return dq, dk, dv
    kv, scale = k.shape[1], q.shape[-1] ** -0.5
    weights = (_scores(q, k, causal, mask) - lse.unflatten(1, (kv, -1)).unsqueeze(-1)).exp().flatten(2, 3)
    grads, queries = _by_kv_head(grad, kv), _by_kv_head(q, kv)
    row_dot = (grad.float() * out.float()).sum(-1).unflatten(1, (kv, -1)).flatten(2, 3)
    by_score = (weights * ((grads @ v.mT).float() - row_dot.unsqueeze(-1)) * scale).to(q.dtype)
    return _rows(by_score @ k, q), by_score.mT @ queries, weights.to(v.dtype).mT @ grads


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape [b, heads, n, d] to [b, kv heads, group * n, d]: the queries of a group are rows of one matrix."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _rows(x: Tensor, q: Tensor) -> Tensor:
    """Reshape [b, kv heads, group * n, d] to q's shape [b, heads, n, d]."""
    return x.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Return scaled scores [b, kv heads, group, n, m], fp32, -inf for hidden keys."""
    scores = (_by_kv_head(q, k.shape[1]) @ k.mT).float().unflatten(2, (-1, q.shape[2])) * q.shape[-1] ** -0.5
    if causal:
        size = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(size, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def largest_logits(q: Tensor, k: Tensor, visible: AttentionInputs | None, chunks: Chunks | None = None) -> Tensor:
    """Return the largest scaled score of a visible key of each head, fp32 [heads].

    Scores are computed in fp32, by blocks of queries and keys.

    Args:
        q: [b, heads, n, d].
        k: [b, kv heads, s, d].
        visible: Mask inputs of the sequences, not of a compiled block.
        chunks: Positions of the n queries in the sequences. Default: all.
    """
    pattern, mask, lengths = CAUSAL, None, None
    if visible is not None:
        mask, lengths = visible.mask, visible.lengths
        pattern = visible.pattern if mask is None else CAUSAL
        assert mask is not None or lengths is not None, "a rule rejects compiled blocks"
    largest = torch.full(q.shape[1:2], -torch.inf, dtype=torch.float32, device=q.device)
    for queries in _queries(lengths or ((k.shape[2],),) * k.shape[0], chunks):
        row, rows, start, _ = queries.document
        step = max(16, math.isqrt(SCORES_AT_ONCE // (rows * q.shape[1])))
        for at, keys in _score_blocks(queries, step, pattern.window):
            shift = queries.offset - queries.first
            block = _tokens(q.narrow(0, row, rows), at.start + shift, at.stop + shift).float()
            block_keys = _tokens(k.narrow(0, row, rows), start + keys.start, start + keys.stop).float()
            if mask is None:
                hidden = _hidden(at, keys, pattern, q.device)
            else:
                hidden = ~mask[:, :, at.start : at.stop, keys.start : keys.stop].unsqueeze(2)
            largest = torch.maximum(largest, _largest_of_block(block, block_keys, hidden))
    return largest


def _largest_of_block(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """Return the largest score of each head [heads] of fp32 q and k, except where ``hidden`` is true. Frees the scores,
    so that one block exists at a time."""
    scores = _by_kv_head(q * q.shape[3] ** -0.5, k.shape[1]) @ k.mT
    return scores.unflatten(2, (-1, q.shape[2])).masked_fill_(hidden, -torch.inf).amax((0, 3, 4)).flatten()


def _score_blocks(queries: _Queries, step: int, window: int) -> Iterator[tuple[range, range]]:
    """Yield (queries, keys) by their positions in the document, in blocks of ``step``, without the hidden blocks."""
    for first in range(queries.first, queries.end, step):
        at = range(first, min(first + step, queries.end))
        for key in range(0, at.stop, step):
            keys = range(key, min(key + step, at.stop))
            if not window or keys.stop > first - window + 1:
                yield at, keys


def _hidden(queries: range, keys: range, pattern: Pattern, device: torch.device) -> Tensor:
    """Return whether a query (row) does not attend to a key (column) of its document, by their positions, bool."""
    rows = torch.arange(queries.start, queries.stop, device=device).unsqueeze(-1)
    columns = torch.arange(keys.start, keys.stop, device=device)
    return (columns > rows) | ~is_visible(rows, columns, pattern)


class DocumentKernel(NamedTuple):
    """Kernel of attention inside documents with a pattern."""

    forward: Callable[[Tensor, Tensor, Tensor, AttentionInputs], tuple[Tensor, Tensor]]
    """(q, k, v, visible) to (output [b, heads, s, d], log-sum-exp of scores [b, heads, s], fp32)."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(output's gradient, q, k, v, output, log-sum-exp, visible) to gradients of q, k and v."""


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs) -> tuple[Tensor, Tensor]:
    assert visible.lengths is not None
    return tiles_forward(q, k, v, visible.lengths, visible.pattern)


def _tiles_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: AttentionInputs
) -> tuple[Tensor, Tensor, Tensor]:
    assert visible.lengths is not None
    return tiles_backward(grad, q, k, v, out, lse, visible.lengths, visible.pattern)


KERNELS = {"tiles": DocumentKernel(_tiles_forward, _tiles_backward)}
"""Kernels by name. Device packages add theirs."""


def _forward(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs) -> tuple[Tensor, Tensor]:
    return KERNELS[visible.kernel].forward(q, k, v, visible)


def _backward(grad: Tensor, saved: Sequence[Tensor], visible: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # kernels require a contiguous last dim
    return KERNELS[visible.kernel].backward(grad, *saved, visible)


class AttentionOp(torch.autograd.Function):
    """Attention by a function with its backward function, for uncompiled blocks.

    ``run`` takes q, k, v and ``how``, and returns output and log-sum-exp. ``backward_of_run`` takes the output's
    gradient, (q, k, v, output, log-sum-exp) and ``how``, and returns the gradients of q, k and v.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Any, backward_of_run: Any, *how: Any) -> Tensor:
        out, lse = run(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run, ctx.how = backward_of_run, how
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *ctx.run(grad, ctx.saved_tensors, *ctx.how), *[None] * (2 + len(ctx.how))


def register_attention(operator: CustomOpDef, backward: CustomOpDef, tensors: int) -> None:
    """Register the shapes and the gradient of an operator, for compiled blocks.

    The operator takes q, k, v, ``tensors`` more tensors and other inputs; ``backward`` the output's gradient, q, k, v,
    output, log-sum-exp and the same others.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3 : 3 + tensors])
        ctx.how = inputs[3 + tensors :]

    def gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grad, *ctx.saved_tensors, *ctx.how), *[None] * (tensors + len(ctx.how))

    operator.register_fake(lambda q, *_: (empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
    backward.register_fake(lambda grad, q, k, v, *_: (empty_like(q), empty_like(k), empty_like(v)))
    operator.register_autograd(gradient, setup_context=save)


@torch.library.custom_op("megatron_llama::attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    host_cu_seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    kernel: str,
    pattern: list[int],
) -> tuple[Tensor, Tensor]:
    """Attention inside documents, for compiled blocks. ``pattern`` has the fields of ``Pattern``.

    Without ``host_cu_seqlens`` each sequence is one document.
    """
    lengths = document_lengths(host_cu_seqlens, q.shape[0], q.shape[2])
    return _forward(q, k, v, AttentionInputs(Pattern(*pattern), kernel, lengths, cu_seqlens=cu_seqlens))


@torch.library.custom_op("megatron_llama::attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    host_cu_seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    kernel: str,
    pattern: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = document_lengths(host_cu_seqlens, q.shape[0], q.shape[2])
    visible = AttentionInputs(Pattern(*pattern), kernel, lengths, cu_seqlens=cu_seqlens)
    return _backward(grad, (q, k, v, out, lse), visible)


def document_lengths(cu_seqlens: Tensor | None, rows: int, length: int) -> Lengths:
    """Return the documents' lengths in ``rows`` of ``length`` tokens. The last value of ``cu_seqlens`` repeats.

    None: each row is one document.
    """
    if cu_seqlens is None:
        return ((length,),) * rows
    lengths = []
    ends = [end for end in cu_seqlens.unique_consecutive().tolist() if end]
    for row in range(rows):
        row_ends = [end - row * length for end in ends if row * length < end <= (row + 1) * length]
        lengths.append(tuple(end - start for start, end in zip([0, *row_ends], row_ends, strict=False)))
    return tuple(lengths)


register_attention(_operator, _operator_backward, tensors=2)
