"""Matmuls on a CPU: the library (MKL or oneDNN, with or without AMX), and bf16 without bf16 instructions.

The fastest kernels of attention and loss depend on the library.

If oneDNN does not support bf16 (x86 without AVX-512, many laptops), torch multiplies bf16 at 1 GFLOP/s, compared with
70 GFLOP/s in fp32 (docs/design/decisions.md). ``multiply_in_fp32`` replaces torch's operators: they upcast their
operands, multiply in fp32 and round the result once, as bf16 instructions do. The replacement covers the whole process:
eager and compiled layers, their backward passes, the loss, attention and generation. The fp32 copies live as long as
the matmul.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from megatron_llama.devices.processor import has_512_bit_units

_IN_PLACE = "addmm_", "baddbmm_"
_MATMULS = "mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
_has_512_bit_units = cache(has_512_bit_units)


@torch.compiler.assume_constant_result  # Dynamo cannot trace it
def by_amx(dtype: torch.dtype) -> bool:
    """Whether AMX units multiply tensors of ``dtype``; they do for bf16 only."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


@torch.compiler.assume_constant_result  # Dynamo cannot trace it
def by_onednn() -> bool:
    """Whether oneDNN multiplies fp32 (``prefer_onednn`` in cpu/device.py)."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16"


@torch.compiler.assume_constant_result  # Dynamo cannot trace it
def in_512_bits() -> bool:
    """Whether the processor is an AMD with 512-bit units, which oneDNN uses and MKL does not."""
    return _has_512_bit_units()


@contextmanager
def exact_in(dtype: torch.dtype) -> Iterator[None]:
    """Multiply fp32 tensors whose values ``dtype`` can represent: AMX units multiply them as bf16 and sum in fp32.

    The result is exact, in half the time.
    """
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    if by_amx(dtype):
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before


def has_fast_bf16() -> bool:
    """Whether torch has fast bf16 matmuls for this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiply_in_fp32() -> torch.library.Library:
    """Replace the operators in this process and its forks. The result's ``_destroy`` restores torch's operators."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # about replaced operators
        for name in (*_IN_PLACE, *_MATMULS, *_ATTENTION):
            library.impl(name, _upcast_operator(name), "CPU", with_keyset=True, allow_override=True)
    return library


def _upcast_operator(name: str) -> Any:
    """Return torch's operator with bf16 tensors upcast to fp32."""
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def upcast(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return original.call_boxed(keys, *args, **kwargs)
        in_fp32 = {key: _to_fp32(value) for key, value in kwargs.items()}
        target = args[0] if name in _IN_PLACE else kwargs.get("out")
        if "out" in kwargs:
            in_fp32["out"] = torch.empty(0)
        result = original.call_boxed(keys, *map(_to_fp32, args), **in_fp32)
        if target is not None:
            return target.resize_(result.shape).copy_(result)
        if name == _ATTENTION[0]:
            return result[0].bfloat16(), result[1]  # the log-sum-exp is always fp32
        return result.bfloat16() if isinstance(result, torch.Tensor) else tuple(each.bfloat16() for each in result)

    return upcast


def _to_fp32(x: Any) -> Any:
    """Return x, upcast to fp32 if it is a bf16 tensor."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
