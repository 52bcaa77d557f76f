"""FlashAttention of NVIDIA GPUs over documents of different lengths, or cuDNN's attention. Not run on hardware."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_llama.devices.attention_inputs import AttentionInputs
from megatron_llama.devices.cuda import transformer_engine

# One call of FlashAttention (Dao 2023, arXiv:2307.08691) for all documents of a micro batch. torch.nn.attention.varlen
# calls the same operators, but differs between torch 2.11 (no ``enable_gqa``) and 2.13 (requires it). Also, the
# operator ``megatron_llama::attention`` needs the log-sum-exp for its backward pass.

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the results of ``DocumentKernel.forward``. The pattern has no blocks."""
    if transformer_engine.takes(q):
        return _cudnn_forward(q, k, v, visible)
    (starts, longest), window = _starts(visible), visible.pattern.window
    flat = [_flat(x) for x in (q, k, v)]
    result = aten._flash_attention_forward(
        *flat, starts, starts, longest, longest, 0.0, not window, False, **_window(window)
    )
    return _unflatten(result[0], q), result[1].unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1).contiguous()


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: AttentionInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output's gradient and the results of ``forward``."""
    if transformer_engine.takes(q):
        return _cudnn_backward([grad, q, k, v, out], lse, visible)
    (starts, longest), window = _starts(visible), visible.pattern.window
    flat = [_flat(x) for x in (grad, q, k, v, out)]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    result = aten._flash_attention_backward(
        *flat,
        lse.transpose(0, 1).flatten(1).contiguous(),
        starts,
        starts,
        longest,
        longest,
        0.0,
        not window,
        *no_dropout,
        **_window(window),
    )
    return _unflatten(result[0], q), _unflatten(result[1], k), _unflatten(result[2], v)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute ``forward`` with cuDNN. Without ``cu_seqlens``, each sequence is one document."""
    window = visible.pattern.window
    if visible.cu_seqlens is None:
        whole = [x.permute(2, 0, 1, 3).contiguous() for x in (q, k, v)]
        out, lse = transformer_engine.forward(whole, None, q.shape[2], window)
        return out.view(whole[0].shape).permute(1, 2, 0, 3), lse.view(q.shape[:3])
    flat = [_flat(x).contiguous() for x in (q, k, v)]
    out, lse = transformer_engine.forward(flat, *_starts(visible), window)
    return _unflatten(out.view(flat[0].shape), q), lse.view(q.shape[0], q.shape[2], -1).transpose(1, 2).contiguous()


def _cudnn_backward(tensors: Sequence[Tensor], lse: Tensor, visible: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``backward`` with cuDNN. ``tensors``: the output's gradient, q, k, v and the output."""
    (_, q, k, v, _), window = tensors, visible.pattern.window
    if visible.cu_seqlens is None:
        whole = [x.permute(2, 0, 1, 3).contiguous() for x in tensors]
        grads = transformer_engine.backward([*whole, lse.unsqueeze(-1)], None, q.shape[2], window)
        dq, dk, dv = (x.permute(1, 2, 0, 3) for x in grads)
        return dq, dk, dv
    flat = [_flat(x).contiguous() for x in tensors]
    by_token = lse.transpose(1, 2).flatten(0, 1).unsqueeze(-1).contiguous()
    grads = transformer_engine.backward([*flat, by_token], *_starts(visible), window)
    return _unflatten(grads[0], q), _unflatten(grads[1], k), _unflatten(grads[2], v)


def _starts(visible: AttentionInputs) -> tuple[Tensor, int]:
    """Return the boundaries without repetitions, and the tokens of the longest document."""
    lengths, cu_seqlens = visible.lengths, visible.cu_seqlens
    assert lengths is not None and cu_seqlens is not None
    return cu_seqlens.narrow(0, 0, 1 + sum(map(len, lengths))), max(map(max, lengths))


def _window(window: int) -> dict[str, Any]:
    """Return the kernel's window: the number of visible tokens before a query, -1 for all."""
    return {"window_size_left": window - 1, "window_size_right": 0}


def _flat(x: Tensor) -> Tensor:
    """Reshape [b, heads, s, d] to [b * s, heads, d]: a view if b is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflatten(x: Tensor, like: Tensor) -> Tensor:
    """Reshape [b * s, heads, d] to [b, heads, s, d] with memory order [s, b, heads, d], as the layers use it."""
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(0, 1).contiguous().permute(1, 2, 0, 3)
