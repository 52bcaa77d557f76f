"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864), in Hugging Face's half-rotation layout.

Dimension i is paired with i + d/2. Meta's original checkpoints pair neighbours and have q_proj and k_proj permuted.
"""

from __future__ import annotations

import math

import torch

from megatron_llama import devices
from megatron_llama.arch.parameters import head_dim
from megatron_llama.config import ModelConfig, RopeScaling
from megatron_llama.config.rope import original_context
from megatron_llama.devices import HOST
from megatron_llama.model.recompute import recomputable

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary angles, each [s, 1 or b, 1, d], fp32."""


def inverse_frequencies(model: ModelConfig, length: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions [head_dim / 2], fp32, radians.

    Args:
        length: Sequence length in tokens; dynamic and longrope scaling depend on it.
    """
    scaling = model.rope_scaling
    if scaling is None:
        return 1.0 / _wavelengths(model, model.rope_theta)
    return SCALED[scaling.rope_type](model, scaling, length)


def attention_factor(model: ModelConfig) -> float:
    """Return the factor of cosines and sines: above 1 with yarn and longrope, otherwise 1."""
    scaling = model.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":
        if scaling.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(scaling.factor) / math.log(original_context(model)))
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(scaling.factor, scaling.mscale) / _yarn_scale(scaling.factor, scaling.mscale_all_dim)
    return _yarn_scale(scaling.factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return the inverse square root of the attention's temperature (YaRN, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _wavelengths(model: ModelConfig, theta: float) -> torch.Tensor:
    """Return theta^(2i/d), the wavelengths over 2 pi [head_dim / 2], fp32."""
    dim = head_dim(model)
    exponents: torch.Tensor = torch.arange(0, dim, 2, dtype=torch.int64, device=HOST).float() / dim
    return theta**exponents


def _linear(model: ModelConfig, scaling: RopeScaling, length: int) -> torch.Tensor:
    """Position interpolation: all frequencies are divided by ``factor``."""
    return 1.0 / _wavelengths(model, model.rope_theta) / scaling.factor


def _dynamic(model: ModelConfig, scaling: RopeScaling, length: int) -> torch.Tensor:
    """NTK-aware scaling: the base grows with a ``length`` above ``max_position_embeddings``."""
    dim, longest = head_dim(model), model.max_position_embeddings
    growth = scaling.factor * max(length, longest) / longest - (scaling.factor - 1)
    return 1.0 / _wavelengths(model, model.rope_theta * growth ** (dim / (dim - 2)))


def _yarn(model: ModelConfig, scaling: RopeScaling, length: int) -> torch.Tensor:
    """YaRN's "NTK-by-parts" (equations 17 to 20): fast dimensions keep their frequency, slow ones are interpolated."""
    dim, context = head_dim(model), original_context(model)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = dimension_of(scaling.beta_fast or 32), dimension_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers, against a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=HOST) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(model, model.rope_theta)
    unscaled = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - unscaled) + 1.0 / wavelengths * unscaled


def _longrope(model: ModelConfig, scaling: RopeScaling, length: int) -> torch.Tensor:
    """LongRoPE: each frequency has its own divisor, by whether ``length`` exceeds the original context."""
    factors = scaling.long_factor if length > original_context(model) else scaling.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=HOST) * _wavelengths(model, model.rope_theta))


def _llama3(model: ModelConfig, scaling: RopeScaling, length: int) -> torch.Tensor:
    """Llama 3.1: wavelengths above original context / low_freq_factor are multiplied by ``factor``, wavelengths below
    original context / high_freq_factor are unchanged, and in between the frequencies are interpolated."""
    frequencies = 1.0 / _wavelengths(model, model.rope_theta)
    context = original_context(model)
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths <= context / low) & (wavelengths >= context / high), between, scaled)


SCALED = {"linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope, "llama3": _llama3}
"""Inverse frequencies by ``rope_type``, with transformers' numbers."""


def rotary_table(model: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for positions 0 to length - 1, each [length, 1, 1, head_dim], fp32.

    yarn and longrope multiply both by ``attention_factor``. Computed on the CPU, so they are bit-identical on all
    devices.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=HOST), inverse_frequencies(model, length))
    table = torch.cat((angles, angles), dim=-1)[:, None, None, :]
    factor = attention_factor(model)
    cos, sin = (devices.pinned(values * factor, device) for values in (table.cos(), table.sin()))
    return cos.to(device, non_blocking=True), sin.to(device, non_blocking=True)


def at_positions(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table [length, 1, 1, head_dim] for positions [b, s] as [s, b, 1, head_dim]."""
    return table[:, 0][positions.t()]


@recomputable
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [s, b, heads, head_dim] by the angles of each position, in fp32.

    bf16 has 8 bits of precision: with bf16 angles, distant positions would coincide.
    """
    return rotated(x, cos, sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute ``rotate``."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)
