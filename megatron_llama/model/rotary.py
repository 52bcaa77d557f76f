"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), in Hugging Face's half-rotation layout."""

from __future__ import annotations

import math

import torch

from megatron_llama.config import ModelConfig


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2], fp32; Llama 3.1's scaling where it is asked for.

    The scaling follows transformers' ``rope_type: llama3``: wavelengths longer than the original context divided by
    low_freq_factor are stretched by ``factor``, those shorter than it divided by high_freq_factor are kept, and
    between the two it is interpolated.
    """
    assert model.head_dim is not None
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64, device="cpu").float() / model.head_dim
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
    """Cosines and sines for positions 0 .. length-1, each [length, 1, 1, head_dim], fp32; computed on the CPU, so
    that every device has the same bits."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inverse_frequencies(model))
    table = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    return table.cos().to(device), table.sin().to(device)


def at_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rows of a table [length, 1, 1, head_dim] for positions [b, s]: [s, b, 1, head_dim]."""
    return table[:, 0][positions.t()]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [s, b, heads, head_dim] by the table's angles; computed in fp32, since bf16 angles lose far positions."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).type_as(x)
