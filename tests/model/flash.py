"""A stand-in for FlashAttention's operators, which torch has for GPUs only: the same arguments and results, on the CPU.

Written after aten/src/ATen/native/transformers/cuda/attention.cu of torch 2.13. It also takes fp32, to compare exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """The operators exist on the CPU too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", _efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _efficient_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _sequences(q: Tensor, k: Tensor, starts: Tensor | None, longest: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """(queries, keys) of each sequence among the tokens."""
    if starts is None:
        yield from ((slice(i * n, (i + 1) * n), slice(i * m, (i + 1) * m)) for i in range(q) for n, m in [longest])
        return
    assert starts.dtype == torch.int32 and starts.is_contiguous()
    boundaries = starts.tolist()
    for start, stop in zip(boundaries, boundaries[1:], strict=False):
        assert start <= stop and stop - start <= longest[0], "longer than said"
        yield slice(start, stop), slice(start, stop)


def _scores(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> Tensor:
    """[heads, n, m] of q [n, heads, d] and k [m, kv heads, d]; the corner that is aligned is the last one."""
    n, heads, d = q.shape
    m, kv_heads, _ = k.shape
    assert heads % kv_heads == 0 and d % 8 == 0 and d <= 256
    whole = k.float().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), whole) * d**-0.5
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    right = 0 if causal else right
    hidden = (offset > right if right >= 0 else torch.zeros(n, m, dtype=torch.bool)) | (
        offset < -left if left >= 0 else torch.zeros(n, m, dtype=torch.bool)
    )
    return scores.masked_fill(hidden, -torch.inf)


def _flat(x: Tensor) -> Tensor:
    assert x.stride(-1) == 1
    return x.flatten(0, 1) if x.dim() == 4 else x


def _forward(
    q, k, v, starts_q, starts_k, most_q, most_k, dropout, causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, **_
):  # fmt: skip
    assert dropout == 0.0 and scale is None and not return_debug_mask
    left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
    flat = [_flat(x) for x in (q, k, v)]
    out = torch.empty_like(flat[0])
    lse = torch.empty(flat[0].shape[1], flat[0].shape[0])
    for rows, keys in _sequences(q.shape[0], k.shape[0], starts_q, (most_q, most_k)):
        scores = _scores(flat[0][rows], flat[1][keys], causal, left, right)
        whole = flat[2][keys].float().repeat_interleave(q.shape[-2] // k.shape[-2], dim=1)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), whole).to(out.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    if starts_q is None:
        lse = lse.unflatten(1, (q.shape[0], q.shape[1])).transpose(0, 1).contiguous()
    return out.view(q.shape), lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout, causal, seed, unused, *, scale=None,
    window_size_left=None, window_size_right=None, **_
):  # fmt: skip
    assert lse.is_contiguous() and seed.dtype == torch.uint64
    left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
    given, queries, keys_, values, outs = (_flat(x).float() for x in (grad, q, k, v, out))
    lses = lse if starts_q is not None else lse.transpose(0, 1).flatten(1)
    assert lses.shape == (queries.shape[1], queries.shape[0])
    group, scaling = q.shape[-2] // k.shape[-2], q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys_, values))
    for rows, keys in _sequences(q.shape[0], k.shape[0], starts_q, (most_q, most_k)):
        weights = (_scores(queries[rows], keys_[keys], causal, left, right) - lses[:, rows, None]).exp()
        k_whole, v_whole = (x[keys].repeat_interleave(group, dim=1) for x in (keys_, values))
        d_weights = torch.einsum("nhd,mhd->hnm", given[rows], v_whole)
        row_dot = (given[rows] * outs[rows]).sum(-1).t()[..., None]
        d_scores = weights * (d_weights - row_dot) * scaling
        dq[rows] = torch.einsum("hnm,mhd->nhd", d_scores, k_whole)
        dk[keys] = torch.einsum("hnm,nhd->mhd", d_scores, queries[rows]).unflatten(1, (-1, group)).sum(2)
        dv[keys] = torch.einsum("hnm,nhd->mhd", weights, given[rows]).unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype).view(q.shape), dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


def _efficient(q, k, v, bias, compute_log_sumexp, dropout=0.0, causal=False):
    assert q.shape[1] == k.shape[1] and bias is None and compute_log_sumexp
    assert not causal or q.shape[2] == k.shape[2], "the first corner is aligned"
    flat, sizes = [x.transpose(1, 2) for x in (q, k, v)], (q.shape[2], k.shape[2])
    out, lse, *_ = _forward(*flat, None, None, *sizes, dropout, causal, False)
    state = torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2), F.pad(lse, (0, -sizes[0] % 32), value=torch.inf), state, state


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, which, causal=False):
    assert lse.shape[2] % 32 == 0 and bias is None and which == [True, True, True, False]
    flat = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
    lse, seed = lse[:, :, : q.shape[2]].contiguous(), seed.to(torch.uint64)
    grads = _backward(*flat, lse, None, None, q.shape[2], k.shape[2], dropout, causal, seed, None)
    return *(x.transpose(1, 2) for x in grads), None
