"""Each preset, built as a real Llama on the meta device, is the published model, in parameters and tensor shapes."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from megatron_llama.arch.names import Shape, TensorParallel, hf_shapes, rectangles
from megatron_llama.config import load_config
from megatron_llama.model.llama import BlockParts, Llama
from megatron_llama.parallel.parallelize import mcore_config
from megatron_llama.plan import Plan, resolve
from tests.model.llamas import hf_config
from tests.oracle import rank_groups
from tests.paths import CONF
from tests.plan.published import OURS, PUBLISHED
from tests.ranks import run_ranks


@cache
def plans() -> list[Plan]:
    names = [*PUBLISHED, *OURS]
    return [resolve(load_config([f"model={name}", "data=mock", "device=cpu"], CONF), 1) for name in names]


@cache
def built(layers: int | None = None) -> list[dict[str, torch.Size]]:
    """Parameter shapes of each preset, built as one chunk with all layers or the first ones."""
    return run_ranks(_shapes, 1, layers)[0]


def test_built_models_have_the_published_number_of_parameters() -> None:
    shapes = dict(zip([*PUBLISHED, *OURS], built(), strict=True))
    for name, expected in {**PUBLISHED, **OURS}.items():
        assert sum(shape.numel() for shape in shapes[name].values()) == expected, name


def test_every_parameter_is_made_of_hugging_face_tensors_and_none_is_left_over() -> None:
    for plan, shapes in zip(plans(), built(2), strict=True):
        model = dataclasses.replace(plan.model, num_hidden_layers=2)  # they are all alike, and 126 take time
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


def _shapes(rank: int, layers: int | None) -> list[dict[str, torch.Size]]:
    actual = []
    with rank_groups(plans()[0], rank):
        for plan in plans():
            with torch.device("meta"):
                stage, rows = plan.stage_layers[0][:layers], plan.padded_vocab_size
                chunk = Llama(plan.model, mcore_config(plan), stage, padded_vocab_size=rows, parts=BlockParts())
            actual.append({name: parameter.shape for name, parameter in chunk.named_parameters()})
    return actual
