"""Stochastic rounding to bf16, with noise that depends only on what is rounded, never on the rank that rounds it.

A value between two bf16 neighbours becomes the upper one with a probability equal to its distance from the lower one,
in units of their distance, so the rounding is unbiased (Gupta et al. 2015, arXiv:1502.02551; for training in bf16,
Zamirai et al. 2020, arXiv:2010.06192). The noise is a hash of (seed, tensor, step, row, column), not the output of a
stateful generator: all ranks that hold a value use the same noise, in any layout, and so does a resumed run.

All operations are on int32 tensors, whose sums and products wrap around; no value is read back to the host.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch

Keys = tuple[int, int]
_LOW_16, _EXPONENT = 0xFFFF, 0x7F800000


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``values`` (fp32) rounded to bf16: adds ``noise`` (int32, 0 to 65535, same shape) to the bits and truncates.

    A value that is k/65536 of the way to its neighbour is rounded up for exactly k of them. Infinities, NaNs
    and values that bf16 can represent stay as they are. Above bf16's largest value the neighbour is infinity.
    """
    bits = values.view(torch.int32)
    # All ones for finite values, whose exponent bits are not all ones. torch.where takes 10 times as long on a CPU.
    finite = ((bits & _EXPONENT) - _EXPONENT) >> 31
    moved = (bits + (noise & finite)) & ~(finite & _LOW_16)
    return moved.view(torch.float32).to(torch.bfloat16)


def noise(
    keys: Keys, step: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The noise (int32, 0 to 65535) of the rectangle at ``offset`` of extent ``size`` in a 1-D or 2-D tensor.

    ``step`` is an int32 scalar tensor, so that a compiled graph does not depend on its value.
    """
    row_key, column_key = (_mix(step ^ key) for key in keys)
    rows = _mix(_numbers(offset[0], size[0], device) + row_key)
    if len(size) == 1:
        return _mix(rows ^ _mix(column_key)) & _LOW_16
    columns = _mix(_numbers(offset[1], size[1], device) + column_key)
    return _mix(rows[:, None] ^ columns) & _LOW_16


@cache
def stream(seed: int, kind: str, name: str) -> Keys:
    """The keys of a stream of noise, for a seed, a kind (weight, exp_avg, ...) and a tensor's Hugging Face name."""
    digest = hashlib.blake2b(f"{seed}/{kind}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big", signed=True), int.from_bytes(digest[4:], "big", signed=True)


def _numbers(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The hash lowbias32 (github.com/skeeto/hash-prospector): a bijection of 32 bits with low bias in its avalanche.

    int32 shifts copy the sign bit in from the left, hence the masks.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
