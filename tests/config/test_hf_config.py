"""Values of other JSON types in a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ConfigError, ModelConfig, load_config
from megatron_llama.config.hf_config import (
    ARCHITECTURES,
    compare_shapes,
    hf_config,
    read_hf_config,
    shape_from_hf,
    unsupported_architecture,
)
from megatron_llama.config.problems import MOST_CHARACTERS, Problem, format_problems, merge_problems
from megatron_llama.plan import resolve
from tests.paths import CONF

VALUES: list[Any] = [None, True, -1, 3, 0.5, 10**30, "", "text", [], ["full_attention", 1, {}], {}, {"a": []}]
KEYS = sorted({*hf_config(ModelConfig(), "float32", {}), "layer_types", "max_window_layers", "use_sliding_window"})


def read(folder: Path, content: dict[str, Any]) -> None:
    """Read a config.json as ``model=from_hf`` and a model with its own shape do."""
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    read_content = read_hf_config(str(folder))
    unsupported_architecture(read_content)
    shape = shape_from_hf(read_content)
    compare_shapes({**shape, "name": "x"}, read_content)


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
    content = {**hf_config(ModelConfig(), "float32", {}), key: LONG[key]}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        resolve(load_config(["model=from_hf", f"init_from={tmp_path}", "data=mock", "device=cpu"], CONF), 1)
    assert "more characters)" in str(error.value)
    assert len(str(error.value)) < 5000, "the values themselves are cut, so that all reasons are shown"


def test_the_parts_of_a_message_are_cut() -> None:
    """Names of tensors, for example, come from files of other people."""
    problem = Problem("init_from", "v" * 10**6, "r" * 10**6, "i" * 10**6)
    for text in (format_problems([problem]), "\n".join(merge_problems([problem]))):
        assert len(text) < 4 * MOST_CHARACTERS and all(letter * MOST_CHARACTERS in text for letter in "vr")
