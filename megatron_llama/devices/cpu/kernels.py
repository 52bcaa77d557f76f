"""Kernels of the CPU: vectorized C++ in compiled runs, cache-sized chunks elsewhere."""

from __future__ import annotations

from torch import Tensor

from megatron_llama.devices.cpu.updates import UpdateKernels


class CpuKernels(UpdateKernels):
    """Overrides for tensors in the host's memory."""

    def is_one(self, factor: Tensor) -> bool:
        return bool(factor == 1)

    def rows_at_once(self, width: int) -> int:
        return max(1, (1 << 18) // max(1, width))  # few enough for the cache


EAGER, COMPILED = CpuKernels(compiled=False), CpuKernels(compiled=True)
