"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), in Hugging Face's half-rotation layout.

Dimension i is paired with i + d/2. Meta's original checkpoints pair neighbours and have q_proj and k_proj permuted.
"""

from __future__ import annotations

import math

import torch

from megatron_llama.arch.shapes import head_dim
from megatron_llama.config import ModelConfig
from megatron_llama.devices import HOST
from megatron_llama.model.recompute import recomputable

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary angles, each [s, 1 or b, 1, d], fp32."""


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions [head_dim / 2], fp32, radians.

    With ``rope_scaling``, scale as transformers' ``rope_type: llama3``: wavelengths above original context /
    low_freq_factor are multiplied by ``factor``, wavelengths below original context / high_freq_factor are unchanged,
    and in between the frequencies are interpolated.
    """
    dim = head_dim(model)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=HOST).float() / dim
    frequencies = 1.0 / (model.rope_theta**exponents)
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    is_between = (wavelengths <= context / low) & (wavelengths >= context / high)
    return torch.where(is_between, between, scaled)


def rotary_table(model: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for positions 0 to length - 1, each [length, 1, 1, head_dim], fp32.

    Computed on the CPU, so they are bit-identical on all devices.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=HOST), inverse_frequencies(model))
    table = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return table.cos().to(device), table.sin().to(device)


def at_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table [length, 1, 1, head_dim] for positions [b, s] as [s, b, 1, head_dim]."""
    return table[:, 0][positions.t()]


@recomputable
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [s, b, heads, head_dim] by the angles of each position, in fp32.

    bf16 has 8 bits of precision: with bf16 angles, distant positions would coincide.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated_half = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + rotated_half * sin).type_as(x)
