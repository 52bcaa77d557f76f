"""Values of other JSON types in a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import ModelConfig
from megatron_llama.config.hf_config import (
    ARCHITECTURES,
    compare_shapes,
    hf_config,
    read_hf_config,
    shape_from_hf,
    unsupported_architecture,
)

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
