"""Optimizer states in 8 bits: a level of 256 for each value, and an fp32 scale for each block of values.

The levels are those of dynamic quantization, and the scale is the largest magnitude in the block (Dettmers et al. 2022,
8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861). Arithmetic is that of torchao's AdamW8bit, which has
the levels from bitsandbytes. Blocks are others: STATE_BLOCK successive values of a row, where torchao takes 256 of
whatever lies in a rank's memory. So splitting a matrix by rows never splits a block, plan/rules/quantization.py refuses
layouts in which splitting by columns would, and a value has the same neighbours in every layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import torch

from megatron_llama.config.precision import STATE_BLOCK
from megatron_llama.optim import blockwise_cpu

_LEAST_SCALE = 1e-12
"""The scale of a block of zeros, by which it is divided."""


class Levels(NamedTuple):
    """What codes stand for, on a device."""

    values: torch.Tensor
    """fp32 [256], ascending."""
    borders: torch.Tensor
    """fp32 [256]: the smallest value that is rounded to a higher level than this one; infinite for the last."""
    lowest: torch.Tensor
    """uint8 [65536]: the lowest code of fp32 values by their upper 16 bits. Borders are so far apart that the only
    other one is the next: on a CPU a search among the borders takes seven times as long."""

    @classmethod
    def on(cls, device: torch.device, *, signed: bool) -> Levels:
        """Those for values of both signs, in [-1, 1], or for others, in [0, 1]."""
        values, borders, lowest = _LEVELS[signed]
        codes = torch.tensor(lowest, dtype=torch.uint8, device=device)
        return cls(torch.tensor(values, device=device), torch.tensor(borders, device=device), codes)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """The codes of values in [-1, 1], int32 [number of values]; some code for NaN."""
        flat = values.flatten()
        codes = self.lowest.index_select(0, flat.view(torch.int32) >> 16 & 0xFFFF).int()
        return codes + (flat >= self.borders.index_select(0, codes))


class BlockwiseState:
    """A state of a matrix [rows, columns], all zeros at first. ``state[a:b]`` are rows in fp32, a copy; assigned rows
    are quantized. ``compiled`` allows the kernel for CPUs, which needs a compiler and changes no bit."""

    def __init__(self, like: torch.Tensor, levels: Levels, *, compiled: bool = False) -> None:
        rows, columns = like.shape
        self.levels = levels
        self.codes = torch.zeros(rows, columns, dtype=torch.uint8, device=like.device)
        """The number of each value's level."""
        self.scales = torch.zeros(rows, columns // STATE_BLOCK, device=like.device)
        """fp32, one for each block."""
        plain = self.codes.device.type == "cpu" and type(self.codes) is torch.Tensor  # a rehearsal's have no memory
        self._by_kernel = compiled and plain and blockwise_cpu.library() is not None

    def __getitem__(self, rows: slice) -> torch.Tensor:
        codes = self.codes[rows]
        if self._by_kernel:
            return blockwise_cpu.read(codes, self.scales[rows], self.levels.values)
        values = self.levels.values.index_select(0, codes.flatten().int()).view(codes.shape)
        return values.unflatten(1, (-1, STATE_BLOCK)).mul_(self.scales[rows].unsqueeze(-1)).flatten(1)

    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        self.assign(rows, values)

    def assign(self, rows: slice, values: torch.Tensor, unless: torch.Tensor | None = None) -> None:
        """A non-finite value makes its whole block non-finite. Where ``unless`` (bool scalar) is true, the rows stay as
        they are, to the bit: the same values quantized again would not be."""
        if self._by_kernel:
            if unless is None or not unless:
                into = self.codes[rows], self.scales[rows]
                blockwise_cpu.write(values, self.levels.borders, self.levels.lowest, _LEAST_SCALE, *into)
            return
        blocks = values.unflatten(1, (-1, STATE_BLOCK))
        scales = blocks.abs().amax(-1).clamp_(min=_LEAST_SCALE)
        codes = self.levels.nearest(blocks / scales.unsqueeze(-1)).view(values.shape).to(torch.uint8)
        self.codes[rows] = codes if unless is None else torch.where(unless, self.codes[rows], codes)
        self.scales[rows] = scales if unless is None else torch.where(unless, self.scales[rows], scales)


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
