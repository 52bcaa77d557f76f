"""Values of a config.json: other JSON types and RoPE scaling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import Config, ConfigError, ModelConfig, RopeScaling, load_config
from megatron_llama.config.hf_config import (
    ARCHITECTURES,
    compare_shapes,
    hf_config,
    read_hf_config,
    shape_from_hf,
    unsupported_architecture,
)
from megatron_llama.config.problems import MOST_CHARACTERS, Problem, format_problems, merge_problems
from megatron_llama.config.rope import longest_sequence
from megatron_llama.plan import resolve
from tests.paths import CONF

VALUES: list[Any] = [None, True, -1, 3, 0.5, 10**30, "", "text", [], ["full_attention", 1, {}], {}, {"a": []}]
KEYS = sorted({*hf_config(ModelConfig(), "float32", {}), "layer_types", "max_window_layers", "use_sliding_window"})


def read(folder: Path, content: dict[str, Any]) -> None:
    """Read a config.json as ``model=from_hf`` and a model with its own shape do."""
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    read_content = read_hf_config(str(folder))
    unsupported_architecture(read_content)
    compare_shapes({**shape_from_hf(read_content), "name": "x"}, read_content)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_value_of_another_type_is_read_or_reported(kind: str, tmp_path: Path) -> None:
    good = {**hf_config(ModelConfig(), "float32", {}), "model_type": kind, "use_sliding_window": True}
    cases = [(key, value, {**good, key: value}) for key in KEYS for value in VALUES]
    cases += [
        (key, value, {**good, "rope_parameters": {"rope_theta": 1e4, key: value}})
        for key in ("rope_type", "type", "factor", "original_max_position_embeddings", "long_factor")
        for value in VALUES
    ]
    wrong = 0
    for key, value, content in cases:
        try:
            read(tmp_path, content)
        except ValueError as error:
            wrong += 1
            assert str(error).startswith(f"{tmp_path}/config.json: "), (key, value)
        except Exception as error:
            pytest.fail(f"{key}: {value!r} gives {error!r}")
    assert wrong > 100


LONG: dict[str, Any] = {
    "model_type": "z" * 10**6,
    "hidden_act": "z" * 10**6,
    "quantization_config": {"a": ["b"] * 10**5},
    "rms_norm_eps": ["a"] * 10**5,
    "rope_parameters": {"rope_type": "z" * 10**6},
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 10**5, "long_factor": [1.0] * 10**5},
}


@pytest.mark.parametrize("key", LONG)
def test_a_long_value_gives_a_short_message(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(ModelConfig(), "float32", {}), key: LONG[key]}))
    with pytest.raises(ConfigError) as error:
        resolve(load_config(["model=from_hf", f"init_from={tmp_path}", "data=mock", "device=cpu"], CONF), 1)
    assert "more characters)" in str(error.value)
    assert len(str(error.value)) < 5000, "the values themselves are cut, so that all reasons are shown"


def test_the_parts_of_a_message_are_cut() -> None:
    """Names of tensors, for example, come from files of other people."""
    problem = Problem("init_from", "v" * 10**6, "r" * 10**6, "i" * 10**6)
    for text in (format_problems([problem]), "\n".join(merge_problems([problem]))):
        assert len(text) < 4 * MOST_CHARACTERS and all(letter * MOST_CHARACTERS in text for letter in "vr")
    text = format_problems([Problem("data.prefixes", f"set{at}", "is gone", "restore it") for at in range(3000)])
    assert "set19\n  ... and 2,980 more\n    rule     is gone; likewise the others" in text and "set20" not in text


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
IN_CONFIG_JSON: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 8.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "beta_slow": 0},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.2, **FACTORS},
]


def folder_with(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    return folder


def load(folder: Path, *overrides: str) -> Config:
    return load_config(["model=from_hf", f"init_from={folder}", "data=mock", "device=cpu", *overrides], CONF)


def test_the_newest_checkpoint_of_a_trainers_folder_has_the_shape(tmp_path: Path) -> None:
    for step in (9, 10):
        folder_with(tmp_path / f"checkpoint-{step}", hidden_size=16 * step)
    assert load(tmp_path).model.hidden_size == 160 and load(folder_with(tmp_path)).model.hidden_size == 64


@pytest.mark.parametrize("scaling", IN_CONFIG_JSON, ids=lambda scaling: ", ".join(map(str, scaling.values()))[:40])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_folders_scaling_is_loaded_and_exported_as_transformers_reads_it(
    scaling: dict[str, Any], spelling: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path, **{spelling: {**scaling, "rope_theta": 20000.0}})
    model = load(folder).model
    assert model.rope_scaling is not None and model.rope_theta == 20000.0
    exported = hf_config(model, "float32", {})
    theirs = transformers.LlamaConfig(**json.loads((folder / "config.json").read_text()))
    ours = transformers.LlamaConfig(**exported)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    function = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    for length in (16, 4096):
        (one, one_factor), (other, other_factor) = (function(config, seq_len=length) for config in (theirs, ours))
        assert one.equal(other) and one_factor == other_factor
    second = folder_with(tmp_path / "exported", **exported)
    assert load(second).model.rope_scaling == model.rope_scaling, "a second export has the same values"


def test_the_context_of_phi_3_is_beside_the_scaling() -> None:
    scaling = {"rope_type": "longrope", **FACTORS}
    content = {**LLAMA, "rope_scaling": scaling, "original_max_position_embeddings": 1024}
    read = shape_from_hf(content)["rope_scaling"]
    assert (read["original_max_position_embeddings"], read["factor"]) == (1024, 4.0)
    del content["max_position_embeddings"]
    assert shape_from_hf(content)["rope_scaling"]["factor"] == 2.0, "transformers' default is 2048"


EXTENDED = "model.rope_scaling={rope_type: yarn, factor: 8}"


@pytest.mark.parametrize(
    ("overrides", "contexts"),
    [
        ([EXTENDED], (4096, 32768)),
        ([EXTENDED, "model.max_position_embeddings=16384"], (2048, 16384)),
        ([EXTENDED, "model.rope_scaling.original_max_position_embeddings=1024"], (1024, 4096)),
        (["model.rope_scaling={rope_type: linear, factor: 8}"], (None, 4096)),
        (["model.rope_scaling={rope_type: dynamic, factor: 8}"], (None, 4096)),
        (["model.rope_scaling={rope_type: llama3}"], (8192, 4096)),
    ],
)
def test_a_scaling_on_the_command_line_extends_the_context(
    overrides: list[str], contexts: tuple[int | None, int], tmp_path: Path
) -> None:
    model = load(folder_with(tmp_path), *overrides).model
    assert model.rope_scaling is not None
    assert (model.rope_scaling.original_max_position_embeddings, model.max_position_embeddings) == contexts


def test_one_value_on_the_command_line_changes_the_folders_scaling(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, rope_scaling=IN_CONFIG_JSON[3])
    changed = load(folder, "model.rope_scaling.beta_fast=16").model.rope_scaling
    assert changed == RopeScaling("yarn", 8.0, original_max_position_embeddings=512, beta_fast=16.0)
    assert load(folder, "model.rope_scaling=null").model.rope_scaling is None


def test_the_longest_sequence_counts_the_scaling() -> None:
    for kind, longest in {"linear": 16384, "dynamic": 16384, "yarn": 4096, "llama3": 4096}.items():
        assert longest_sequence(ModelConfig(rope_scaling=RopeScaling(kind, 4.0))) == longest
