"""Optimizer kernels of the CPU: 8-bit states in C++, and bf16 gradients in chunks that stay in the cache."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices.cpu.cpp import load_cpp
from megatron_llama.devices.kernels import FUSED_ADAM, LEAST_SCALE, Kernels, Levels

CHUNK = 2**20
"""Values of a gradient that are cast to fp32 together: enough to hide the calls, few enough for the cache."""


class UpdateKernels(Kernels):
    """Overrides for the optimizer. Each gives bitwise the results of plain torch."""

    def norms(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Upcast bf16 a few rows at a time, since torch's norm with a dtype takes five times as long."""
        norms: list[Tensor] = []
        for part in parts:
            if part.dtype == torch.float32:
                norms += super().norms([part])
                continue
            chunks = part.split(max(1, CHUNK // max(1, math.prod(part.shape[1:]))))
            buffer = torch.empty(chunks[0].numel())
            for rows in chunks:
                norms += super().norms([buffer[: rows.numel()].view(rows.shape).copy_(rows)])
        return norms

    def read_block(self, codes: Tensor, scales: Tensor, levels: Levels) -> Tensor:
        if not self._uses_cpp(codes):
            return super().read_block(codes, scales, levels)
        values = torch.empty(codes.shape, dtype=torch.float32)
        _call("read_blocks", codes, scales, levels.values, values, blocks=scales.numel())
        return values

    def write_block(
        self, values: Tensor, levels: Levels, codes: Tensor, scales: Tensor, unless: Tensor | None = None
    ) -> None:
        if not self._uses_cpp(codes):
            super().write_block(values, levels, codes, scales, unless)
        elif unless is None or not unless:
            assert values.dtype == torch.float32 and values.shape == codes.shape, (values.dtype, values.shape)
            tables = levels.boundaries, levels.lowest, ctypes.c_float(LEAST_SCALE)
            _call("write_blocks", values.contiguous(), *tables, codes, scales, blocks=scales.numel())

    def adam_(
        self,
        weight: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        factor: Tensor | None = None,
        *,
        decoupled: bool,
        **numbers: float,
    ) -> None:
        """Cast and scale a chunk of the gradient in the cache, where torch's kernel then reads it."""
        values = [x.view(-1).split(CHUNK) for x in (weight, exp_avg, exp_avg_sq)]
        buffer = weight.new_empty(min(CHUNK, weight.numel()))
        for part, mean, square, chunk in zip(*values, grad.reshape(-1).split(CHUNK), strict=True):
            gradient = buffer[: chunk.numel()].copy_(chunk)
            if factor is not None:
                gradient.mul_(factor)
            FUSED_ADAM[decoupled](
                [part], [gradient], [mean], [square], [], [step], amsgrad=False, maximize=False, **numbers
            )

    def _uses_cpp(self, codes: Tensor) -> bool:
        """Whether the C++ kernel is available. Fake tensors have no memory that it could read."""
        return self.compiled and type(codes) is torch.Tensor and library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning, if they cannot be compiled."""
    source = Path(__file__).with_name("blockwise_cpu.cpp").read_text()
    source = f"constexpr long BLOCK = {STATE_BLOCK};\n{source}"
    return load_cpp(source, "8-bit states go through torch's operators: our kernel for CPUs could not be compiled")


def _call(name: str, *arguments: Tensor | ctypes.c_float, blocks: int) -> None:
    assert all(a.is_contiguous() and a.device.type == "cpu" for a in arguments if isinstance(a, Tensor))
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    getattr(library(), name)(*given, ctypes.c_int64(blocks), ctypes.c_int(torch.get_num_threads()))
