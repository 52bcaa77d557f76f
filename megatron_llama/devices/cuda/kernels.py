"""Kernels of NVIDIA GPUs. Not run on hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import fits_varlen
from megatron_llama.devices import torch_attention
from megatron_llama.devices.attention_inputs import AttentionInputs
from megatron_llama.devices.cuda import attention, transformer_engine
from megatron_llama.devices.cuda.compiler import compiler_missing
from megatron_llama.devices.kernels import Float8Operand, Kernels

torch_attention.KERNELS["varlen"] = torch_attention.DocumentKernel(attention.forward, attention.backward)
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
