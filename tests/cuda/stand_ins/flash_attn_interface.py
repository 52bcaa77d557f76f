"""A stand-in for FlashAttention 3's package: its two operators compute on the host, in the memory of the device.

Arguments and results are as in torch/nn/attention/_fa3.py of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.cuda.host_arithmetic import on_host
from tests.model import flash

calls: Counter[str] = Counter()
"""Number of calls of each operator."""


def fwd(*arguments: Any) -> tuple[Tensor, Tensor, None, None]:
    """Return (out, log-sum-exp); q, k, v [b, s, heads, d], or [tokens, heads, d] with boundaries."""
    calls["fwd"] += 1
    q, k, v, out, starts = (on_host(arguments[index]) for index in (0, 1, 2, 6, 7))
    longest, causal, left, right = arguments[12:14], *arguments[24:27]
    host_out, host_lse, *_ = flash._forward(
        q, k, v, starts, starts, *longest, 0.0, causal, False, window_size_left=left, window_size_right=right
    )
    result = torch.empty_like(arguments[0]) if arguments[6] is None else arguments[6]
    lse = torch.empty(host_lse.shape, dtype=host_lse.dtype, device=result.device)
    (on_host(result) if out is None else out).copy_(host_out)
    on_host(lse).copy_(host_lse)
    return result, lse, None, None


def bwd(*arguments: Any) -> None:
    """Write dq, dk and dv, the arguments 6 to 8."""
    calls["bwd"] += 1
    grad, q, k, v, out, lse, *targets, starts = map(on_host, arguments[:10])
    longest, causal, left, right = arguments[13:15], *arguments[16:19]
    grads = flash._backward(
        *(grad, q, k, v, out, lse, starts, starts, *longest, 0.0, causal),
        *(torch.zeros(2, dtype=torch.uint64), None),
        window_size_left=left,
        window_size_right=right,
    )
    for target, value in zip(targets, grads, strict=True):
        target.copy_(value)


torch.ops.flash_attn_3 = SimpleNamespace(fwd=fwd, bwd=bwd)  # type: ignore[assignment]
