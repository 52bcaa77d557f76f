"""Optimizer states in 8 bits: a level of 256 for each value, and an fp32 scale for each block of values.

The levels are those of dynamic quantization, and the scale is the largest magnitude in the block (Dettmers et al. 2022,
8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861). Arithmetic is that of torchao's AdamW8bit, which has
the levels from bitsandbytes. Blocks are others: STATE_BLOCK successive values of a row, where torchao takes 256 of
whatever lies in a rank's memory. So splitting a matrix by rows never splits a block, plan/rules/finetune.py refuses
layouts in which splitting by columns would, and a value has the same neighbours in every layout.
"""

from __future__ import annotations

import numpy
import torch

from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.devices.kernels import EAGER, Kernels, Levels


class BlockwiseState:
    """A state of a matrix [rows, columns], all zeros at first. ``state[a:b]`` are rows in fp32, a copy; assigned rows
    are quantized."""

    def __init__(self, like: torch.Tensor, levels: Levels, kernels: Kernels = EAGER) -> None:
        rows, columns = like.shape
        self.levels, self.kernels = levels, kernels
        self.codes = torch.zeros(rows, columns, dtype=torch.uint8, device=like.device)
        """The number of each value's level."""
        self.scales = torch.zeros(rows, columns // STATE_BLOCK, device=like.device)
        """fp32, one for each block."""

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self.kernels.read_block(self.codes[rows], self.scales[rows], self.levels)

    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        self.assign(rows, values)

    def assign(self, rows: slice, values: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """Quantize rows. Where ``unless`` (bool scalar) is true, the rows keep their bits: the same values, quantized
        a second time, would differ."""
        self.kernels.write_block(values, self.levels, self.codes[rows], self.scales[rows], unless)


def levels_on(device: torch.device, *, signed: bool) -> Levels:
    """The levels of values in [-1, 1], or in [0, 1] if they are not ``signed``, on a device."""
    values, boundaries, lowest = _LEVELS[signed]
    codes = torch.tensor(lowest, dtype=torch.uint8, device=device)
    return Levels(torch.tensor(values, device=device), torch.tensor(boundaries, device=device), codes)


def _dynamic_levels(signed: bool) -> tuple[list[float], list[float], list[int]]:
    """What ``Levels`` holds. A level is 0.1 to 1, in equal steps, times a power of ten from 1e-6 to 1; each power has
    twice as many steps as the one below it."""
    levels = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1)
        positive = (10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        levels += positive + [-value for value in positive] * signed
    values = torch.tensor(sorted(levels))
    borders = _borders(values)
    # By numpy: torch would start its threads here, at import, and forked ranks would wait for them for ever.
    upper = numpy.arange(1 << 16, dtype=numpy.uint32) << 16
    smallest = numpy.minimum(upper.view(numpy.float32), (upper | 0xFFFF).view(numpy.float32))
    lowest = numpy.searchsorted(borders.numpy(), smallest, side="right")
    return values.tolist(), [*borders.tolist(), torch.inf], lowest.tolist()


def _borders(levels: torch.Tensor) -> torch.Tensor:
    """Where torchao rounds up: the smallest fp32 values of which the distance from the level below, computed in fp32,
    is at least half of that between the two."""
    below, gap = levels[:-1], levels[1:] - levels[:-1]
    border = below + gap * 0.5
    for _ in range(8):  # the rounding of a difference is a few units in the last place
        border = torch.nextafter(border, below)
    for _ in range(16):
        border = torch.where(border - below >= gap * 0.5, border, torch.nextafter(border, levels[1:]))
    return border


_LEVELS = {signed: _dynamic_levels(signed) for signed in (True, False)}
"""Made here, by real tensors: a rehearsal's have no values."""
