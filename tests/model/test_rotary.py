"""Rotary embeddings against transformers' own functions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_llama.config import ModelConfig, RopeScaling, load_config
from megatron_llama.model.rotary import inverse_frequencies, rotary_table, rotate
from tests.model.llamas import hf_config
from tests.oracle import CPU
from tests.paths import CONF

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")

FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.5, 6.0, 11.0]}
LLAMA_3 = ModelConfig(head_dim=128, rope_theta=500000.0)
LONG = dataclasses.replace(LLAMA_3, max_position_embeddings=131072)
WIDE, NARROW = ModelConfig(head_dim=32), ModelConfig(head_dim=8, max_position_embeddings=256)


def scaled(model: ModelConfig, *scaling: Any, context: int | None = None, **more: Any) -> ModelConfig:
    """Return the model with a RopeScaling, whose original context is given by ``context``."""
    if context is not None:
        more["original_max_position_embeddings"] = context
    return dataclasses.replace(model, rope_scaling=RopeScaling(*scaling, **more))


YARN = {"beta_fast": 16.0, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 0.4, "truncate": False}
SHAPES = {
    "llama 2": ModelConfig(head_dim=128),
    "llama 3": LLAMA_3,
    "narrow": ModelConfig(head_dim=8, rope_theta=100.0),
    "llama 3.1": scaled(LLAMA_3),
    "llama 3.2": scaled(ModelConfig(head_dim=64, rope_theta=500000.0), factor=32.0),
    "other factors": scaled(WIDE, "llama3", 4.0, 2.0, 8.0, context=64),
    "llama3, a wavelength at the limit": scaled(WIDE, "llama3", 4.0, 8 / math.pi, 16 / math.pi, context=16),
    "linear": scaled(WIDE, "linear", 4.0),
    "dynamic, short": scaled(WIDE, "dynamic", 4.0),
    "dynamic, long": scaled(dataclasses.replace(WIDE, max_position_embeddings=16), "dynamic", 4.0),
    "yarn": scaled(LONG, "yarn", 16.0, context=8192),
    "yarn, all keys": scaled(ModelConfig(head_dim=64), "yarn", 40.0, context=64, **YARN),
    "yarn, attention factor": scaled(ModelConfig(head_dim=8), "yarn", 2.0, context=32, attention_factor=1.25),
    "yarn, past the last dimension": scaled(ModelConfig(head_dim=8, rope_theta=10.0), "yarn", 4.0, context=1024),
    "longrope, short": scaled(
        dataclasses.replace(NARROW, max_position_embeddings=512), "longrope", 8.0, context=64, **FACTORS
    ),
    "longrope, long": scaled(NARROW, "longrope", 8.0, context=32, **FACTORS),
    "longrope, attention factor": scaled(NARROW, "longrope", 8.0, context=32, attention_factor=1.5, **FACTORS),
}
LENGTH = 40
"""Longer than the original context of some shapes."""


def filled(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, num_key_value_heads=2)


def test_shapes_differ_where_they_should() -> None:
    """Types that depend on the length differ there, scaling has all three ranges, and a preset asks for it."""
    for name in ("dynamic, long", "longrope, long"):
        short, long = (inverse_frequencies(SHAPES[name], length) for length in (16, LENGTH))
        assert not torch.equal(short, long)
    assert torch.equal(*(inverse_frequencies(SHAPES["dynamic, short"], length) for length in (16, LENGTH)))
    plain, scaled = (inverse_frequencies(SHAPES[name], LENGTH) for name in ("llama 3", "llama 3.1"))
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == 8 and ((ratio > 1.01) & (ratio < 7.99)).sum() >= 3
    assert load_config(["model=llama3_405b"], CONF).model.rope_scaling == RopeScaling(
        original_max_position_embeddings=8192
    )
    assert load_config(["model=llama3_8b"], CONF).model.rope_scaling is None


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_turned_queries_and_keys_are_those_of_transformers(model: ModelConfig) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    length, generator = LENGTH, torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, length, 3, 2, model.head_dim or 0, generator=generator)  # [s, b, heads, d]
    cos, sin = LlamaRotaryEmbedding(hf_config(filled(model)))(queries, torch.arange(length)[None])
    expected = apply_rotary_pos_emb(queries.permute(1, 2, 0, 3), keys.permute(1, 2, 0, 3), cos, sin)
    table = rotary_table(model, length, CPU)
    for ours, theirs in zip((rotate(queries, *table), rotate(keys, *table)), expected, strict=True):
        torch.testing.assert_close(ours, theirs.permute(2, 0, 1, 3), rtol=1e-5, atol=1e-5)


def test_far_positions_are_exact() -> None:
    # In bf16, position 4001 is 4000: the angles must be made, and used, in fp32.
    model = SHAPES["llama 2"]
    cos, sin = rotary_table(model, 4096, CPU)
    assert cos.dtype == sin.dtype == torch.float32
    for position in (4000, 4001, 4095):
        assert cos[position, 0, 0, 0].item() == pytest.approx(math.cos(position), abs=1e-6)
    x = torch.ones(4096, 1, 1, 128, dtype=torch.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())  # rounded once, at the end
    assert turned[4001, 0, 0, 0].item() == pytest.approx(math.cos(4001) - math.sin(4001), abs=2**-7)
