"""Initial weights are a function of seed, name and position; presets have the tensors of Hugging Face's models."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import cache

import pytest
import torch

from megatron_llama.arch.hf_tp_mapping import Rectangle, Shape, TensorParallel, hf_shapes, rectangles
from megatron_llama.config import ModelConfig, load_config
from megatron_llama.model.init import initial_values
from megatron_llama.model.llama import BlockParts, Llama
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.plan import Plan, resolve
from tests.model.llamas import hf_config
from tests.oracle import rank_groups
from tests.paths import CONF
from tests.ranks import run_ranks

MODEL = ModelConfig(num_hidden_layers=8, initializer_range=0.05)
NAME = "model.layers.0.self_attn.q_proj.weight"
# The logarithms and cosines of AVX-512, AVX2 and SSE differ by a few ulp of the standard deviation of 0.05.
GOLDEN = [0.005458471830934286, 0.07630600780248642]


def rectangle(name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> Rectangle:
    return Rectangle(name, shape, offset, tuple(0 for _ in shape), size)


def whole(name: str, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return initial_values(rectangle(name, shape, (0,) * len(shape), shape), MODEL, seed)


@pytest.mark.parametrize("shape", [(200, 24), (64, 8), (1, 5), (129, 3)])
def test_a_rectangle_is_a_cut_of_the_whole(shape: tuple[int, int]) -> None:
    tensor, source = whole(NAME, shape), random.Random(0)
    for _ in range(50):
        top, left = source.randrange(shape[0]), source.randrange(shape[1])
        rows, columns = source.randint(1, shape[0] - top), source.randint(1, shape[1] - left)
        values = initial_values(rectangle(NAME, shape, (top, left), (rows, columns)), MODEL, 1)
        assert torch.equal(values, tensor[top : top + rows, left : left + columns])


def test_values_are_normal_with_the_range_as_deviation() -> None:
    values = whole(NAME, (512, 512))
    count = values.numel()
    assert abs(values.mean()) < 5 * 0.05 / math.sqrt(count)
    assert abs(values.std() / 0.05 - 1) < 5 / math.sqrt(2 * count)
    share = (values.abs() < 0.05).float().mean().item()
    assert abs(share - 0.6827) < 0.005  # of a normal distribution, not merely one of that width


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_what_writes_into_the_residual_stream_is_scaled_by_depth(name: str) -> None:
    assert abs(whole(f"model.layers.0.{name}.weight", (512, 256)).std().item() / (0.05 / math.sqrt(2 * 8)) - 1) < 0.02


def test_seed_name_and_row_all_matter() -> None:
    """Norms begin as ones, and values never change."""
    shape = (256, 16)
    tensors = [whole(NAME, shape), whole(NAME, shape, seed=2), whole(NAME.replace("q_proj", "k_proj"), shape)]
    # Blocks of rows are drawn one by one: had two the same seed, the tensor would repeat itself.
    rows = torch.cat(tensors)
    assert torch.unique(rows, dim=0).shape[0] == rows.shape[0]
    assert torch.equal(whole("model.norm.weight", (7,)), torch.ones(7))
    # A run that is started again from its config alone must begin with the same weights, in this version and the next.
    assert whole(NAME, (100, 4))[[0, 99], 0].tolist() == pytest.approx(GOLDEN, rel=1e-6, abs=2e-8)


# Types, biases, tied embeddings, shared kv heads and widths of heads. tests/arch counts the parameters of all presets.
PRESETS = (
    "llama7b llama3_70b llama3.2/1b llama_15m qwen2.5/0.5b qwen2.5/7b qwen3/0.6b qwen3/8b olmo2/7b olmo2/32b".split()
)


@cache
def plans() -> list[Plan]:
    return [resolve(load_config([f"model={name}", "data=mock", "device=cpu"], CONF), 1) for name in PRESETS]


def test_every_parameter_is_made_of_hugging_face_tensors_and_none_is_left_over() -> None:
    for plan, shapes in zip(plans(), run_ranks(_shapes, 1)[0], strict=True):
        model = dataclasses.replace(plan.model, num_hidden_layers=2)
        covered: dict[str, Shape] = {}
        for name, shape in shapes.items():
            parts = rectangles(name, model, TensorParallel(0, 1), plan.padded_vocab_size)
            assert sum(torch.Size(part.size).numel() for part in parts) == shape.numel(), name
            covered |= {part.name: part.size for part in parts}
        assert covered == hf_shapes(model)


def test_tensors_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is a development dependency")
    for plan in plans():
        model = dataclasses.replace(plan.model, num_hidden_layers=2)
        with torch.device("meta"):
            llama = transformers.AutoModelForCausalLM.from_config(hf_config(model))
        assert {name: tuple(p.shape) for name, p in llama.named_parameters()} == hf_shapes(model), model.name


def _shapes(rank: int) -> list[dict[str, torch.Size]]:
    """Return the parameter shapes of each preset, built as one chunk with two layers."""
    actual = []
    with rank_groups(plans()[0], rank):
        for plan in plans():
            with torch.device("meta"):
                stage, rows = plan.stage_layers[0][:2], plan.padded_vocab_size
                chunk = Llama(plan.model, mcore_config(plan), stage, padded_vocab_size=rows, parts=BlockParts())
            actual.append({name: parameter.shape for name, parameter in chunk.named_parameters()})
    return actual
