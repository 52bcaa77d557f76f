"""Optimizer states in 8 bits read and written by a kernel of our own (blockwise_cpu.cpp), in compiled runs on a CPU.

Its bits are those of ``BlockwiseState``'s operators, of which torch needs fifteen for a state, each a pass over memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices.cpu.cpp import load_cpp


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, with a warning, where it can't be had."""
    source = Path(__file__).with_name("blockwise_cpu.cpp").read_text()
    source = f"constexpr long BLOCK = {STATE_BLOCK};\n{source}"
    return load_cpp(source, "8-bit states go through torch's operators: our kernel for CPUs could not be compiled")


def read(codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """fp32 values of uint8 ``codes`` [rows, columns], whose blocks have fp32 ``scales``."""
    values = torch.empty(codes.shape, dtype=torch.float32)
    _call("read_blocks", codes, scales, levels, values, blocks=scales.numel())
    return values


def write(
    values: torch.Tensor,
    borders: torch.Tensor,
    lowest: torch.Tensor,
    least: float,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Sets ``codes`` and ``scales`` to those of fp32 ``values``; ``least`` is the smallest scale."""
    assert values.dtype == torch.float32 and values.shape == codes.shape, (values.dtype, values.shape, codes.shape)
    _call(
        "write_blocks",
        values.contiguous(),
        borders,
        lowest,
        ctypes.c_float(least),
        codes,
        scales,
        blocks=scales.numel(),
    )


def _call(name: str, *arguments: torch.Tensor | ctypes.c_float, blocks: int) -> None:
    assert all(a.is_contiguous() and a.device.type == "cpu" for a in arguments if isinstance(a, torch.Tensor))
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    getattr(library(), name)(*given, ctypes.c_int64(blocks), ctypes.c_int(torch.get_num_threads()))
