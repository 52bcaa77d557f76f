"""Rotary embeddings against transformers' own functions."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_llama.config import ModelConfig, RopeScaling, load_config
from megatron_llama.model.rotary import inverse_frequencies, rotary_table, rotate
from tests.model.llamas import hf_config
from tests.oracle import CPU, make_plan
from tests.paths import CONF
from tests.rows import read_layouts

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")

SHAPES = {name: make_plan(1, *model).model for name, (_, model) in read_layouts(__file__, "rope")[0].items()}
LENGTH = 40
"""Longer than the original context of some shapes."""


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
    cos, sin = LlamaRotaryEmbedding(hf_config(model))(queries, torch.arange(length)[None])
    expected = apply_rotary_pos_emb(queries.permute(1, 2, 0, 3), keys.permute(1, 2, 0, 3), cos, sin)
    table = rotary_table(model, length, CPU)
    for ours, theirs in zip((rotate(queries, *table), rotate(keys, *table)), expected, strict=True):
        torch.testing.assert_close(ours, theirs.permute(2, 0, 1, 3), rtol=1e-5, atol=1e-5)


def test_far_positions_are_exact() -> None:
    # In bf16, position 4001 is 4000: the angles must be made, and used, in fp32.
    cos, sin = rotary_table(SHAPES["llama 2"], 4096, CPU)
    assert cos.dtype == sin.dtype == torch.float32
    for position in (4000, 4001, 4095):
        assert cos[position, 0, 0, 0].item() == pytest.approx(math.cos(position), abs=1e-6)
    x = torch.ones(4096, 1, 1, 128, dtype=torch.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), cos, sin).bfloat16())  # rounded once, at the end
    assert turned[4001, 0, 0, 0].item() == pytest.approx(math.cos(4001) - math.sin(4001), abs=2**-7)
