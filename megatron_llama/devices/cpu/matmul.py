"""Matmuls on a CPU: which library multiplies, and bf16 on processors without instructions for it.

The fastest way through attention and loss depends on the library, MKL or oneDNN, and on AMX units.

If oneDNN does not take bf16 (x86 without AVX-512, many laptops), torch multiplies it number by number, at 1 GFLOP/s
where fp32 reaches 70 (docs/design/log/2026-11.md). ``multiply_in_fp32`` replaces torch's operators: they upcast their
operands,
multiply in fp32 and round the result once, as instructions for bf16 do. The replacement covers the whole process: eager
and compiled layers, their backward passes, the loss, attention and generation. The fp32 copies last as long as the
matmul.
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
_PRODUCTS = "mm", "mm.out", "addmm", "addmm.out", "bmm", "bmm.out", "baddbmm", "baddbmm.out"
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
_has_512_bit_units = cache(has_512_bit_units)


@torch.compiler.assume_constant_result  # Dynamo can't read it
def by_amx(dtype: torch.dtype) -> bool:
    """Whether AMX units multiply tensors of ``dtype``; they do for bf16 only."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


@torch.compiler.assume_constant_result  # Dynamo can't read it
def by_onednn() -> bool:
    """Whether oneDNN multiplies in fp32: the switch that cpu/device.py turns where that pays."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16"


@torch.compiler.assume_constant_result  # Dynamo can't read it
def in_512_bits() -> bool:
    """Whether the processor is AMD's with units of 512 bits, which oneDNN uses and MKL does not."""
    return _has_512_bit_units()


@contextmanager
def exact_in(dtype: torch.dtype) -> Iterator[None]:
    """Multiply fp32 tensors whose values fit ``dtype``: AMX units multiply them as bf16 and sum in fp32. Nothing is
    rounded, in half the time."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    if by_amx(dtype):
        products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def multiplies_bf16() -> bool:
    """Whether torch has fast bf16 matmuls for this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiply_in_fp32() -> torch.library.Library:
    """Replaces the operators in this process and its forks. The result's ``_destroy`` brings torch's own back."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that one is replaced
        for name in (*_IN_PLACE, *_PRODUCTS, *_ATTENTION):
            library.impl(name, _upcast_operator(name), "CPU", with_keyset=True, allow_override=True)
    return library


def _upcast_operator(name: str) -> Any:
    """torch's operator, in fp32 for bf16 tensors."""
    torchs = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return torchs.call_boxed(keys, *args, **kwargs)
        in_fp32 = {key: _to_fp32(value) for key, value in kwargs.items()}
        target = args[0] if name in _IN_PLACE else kwargs.get("out")
        if "out" in kwargs:
            in_fp32["out"] = torch.empty(0)
        found = torchs.call_boxed(keys, *map(_to_fp32, args), **in_fp32)
        if target is not None:
            return target.resize_(found.shape).copy_(found)
        if name == _ATTENTION[0]:
            return found[0].bfloat16(), found[1]  # the log-sum-exp is fp32 in any case
        return found.bfloat16() if isinstance(found, torch.Tensor) else tuple(each.bfloat16() for each in found)

    return product


def _to_fp32(x: Any) -> Any:
    """x, in fp32 if it is a bf16 tensor."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x
