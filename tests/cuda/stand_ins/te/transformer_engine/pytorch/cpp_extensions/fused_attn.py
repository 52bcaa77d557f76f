"""Attention of Transformer Engine's signatures, computed on the host. Device memory of the runtime is host memory.

Arguments, results and shapes are as in transformer_engine/pytorch/cpp_extensions/fused_attn.py of version 2.15, for the
backend F16_arbitrary_seqlen without dropout, with cuDNN 9.6 or newer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.cuda.host_arithmetic import on_host
from tests.model import flash

FusedAttnBackend = {"F16_arbitrary_seqlen": "arbitrary length"}
calls: Counter[str] = Counter()
"""Number of calls by function and layout."""


def _host(kind: str, *tensors: Tensor) -> list[Tensor]:
    """Return tensors on the host, [b, s, heads, d] or [tokens, heads, d]."""
    assert all(x.is_contiguous() for x in tensors)
    return [on_host(x.detach()).transpose(0, 1) if kind == "sbhd" else on_host(x.detach()) for x in tensors]


def _check(q: Tensor, starts: Tensor, longest: int, layout: str, mask: str, window: tuple[int, int]) -> tuple[str, Any]:
    """Return the format, and the boundaries of documents on the host."""
    kind, *others = layout.split("_")
    assert others == [kind] * 2 and mask == {"sbhd": "causal", "thd": "padding_causal"}[kind]
    assert q.dtype == torch.bfloat16 and window[0] >= -1 and window[1] == 0
    host = on_host(starts)
    assert host.dtype == torch.int32 and host[-1] == q.numel() // q.shape[-1] // q.shape[-2]
    assert kind == "thd" or host.tolist() == [i * longest for i in range(q.shape[1] + 1)]
    return kind, host if kind == "thd" else None


def _check_places(starts: Tensor | None, *places: Tensor | None) -> None:
    """Check the places of the documents in memory, which cuDNN reads if there are documents."""
    for given in places:
        assert starts is None or (given is not None and torch.equal(on_host(given), starts)), "address 0 is read"


def _put(values: Tensor, kind: str, like: Tensor) -> Tensor:
    """Return values as a new tensor on the device of ``like``."""
    values = values.transpose(0, 1) if kind == "sbhd" else values
    result = torch.empty(values.shape, dtype=values.dtype, device=like.device)
    on_host(result).copy_(values)
    return result


def fused_attn_fwd(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend,
    attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
    fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
    attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
):  # fmt: skip
    """Return (output, [log-sum-exp, state of the generator])."""
    kind, starts = _check(q, cu_seqlens_q, max_seqlen_q, qkv_layout, attn_mask_type, window_size)
    _check_places(starts, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    assert is_training and fused_attention_backend in FusedAttnBackend.values() and o_format == kind
    calls[f"fwd {kind}"] += 1
    out, lse, *_ = flash._forward(
        *_host(kind, q, k, v), starts, starts, max_seqlen_q, max_seqlen_kv, 0.0, window_size[0] < 0, False,
        window_size_left=window_size[0], window_size_right=0,
    )  # fmt: skip
    stats = lse.unsqueeze(-1) if kind == "sbhd" else lse.t().unsqueeze(-1)
    return _put(out, kind, q), [_put(stats, "", q), torch.zeros(2, dtype=torch.int64, device=q.device)]


def fused_attn_bwd(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
    fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
    fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
    do_format="sbhd", dqkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
    window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    """Return [gradient of q, of k, of v]."""
    kind, starts = _check(q, cu_seqlens_q, max_seqlen_q, qkv_layout, attn_mask_type, window_size)
    _check_places(starts, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    assert o_format == do_format == kind and dqkv_layout == qkv_layout
    calls[f"bwd {kind}"] += 1
    stats, state = aux_ctx_tensors
    heads, tokens = q.shape[-2], max_seqlen_q
    assert stats.shape == ((q.shape[1], heads, tokens, 1) if kind == "sbhd" else (q.shape[0], heads, 1))
    assert state.dtype == torch.int64 and stats.is_contiguous()
    host = on_host(stats.detach()).squeeze(-1)
    grads = flash._backward(
        *_host(kind, d_o, q, k, v, o), host if kind == "sbhd" else host.t().contiguous(), starts, starts,
        max_seqlen_q, max_seqlen_kv, 0.0, window_size[0] < 0, torch.zeros(2, dtype=torch.uint64), None,
        window_size_left=window_size[0], window_size_right=0,
    )  # fmt: skip
    return [_put(x, kind, q) for x in grads]
