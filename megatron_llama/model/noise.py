"""Noise as a hash of numbers, not the output of a stateful generator: the same in any layout, on any device, after a
resume."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """Hash int32 values by lowbias32 (github.com/skeeto/hash-prospector), a bijection with low avalanche bias.

    The masks clear the sign bits that int32 shifts copy in from the left.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def token_keys(seed: int, sample: int, length: int) -> Tensor:
    """Return a key for the noise of each token of a sample, int32 [length]."""
    start = mix(torch.tensor([sample, sample >> 31]).int() ^ mix(torch.tensor([seed]).int()))
    return mix(start[0] ^ mix(start[1:])) + torch.arange(length, dtype=torch.int32)


@dataclass(frozen=True)
class EmbeddingNoise:
    """Noise of NEFTune (Jain et al. 2023, arXiv:2310.05914), added to the embeddings in training."""

    alpha: float
    length: int
    """Tokens of a sequence, with padding, as in transformers."""
    part: tuple[int, int]
    """This rank's number and the number of ranks that split a sequence (sequence parallelism)."""

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Add uniform noise of at most alpha / sqrt(length * h) to x [s(/t), b, h]. ``keys``: int32 [b, s]."""
        rank, ranks = self.part
        rows = mix(keys.t().chunk(ranks)[rank])[..., None]
        bits = mix(rows ^ mix(torch.arange(x.shape[2], dtype=torch.int32, device=x.device))) & 0xFFFF
        uniform = (bits.float() + 0.5) * 2.0**-15 - 1
        return x + (uniform * (self.alpha / math.sqrt(self.length * x.shape[2]))).to(x.dtype)
