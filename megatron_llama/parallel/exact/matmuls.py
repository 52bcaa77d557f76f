"""Matmuls of exact mode: by block, or at once where a trial shows bit-identical results.

Matmuls by sequence, span and block, on contiguous operands, define the results of exact mode. Their shapes, and so
their bits, do not depend on the layout. With many kernels a row or a column of a larger matmul is bit-identical, and
faster. A kernel chooses the order of a sum by shapes and addresses, not by values. So the first call with certain
shapes multiplies random operands in both ways, small ones several times. If all bits agree, this and later calls
multiply at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALL = slice(None)
_ALIGNMENT = 64
"""Bytes. Kernels may take another path for other addresses."""
_EXPONENTS = 8
"""Magnitudes of a trial's operands are up to two to this power, so that each addition of a sum needs rounding."""
_TRIAL_VALUES = 1024
"""Results that a trial compares, at least. In another order of the sum, half of them may agree by chance."""
_agree: dict[tuple[Any, ...], bool] = {}
"""Results of trials."""


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` in contiguous memory at an aligned address."""
    x = x.contiguous()
    is_aligned = type(x) is not Tensor or x.data_ptr() % _ALIGNMENT == 0  # a rehearsal's tensors have no address
    return x if is_aligned else x.clone()


def product(left: Tensor, right: Tensor, rows: Sequence[slice], columns: Sequence[slice], inner: slice = ALL) -> Tensor:
    """Return left[:, inner] @ right[inner], with the bits of matmuls by block.

    Args:
        left: [m, k].
        right: [k, n].
        rows: Blocks of rows of ``left``.
        columns: Blocks of columns of ``right``.
        inner: Columns of ``left`` and rows of ``right``.
    """
    left, right = (_in_memory(x.detach()) for x in (left, right))
    if _is_at_once(left, right, rows, columns, inner):
        return torch.mm(left[:, inner], right[inner])
    return by_block(left, right, rows, columns, inner)


def by_block(left: Tensor, right: Tensor, rows: Sequence[slice], columns: Sequence[slice], inner: slice) -> Tensor:
    """Return ``product`` by one matmul for each block of rows and of columns."""
    parts = [_in_memory(right[inner, block]) for block in columns]
    if len(rows) == len(columns) == 1:
        return torch.mm(_in_memory(left[rows[0], inner]), parts[0])
    output = left.new_empty(left.shape[0], right.shape[1])
    for row in rows:
        part = _in_memory(left[row, inner])
        for column, other in zip(columns, parts, strict=True):
            output[row, column] = torch.mm(part, other)
    return output


def _is_at_once(left: Tensor, right: Tensor, rows: Sequence[slice], columns: Sequence[slice], inner: slice) -> bool:
    if type(left) is not Tensor or type(right) is not Tensor:  # a rehearsal's tensors have no values
        return False
    operands = [(x.shape, x.stride(), x.dtype, x.device) for x in (left, right)]
    slices = [tuple((part.start, part.stop) for part in parts) for parts in (rows, columns, [inner])]
    key = torch.get_num_threads(), *operands, *slices
    if key not in _agree:
        count = -(-_TRIAL_VALUES // max(1, left.shape[0] * right.shape[1]))
        trials = (_operands(left, right, inner, seed) for seed in range(count))
        _agree[key] = all(
            torch.equal(torch.mm(a[:, inner], b[inner]), by_block(a, b, rows, columns, inner)) for a, b in trials
        )
    return _agree[key]


def _operands(left: Tensor, right: Tensor, inner: slice, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random operands in the memory layout of ``left`` and ``right``, whose product is 0 without rounding.

    Each term of a sum has its negative elsewhere. So the product consists of rounding errors, which show the order of
    the sum in 16-bit results too: those would hide the errors of an ordinary sum.
    """
    generator = torch.Generator(left.device).manual_seed(seed)
    operands = []
    for x in (left, right):
        values = torch.empty(x.shape, device=x.device).normal_(generator=generator)
        exponents = torch.randint(-_EXPONENTS, _EXPONENTS + 1, x.shape, generator=generator, device=x.device)
        operands.append(torch.empty_like(x).copy_(torch.ldexp(values, exponents)))
    index = torch.arange(left.shape[1], device=left.device)[inner]
    index = index[torch.randperm(len(index), generator=generator, device=left.device)]
    half = len(index) // 2
    first, second, rest = index[:half], index[half : 2 * half], index[2 * half :]
    operands[0][:, second] = operands[0][:, first]
    operands[1][second] = -operands[1][first]
    operands[1][rest] = 0
    return operands[0], operands[1]


def _in_memory(x: Tensor) -> Tensor:
    """Return a matrix in contiguous, aligned memory, row by row or, if ``x`` is a transposed view, column by column."""
    return aligned(x) if x.stride(1) == 1 else aligned(x.t()).t()
