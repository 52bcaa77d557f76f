"""Parameter counts against the published ones, and against themselves when cut over ranks."""

from __future__ import annotations

import math

import pytest

from megatron_llama.arch.names import TensorParallel, rectangles
from megatron_llama.arch.shapes import (
    FUSED,
    fused_rows,
    fused_shape,
    matrices,
    matrices_per_layer,
    parameters_per_layer,
)
from megatron_llama.config import load_config
from megatron_llama.config.conf_folders import options_of
from megatron_llama.plan import parameters, resolve
from tests.paths import CONF
from tests.plan.published import OURS, PUBLISHED


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    model = load_config([f"model={name}"], CONF).model
    count = parameters(model)
    assert count == {**PUBLISHED, **OURS}[name] and model.name == name.replace("/", "_")
    assert f"{count:,}" in (CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"), "not in the file's comment"


def test_every_preset_is_counted() -> None:
    assert {*options_of("model", CONF)} - {"from_hf"} == {*PUBLISHED, *OURS}  # the shape of from_hf is in the folder


@pytest.mark.parametrize("name", ["llama70b", "llama3_8b", "smollm2_135m", "llama_56m"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (1, 5)])
def test_pipeline_stages_add_up_to_the_model(name: str, tp: int, pp: int) -> None:
    overrides = [f"model={name}", "data=mock", f"trainer.tp={tp}", f"trainer.pp={pp}", "trainer.global_batch_size=10"]
    plan = resolve(load_config(overrides, CONF), tp * pp)
    model = plan.model
    # With pp > 1, tied embeddings are stored twice: as the embedding on the first stage and as the head on the last.
    copies = model.vocab_size * model.hidden_size if model.tie_word_embeddings and pp > 1 else 0
    assert sum(stage.held for stage in plan.stages) == parameters(model) + copies


def test_tensor_parallel_ranks_hold_equal_shares_and_whole_norms() -> None:
    model = load_config(["model=llama70b"], CONF).model
    for name, matrix in matrices(model).items():
        assert math.prod(matrix.local_shape(8)) == math.prod(matrix.shape) // 8, name
    assert parameters_per_layer(model, tp=8) == matrices_per_layer(model) // 8 + 2 * model.hidden_size
    # 8 kv heads over 16 ranks: two ranks hold the same one.
    keys, queries = matrices(model)["k_proj"], matrices(model)["q_proj"]
    assert keys.local_shape(16) == keys.local_shape(8) == (128, 8192)
    assert (queries.local_shape(8), queries.local_shape(16)) == ((1024, 8192), (512, 8192))


@pytest.mark.parametrize(("name", "tp"), [("llama70b", 1), ("llama70b", 8), ("llama70b", 16), ("smollm2_135m", 9)])
@pytest.mark.parametrize("matrix", FUSED)
def test_fused_matrices_have_the_shapes_of_their_rectangles(name: str, tp: int, matrix: str) -> None:
    model = load_config([f"model={name}"], CONF).model
    owner = matrices(model)[FUSED[matrix][0]].name.partition(".")[0]
    parts = rectangles(f"layers.0.{owner}.{matrix}.weight", model, TensorParallel(tp - 1, tp), model.vocab_size)
    assert fused_rows(model, matrix, tp) == {part.name.split(".")[-2]: part.size[0] for part in parts}
    assert fused_shape(model, matrix, tp) == (sum(part.size[0] for part in parts), parts[0].size[1])


def test_padding_is_on_the_ranks_but_not_in_the_model() -> None:
    overrides = ["model.vocab_size=4099", "trainer.tp=4", "data=mock"]
    plan = resolve(load_config(overrides, CONF), 4)
    rows = 4100 // 4
    (stage,) = plan.stages
    assert stage.held == 2 * rows * 192 + 4 * parameters_per_layer(plan.model, 4) + 192
    assert parameters(plan.model) == 2 * 4099 * 192 + 4 * parameters_per_layer(plan.model) + 192
