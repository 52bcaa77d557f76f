"""Stochastic rounding to bf16, with noise that depends on what is rounded and never on who rounds it.

A value between two neighbours in bf16 becomes the upper one with a probability that is its distance from the lower
one, so that it is right on average (Gupta et al. 2015, arXiv:1502.02551; for training in bf16, Zamirai et al. 2020,
arXiv:2010.06192). The noise is a hash of (seed, tensor, step, row, column), not a generator with a state: every rank
that holds a value makes the same noise for it, in any layout, and a resumed run goes on with the same noise.

All of it is plain torch on int32, whose products and sums wrap, without a look at any value on the host.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch

Keys = tuple[int, int]
_LOW_16, _EXPONENT = 0xFFFF, 0x7F800000


def round_stochastically(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``values`` (fp32) in bf16: ``noise`` (int32, 0 to 65535, same shape) is added to their bits, of which the upper
    half stays.

    Exact over all noises: a value that is k/65536 of the way to its neighbour goes there for k of them. What bf16
    holds already stays, and so do infinities and NaNs. Beyond bf16's largest value the neighbour is infinity.
    """
    bits = values.view(torch.int32)
    # All ones where the exponent is not, which is where the value is a number; a choice by torch.where takes 10 times
    # as long on a CPU.
    finite = ((bits & _EXPONENT) - _EXPONENT) >> 31
    moved = (bits + (noise & finite)) & ~(finite & _LOW_16)
    return moved.view(torch.float32).to(torch.bfloat16)


def noise(
    keys: Keys, step: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The noise (int32, 0 to 65535) of a rectangle of a tensor of one or two dimensions, at ``offset`` of extent
    ``size``.

    ``step`` is a scalar int32, a tensor so that a compiled graph does not change with it.
    """
    row_key, column_key = (_mix(step ^ key) for key in keys)
    rows = _mix(_numbers(offset[0], size[0], device) + row_key)
    if len(size) == 1:
        return _mix(rows ^ _mix(column_key)) & _LOW_16
    columns = _mix(_numbers(offset[1], size[1], device) + column_key)
    return _mix(rows[:, None] ^ columns) & _LOW_16


@cache
def stream(seed: int, kind: str, name: str) -> Keys:
    """The keys of one stream of noise: the run's seed, what is rounded (weight, exp_avg, ...), and the Hugging Face
    tensor that it belongs to."""
    digest = hashlib.blake2b(f"{seed}/{kind}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big", signed=True), int.from_bytes(digest[4:], "big", signed=True)


def _numbers(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int32, device=device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Wellons' lowbias32, a bijection of 32 bits in which each bit of x decides over each bit of the result
    (github.com/skeeto/hash-prospector). Shifts of int32 bring copies of the sign in, hence the masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
