"""NaN and Inf in weights are reported on load, with file, tensor and position."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, list_tensors
from megatron_llama.checkpoint.manifest import NAME, State, _checksum, merge, read_manifest
from megatron_llama.checkpoint.storage import STATES, save_part
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Rectangles

EMBEDDING, STATE = "model.embed_tokens.weight", f"{STATES}exp_avg_sq.{'model.embed_tokens.weight'}"


def spoiled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with one such value, at [5, 1]."""
    matrix = torch.arange(24.0).reshape(8, 3).to(dtype)
    matrix[5, 1] = value
    return matrix


def half(first: int) -> Rectangles:
    """Room for four rows from ``first`` on."""
    return Rectangles((8, 3), [((first, 0), torch.empty(4, 3))])


def write_checkpoint(folder: Path, **tensors: torch.Tensor) -> None:
    save_part({name: Rectangles(tuple(t.shape), [((0,) * t.ndim, t)]) for name, t in tensors.items()}, folder, 0)
    (folder / NAME).write_text(merge(folder, State(1, 1, "adamw", 1, 1, {})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_hugging_face_folder(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({EMBEDDING: spoiled(value, dtype)}, path)
    stored = SafetensorsFiles(tmp_path, list_tensors(path))
    with pytest.raises(CorruptFile, match=rf"model.safetensors: {EMBEDDING} has {value} at \[5, 1\]"):
        stored.load_into({EMBEDDING: half(4)})
    stored.load_into({EMBEDDING: half(0)})  # a rank checks only its own rectangle


def test_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **{EMBEDDING: spoiled(math.nan)})
    stored = read_manifest(tmp_path).stored
    with pytest.raises(CorruptFile, match=rf"rank_00000.safetensors: {EMBEDDING} has nan at \[5, 1\]"):
        stored.load_into({EMBEDDING: half(2)})


def test_an_optimizer_state_may_be_infinite(tmp_path: Path) -> None:
    """exp_avg_sq may be infinite after a large gradient; such a run can be resumed."""
    write_checkpoint(tmp_path, **{STATE: spoiled(math.inf)})
    assert read_manifest(tmp_path).stored.rows(STATE)[5, 1] == math.inf


def test_how_many(tmp_path: Path) -> None:
    save_file({"a": torch.full((3, 3), math.nan)}, tmp_path / "model.safetensors")
    stored = SafetensorsFiles(tmp_path, list_tensors(tmp_path / "model.safetensors"))
    with pytest.raises(CorruptFile, match=r"a has nan at \[0, 0\] and 8 more non-finite values"):
        stored.rows("a")


@pytest.mark.parametrize("settings", [None, [], "x", {"data": None}, {"model": 1}, {"finetune": []}])
def test_settings_that_are_none(tmp_path: Path, settings: Any) -> None:
    """With a right checksum, which anybody can compute."""
    write_checkpoint(tmp_path, a=torch.zeros(2))
    body = json.loads((tmp_path / NAME).read_text())
    body["state"]["settings"] = settings
    body["checksum"] = _checksum({key: value for key, value in body.items() if key != "checksum"})
    (tmp_path / NAME).write_text(json.dumps(body))
    with pytest.raises(CorruptFile, match=NAME):
        read_manifest(tmp_path)
