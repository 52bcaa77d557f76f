"""8-bit optimizer states: one of 256 levels per value, and an fp32 scale per block of values.

Levels are dynamic quantization's, and the scale is the largest magnitude in the block (Dettmers et al. 2022, 8-bit
Optimizers via Block-wise Quantization, arXiv:2110.02861). Arithmetic follows torchao's AdamW8bit, whose levels are from
bitsandbytes. A block is STATE_BLOCK successive values of a row, where torchao takes 256 values in memory order. So
splitting a matrix by rows never splits a block. plan/rules/finetune.py rejects layouts in which splitting by columns
would. A block has the same values in every layout.
"""

from __future__ import annotations

import numpy
import torch

from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices.kernels import EAGER, Levels, UpdateKernels


class BlockwiseState:
    """8-bit state of a matrix [rows, columns], initially zeros.

    ``state[a:b]`` returns a dequantized fp32 copy of rows. Assigning rows quantizes them.
    """

    def __init__(self, like: torch.Tensor, levels: Levels, kernels: UpdateKernels = EAGER) -> None:
        rows, columns = like.shape
        self.levels, self.kernels = levels, kernels
        self.codes = torch.zeros(rows, columns, dtype=torch.uint8, device=like.device)
        """Level index of each value, uint8 [rows, columns]."""
        self.scales = torch.zeros(rows, columns // STATE_BLOCK, device=like.device)
        """Scale of each block, fp32 [rows, columns / STATE_BLOCK]."""

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.kernels.read_block(self.codes[rows], self.scales[rows], self.levels)

    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        self.assign(rows, values)

    def assign(self, rows: slice, values: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """Quantize rows, unless ``unless`` (bool scalar) is true.

        Writing back the dequantized values would change them: quantization is not idempotent.
        """
        self.kernels.write_block(values, self.levels, self.codes[rows], self.scales[rows], unless)


def levels_on(device: torch.device, *, signed: bool) -> Levels:
    """Return the levels on a device, for values in [-1, 1] if ``signed``, else in [0, 1]."""
    values, boundaries, lowest = _LEVELS[signed]
    codes = torch.tensor(lowest, dtype=torch.uint8, device=device)
    return Levels(torch.tensor(values, device=device), torch.tensor(boundaries, device=device), codes)


def _dynamic_levels(signed: bool) -> tuple[list[float], list[float], list[int]]:
    """Return (values, boundaries, lowest) of ``Levels``.

    A level is 0.1 to 1, in equal steps, times a power of ten from 1e-6 to 1. Each power has twice the steps of the
    power below it.
    """
    levels = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1)
        positive = (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        levels += positive + [-value for value in positive] * signed
    values = torch.tensor(sorted(levels))
    boundaries = _boundaries(values)
    # numpy, because torch would start its threads at import, and forked ranks would wait for them forever.
    upper = numpy.arange(1 << 16, dtype=numpy.uint32) << 16
    smallest = numpy.minimum(upper.view(numpy.float32), (upper | 0xFFFF).view(numpy.float32))
    lowest = numpy.searchsorted(boundaries.numpy(), smallest, side="right")
    return values.tolist(), [*boundaries.tolist(), torch.inf], lowest.tolist()


def _boundaries(levels: torch.Tensor) -> torch.Tensor:
    """Return the values at which torchao rounds up.

    Each is the smallest fp32 value whose distance from the level below, computed in fp32, is at least half the gap.
    """
    below, gap = levels[:-1], levels[1:] - levels[:-1]
    boundary = below + gap * 0.5
    for _ in range(8):  # the rounding of a difference is a few units in the last place
        boundary = torch.nextafter(boundary, below)
    for _ in range(16):
        boundary = torch.where(boundary - below >= gap * 0.5, boundary, torch.nextafter(boundary, levels[1:]))
    return boundary


_LEVELS = {signed: _dynamic_levels(signed) for signed in (True, False)}
"""Computed at import, with real tensors: a rehearsal's fake tensors have no values."""
