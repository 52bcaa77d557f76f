"""Which library multiplies matrices on a CPU, MKL or oneDNN, and whether on AMX units. The fastest way through
attention and loss depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from megatron_llama.devices.processor import has_512_bit_units

_has_512_bit_units = cache(has_512_bit_units)


@torch.compiler.assume_constant_result  # Dynamo can't read it
def by_amx(dtype: torch.dtype) -> bool:
    """Whether AMX units multiply tensors of ``dtype``; they do for bf16 only."""
    return dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()


@torch.compiler.assume_constant_result  # Dynamo can't read it
def by_onednn() -> bool:
    """Whether oneDNN multiplies in fp32: the switch that devices/cpu/device.py turns where that pays."""
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16"


@torch.compiler.assume_constant_result  # Dynamo can't read it
def in_512_bits() -> bool:
    """Whether the processor is AMD's with units of 512 bits, which oneDNN uses and MKL does not."""
    return _has_512_bit_units()


@contextmanager
def exact_in(dtype: torch.dtype) -> Iterator[None]:
    """Products of fp32 tensors whose numbers are of ``dtype``: AMX units multiply them as bf16 and sum in fp32, which
    rounds nothing and takes half the time."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    if by_amx(dtype):
        products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before
