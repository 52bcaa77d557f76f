"""cuDNN's attention through Transformer Engine, on Hopper and Blackwell GPUs that have it. Not run on hardware.

It replaces FlashAttention 2 for whole sequences, documents and windows in 16-bit formats, if FlashAttention 3 is not
used. The functions ``fused_attn_fwd`` and ``fused_attn_bwd`` return and take the log-sum-exp, so they also run
inside the operator of compiled blocks. ``DotProductAttention``, the module above them, leaves its gradient to autograd.
"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKAGE = "transformer_engine"
LEAST_CUDNN = {9: 90600, 10: 90700}
"""First version of cuDNN for a major compute capability, whose log-sum-exp of documents has a row per token. On other
GPUs the log-sum-exp is padded, or FlashAttention 2 is faster."""
FAULTY_CUDNN = 91000, 91001
"""Versions whose attention Transformer Engine rejects. Source of these numbers: ``nvte_get_fused_attn_backend``."""
LEAST_DETERMINISTIC = {9: 90600, 10: 91801}
"""First version with a deterministic backward pass."""
LARGEST_HEAD = 128
"""Largest head with a backward pass on all of these GPUs."""
_BACKEND = "F16_arbitrary_seqlen"


class _Operators(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backend: Any
    has_deterministic: bool
    """Whether the backward pass has a deterministic form."""


_operators: _Operators | None = None


def activate() -> bool:
    """Use cuDNN's attention in this process, if its GPU supports it; return whether it is used.

    Warns and keeps FlashAttention 2 if the package is installed but does not work.
    """
    global _operators
    _operators = None
    if importlib.util.find_spec(PACKAGE) is None or (major := torch.cuda.get_device_capability()[0]) not in LEAST_CUDNN:
        return False
    try:
        _operators = _load(major)
    except Exception as error:  # the package checks its parts and versions by assertions
        warnings.warn(f"FlashAttention 2 instead of {PACKAGE}, which does not work here: {error}", stacklevel=2)
    return _operators is not None


def _load(major: int) -> _Operators:
    """Return the functions of the package for a major compute capability. Raises if versions do not fit."""
    from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]

    version = torch.backends.cudnn.version() or 0
    if version < LEAST_CUDNN[major]:
        raise RuntimeError(f"cuDNN {version} is older than {LEAST_CUDNN[major]}")
    if version in FAULTY_CUDNN:
        raise RuntimeError(f"attention of cuDNN {version} has a known fault")
    backend, has_deterministic = fused_attn.FusedAttnBackend[_BACKEND], version >= LEAST_DETERMINISTIC[major]
    operators = _Operators(fused_attn.fused_attn_fwd, fused_attn.fused_attn_bwd, backend, has_deterministic)
    for function, names in ((operators.forward, _FORWARD), (operators.backward, _BACKWARD)):
        if missing := sorted(names - inspect.signature(function).parameters.keys()):
            raise RuntimeError(f"{function.__name__} has no argument {', '.join(missing)}; {PACKAGE} 2.15 has")
    return operators


_SHARED = {
    *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "fake_dtype", "fused_attention_backend"),
    *("qkv_layout", "o_format", "attn_mask_type", "window_size", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
}
_FORWARD = {"is_training", "q", "k", "v", *_SHARED}
_BACKWARD = {"q", "k", "v", "o", "d_o", "aux_ctx_tensors", "do_format", "dqkv_layout", "deterministic", *_SHARED}


def takes(q: Tensor) -> bool:
    """Whether queries [..., d] go to cuDNN in this process."""
    if _operators is None or (torch.are_deterministic_algorithms_enabled() and not _operators.has_deterministic):
        return False
    return q.dtype.itemsize == 2 and q.shape[-1] <= LARGEST_HEAD and q.shape[-1] % 8 == 0


def forward(qkv: Sequence[Tensor], starts: Tensor | None, longest: int, window: int) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp, fp32) of causal attention.

    Args:
        qkv: q, k and v, [tokens, heads, d] of all documents with ``starts``; else whole sequences [s, b, heads, d].
        starts: boundaries of the documents [documents + 1], int32.
        longest: tokens of the longest document.
        window: visible tokens, 0 for all.

    The log-sum-exp is [tokens, heads, 1] or [b, heads, s, 1].
    """
    assert _operators is not None
    q, k, v = qkv
    out, aux = _operators.forward(is_training=True, q=q, k=k, v=v, **_arguments(q, starts, longest, window))[:2]
    return out, aux[0]


def backward(
    tensors: Sequence[Tensor], starts: Tensor | None, longest: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the output's gradient, q, k, v, and the results of ``forward``."""
    assert _operators is not None
    grad, q, k, v, out, lse = tensors
    arguments = _arguments(q, starts, longest, window)
    no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of the generator
    results = _operators.backward(
        q=q,
        k=k,
        v=v,
        o=out,
        d_o=grad,
        aux_ctx_tensors=[lse, no_dropout],
        do_format=arguments["o_format"],
        dqkv_layout=arguments["qkv_layout"],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **arguments,
    )
    return results[0], results[1], results[2]


def _arguments(q: Tensor, starts: Tensor | None, longest: int, window: int) -> dict[str, Any]:
    """Return the arguments that both functions take."""
    assert _operators is not None
    kind, mask = ("sbhd", "causal") if starts is None else ("thd", "padding_causal")
    places = starts  # of the documents in memory; without them cuDNN reads from address 0
    if starts is None:
        starts = torch.arange(0, (q.shape[1] + 1) * longest, longest, dtype=torch.int32, device=q.device)
    return {
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
        "cu_seqlens_q_padded": places,
        "cu_seqlens_kv_padded": places,
        "fake_dtype": q.dtype,
        "fused_attention_backend": _operators.backend,
        "qkv_layout": "_".join([kind] * 3),
        "o_format": kind,
        "attn_mask_type": mask,
        "window_size": (window - 1, 0),  # -1: all
    }
