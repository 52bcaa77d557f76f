"""Kernels of NVIDIA GPUs: FlashAttention over documents of different lengths. Not run on hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import fits_varlen
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs
from megatron_llama.devices.cuda import transformer_engine
from megatron_llama.devices.cuda.host import compiler_missing
from megatron_llama.devices.kernels import Float8Operand, Kernels

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


torch_attention.KERNELS["varlen"] = torch_attention.DocumentKernel(forward, backward)


AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
"""Inductor's option that rounds where uncompiled operators do: to 16 bits after each one, no fused multiply-add."""


@cache
def compile_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile ``function`` with Inductor for all shapes; all callers share the graphs."""
    compiled: Callable[..., Tensor] = torch.compile(function, dynamic=True, fullgraph=True, options=AS_EAGER)
    return compiled


@cache
def compile_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` with Inductor for tensors whose first dimension varies; all callers share the graphs.

    Constant sizes of the other dimensions make faster kernels. After Dynamo's limit of graphs, ``function`` runs.
    """
    compiled = torch.compile(function, dynamic=False, options=AS_EAGER)

    @wraps(function)
    def call(*args: Any) -> Any:
        return compiled(*(_with_rows(x) if isinstance(x, Tensor) else x for x in args))

    return call


def _with_rows(x: Tensor) -> Tensor:
    """Return x without its autograd history, so that the graph is the same in training and validation."""
    x = x.detach()
    if x.ndim > 1:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


class CudaKernels(Kernels):
    """``varlen`` for documents and windows, tiles for unsupported patterns, dtypes and heads."""

    def fuse(self, function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        """Compile ``function`` for all shapes. None without a C compiler, which only compiled runs require."""
        return compile_once(function) if self.compiled or compiler_missing() is None else None

    def fuse_rows(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compile ``function``. None in compiled blocks, whose operators Inductor fuses, and without a C compiler."""
        return None if self.compiled or compiler_missing() is not None else compile_rows(function)

    def norms(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Return the 2-norm of each part in fp32: a launch for many tensors, not one per tensor.

        The kernel adds the squares of chunks in fp32, then the sums of the chunks.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in parts:
            if part.numel():
                by_dtype.setdefault(part.dtype, []).append(part)
        return [torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)) for tensors in by_dtype.values()]

    def float8_mm(self, a: Float8Operand, b: Float8Operand, dtype: torch.dtype, fast: bool = False) -> Tensor:
        """Multiply on tensor cores, as torchao's ``addmm_float8_unwrapped``.

        Without ``fast``, the kernel with a scale per row is slow: the other kernel multiplies, and the scales follow.
        """
        by_row, scales = a.scale.ndim == 2, [a.scale.reciprocal(), b.scale.reciprocal()]
        after = scales if by_row and not fast else []
        if after:
            scales = [a.scale.new_ones(())] * 2
        out = torch.bfloat16 if by_row and dtype == torch.float32 else dtype  # the kernel has no fp32 output
        left, right = a.data.contiguous(), b.data.t().contiguous().t()  # the layouts that it needs
        result = torch._scaled_mm(left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=out, use_fast_accum=fast)
        for scale in after:  # powers of two, so no product is rounded, and no fp32 matrix is needed
            result.mul_(scale)
        return result.to(dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        if visible is None and transformer_engine.takes(q):
            return torch_attention.attend_whole(q, k, v, "varlen")
        if visible is None and q.shape[1] != k.shape[1] and torch_attention.takes_efficient(q):
            return torch_attention.attend_whole(q, k, v, "tiles")  # torch's SDPA would materialize the scores
        if visible is None or visible.kernel != "varlen":
            return torch_attention.attend(q, k, v, visible)
        dtype = "float32" if q.dtype == torch.float32 else "bfloat16"
        kernel = "varlen" if fits_varlen(visible.pattern, dtype, q.shape[3]) else "tiles"
        return torch_attention.attend_documents(q, k, v, visible, kernel)
