"""The product of queries, keys and values, by the kernel that suits the device, the documents and the pattern.

Compiled blocks on a CPU have a kernel of their own for whole sequences, documents and windows (attention_cpu.py).
Elsewhere whole sequences without a pattern are torch's own causal scaled_dot_product_attention, whose fused kernels
take grouped heads, or uncompiled on a CPU, where they are faster, plain products by chunks (attention_chunks.py). For
the rest arch/pattern.py says which of three kernels a device takes:

* tiles (attention_tiles.py) and varlen (attention_varlen.py) compute what is seen and little else. Uncompiled, they
  take the documents' lengths from the host; inside a compiled block they are one operator that reads them when it runs,
  so that other documents make no other graph.
* mask computes the whole square behind a mask of one shape.

None of them repeats key and value heads in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.arch.pattern import Pattern
from megatron_llama.model import attention_chunks, attention_cpu, attention_tiles, attention_varlen
from megatron_llama.model.document_mask import Documents, Lengths


class Seen(NamedTuple):
    """What the tokens of a micro batch see, in the form that the kernel takes; made once, for all layers."""

    pattern: Pattern
    kernel: str
    lengths: Lengths | None = None
    """Of the documents; None inside compiled blocks."""
    host_borders: Tensor | None = None
    """Inside compiled blocks ``Documents.borders`` in the host's memory."""
    borders: Tensor | None = None
    """``Documents.borders`` on the device, for varlen."""
    first: Tensor | None = None
    """Inside compiled blocks on a CPU the first token that each one sees [b, s], int32, where it sees all from there to
    itself."""
    mask: Tensor | None = None
    """Whether the query of a row sees the key of a column [b or 1, 1, s, s], bool, for mask."""


def seen(tokens: Tensor, documents: Documents | None, pattern: Pattern, kernel: str, compiled: bool) -> Seen | None:
    """What the tokens [b, s] see; None if that is all earlier ones in their sequence."""
    rows, length = tokens.shape
    if documents is None and not pattern.leaves_out(length):
        return None
    if kernel == "mask":
        positions = torch.arange(length, device=tokens.device)[None] if documents is None else documents.positions()
        return Seen(pattern, kernel, mask=mask_of(positions, pattern, None if documents is None else documents.ids))
    if documents is None:
        documents = Documents.whole(rows, length, tokens.device)
    borders = documents.borders if kernel == "varlen" else None
    if compiled:
        first = _first_seen(documents, pattern.window) if tokens.device.type == "cpu" and not pattern.group else None
        return Seen(pattern, kernel, None, documents.host_borders, borders, first)
    return Seen(pattern, kernel, documents.lengths, None, borders)


def _first_seen(documents: Documents, window: int) -> Tensor:
    """The first token that each one sees [b, s], int32; ``window`` is 0 for none."""
    positions = documents.positions()
    index = torch.arange(positions.shape[1], device=positions.device)
    return (index - (positions.clamp(max=window - 1) if window else positions)).int()


def mask_of(positions: Tensor, pattern: Pattern, documents: Tensor | None = None) -> Tensor:
    """Whether the query of a row sees the key of a column [b, 1, s, s], bool, from positions inside documents [b, s]
    and the documents' numbers [b, s]."""
    index = torch.arange(positions.shape[1], device=positions.device)
    mask = (index[:, None] >= index) & sees(positions[:, :, None], positions[:, None], pattern)
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None])
    return mask[:, None]


def sees(queries: Tensor, keys: Tensor, pattern: Pattern) -> Tensor:
    """Whether a query at a position sees an earlier key at another one, bool; positions broadcast."""
    if pattern.window:
        return queries - keys < pattern.window
    if pattern.group:
        kept = keys % pattern.group >= pattern.group - pattern.block * pattern.global_blocks
        return kept | (queries // pattern.group == keys // pattern.group)
    return torch.ones_like(queries - keys, dtype=torch.bool)


def attend(q: Tensor, k: Tensor, v: Tensor, what: Seen | None) -> Tensor:
    """Attention of q [b, heads, s, d] to k and v [b, kv heads, s, d]: [b, heads, s, d]."""
    first = None if what is None else what.first
    if torch.compiler.is_compiling() and (what is None or first is not None) and attention_cpu.serves(q):
        return attention_cpu.attend(q, k, v, first)[0]
    if what is None and attention_chunks.is_faster(q):
        return attention_chunks.causal_attention(q, k, v)
    if what is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if what.mask is not None:
        # Kernels that take a mask have no grouped heads. The queries of a group take turns at the keys of their head.
        members = q.unflatten(1, (k.shape[1], -1)).unbind(2)
        outs = [F.scaled_dot_product_attention(member, k, v, attn_mask=what.mask) for member in members]
        return torch.stack(outs, dim=2).flatten(1, 2)
    if what.lengths is None:
        out, _ = _operator(q, k, v, what.host_borders, what.borders, what.kernel, [*astuple(what.pattern)])
        return out
    return _Attention.apply(q, k, v, what.lengths, what.borders, what.kernel, what.pattern)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, borders: Tensor | None, kernel: str, pattern: Pattern
) -> tuple[Tensor, Tensor]:
    """(attention [b, heads, s, d], log-sum-exp of the scores [b, heads, s], fp32)."""
    if kernel == "tiles":
        return attention_tiles.forward(q, k, v, lengths, pattern)
    assert borders is not None
    return attention_varlen.forward(q, k, v, lengths, borders, pattern.window)


def _backward(
    grad: Tensor, kept: Sequence[Tensor], lengths: Lengths, borders: Tensor | None, kernel: str, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``kept`` are these, the output and the log-sum-exp."""
    q, k, v, out, lse = kept
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # which the kernels want
    if kernel == "tiles":
        return attention_tiles.backward(grad, q, k, v, out, lse, lengths, pattern)
    assert borders is not None
    return attention_varlen.backward(grad, q, k, v, out, lse, lengths, borders, pattern.window)


class _Attention(torch.autograd.Function):
    """Uncompiled."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        out, lse = _forward(q, k, v, *how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward(grad, ctx.saved_tensors, *ctx.how), None, None, None, None


@torch.library.custom_op("megatron_llama::attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, host_borders: Tensor, borders: Tensor | None, kernel: str, pattern: list[int]
) -> tuple[Tensor, Tensor]:
    """Inside compiled blocks. ``pattern`` are Pattern's numbers."""
    return _forward(q, k, v, _lengths(host_borders, q), borders, kernel, Pattern(*pattern))


@torch.library.custom_op("megatron_llama::attention_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    host_borders: Tensor,
    borders: Tensor | None,
    kernel: str,
    pattern: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, (q, k, v, out, lse), _lengths(host_borders, q), borders, kernel, Pattern(*pattern))


def _lengths(borders: Tensor, q: Tensor) -> Lengths:
    """The documents' lengths from their borders [tokens + 1], the last of which are repeated."""
    rows, length, found = q.shape[0], q.shape[2], []
    ends = [border for border in borders.unique_consecutive().tolist() if border]
    for row in range(rows):
        own = [end - row * length for end in ends if row * length < end <= (row + 1) * length]
        found.append(tuple(end - start for start, end in zip([0, *own], own, strict=False)))
    return tuple(found)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return attention_tiles.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_operator_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return attention_tiles.empty_like(q), attention_tiles.empty_like(k), attention_tiles.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, host_borders, borders, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, host_borders, borders)


def _operator_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *kept, host_borders, borders = ctx.saved_tensors
    return *_operator_backward(grad, *kept, host_borders, borders, *ctx.how), None, None, None, None


_operator.register_autograd(_operator_gradient, setup_context=_keep)
