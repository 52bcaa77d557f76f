"""Exports for torchtitan and Megatron: torch's and megatron-core's own loaders read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from megatron_llama.arch.foreign_names import megatron_names
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.foreign.detect import open_foreign
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.config import ConfigError
from tests.checkpoint.megatron_source import Source, build_source, logits_of
from tests.checkpoint.runner import Run, make_plan, run
from tests.checkpoint.source_settings import logits_of_weights
from tests.checkpoint.torch_sources import titan_name, titan_rows
from tests.messages import raises_with_message
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is a dev dependency: the oracle of the logits")
UNTIED = "model.tie_word_embeddings=false"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint of two ranks after a step."""
    folder = tmp_path_factory.mktemp("run")
    result = run(2, folder, "trainer.tp=2", UNTIED, until=1)
    return find_checkpoint(folder), result


def test_torch_loads_an_export_for_torchtitan(trained: tuple[Path, Run], tmp_path: Path) -> None:
    checkpoint, result = trained
    exported = export(checkpoint, tmp_path / "out", kind="dcp")
    weights = {name: values for name, values in result.tensors.items() if "/" not in name}
    expected = {titan_name(name): titan_rows(name, values) for name, values in weights.items()}
    state = {name: torch.zeros_like(values) for name, values in expected.items()}
    dcp.load(state, checkpoint_id=exported.folder, no_dist=True)
    for name, values in expected.items():
        assert torch.equal(state[name], values), name
    assert exported.bytes == sum(values.nbytes for values in weights.values())
    stored = open_foreign(exported.folder, make_plan(1, tmp_path / "plan", UNTIED).model).tensors
    for name, values in weights.items():
        assert torch.equal(stored.rows(name), values), name


def _load(rank: int, source: Source) -> torch.Tensor | None:
    """Load the export into megatron-core's model, and return the logits of this rank."""
    model = build_source(source)
    state = {"model": model.sharded_state_dict(prefix="")}
    loaded = dist_checkpointing.load(state, str(source.folder / "release"))
    model.load_state_dict(loaded["model"])
    return logits_of(model)


def test_megatron_core_loads_an_export(trained: tuple[Path, Run], tmp_path: Path) -> None:
    """Two tensor-parallel ranks of two stages load the folder that one process wrote."""
    checkpoint, result = trained
    export(checkpoint, tmp_path / "out", kind="torch_dist")
    parts = [part for part in run_ranks(_load, 4, Source(2, 2, tmp_path / "out")) if part is not None]
    (expected,) = run_ranks(logits_of_weights, 1, result.tensors)
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected, rtol=0, atol=1e-5)


def test_what_has_no_export_is_refused(
    trained: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with raises_with_message(ConfigError, "exists and is not empty"):
        export(trained[0], tmp_path / "out", kind="dcp")
    model = make_plan(1, tmp_path, "model.model_type=olmo2").model
    with raises_with_message(ConfigError, "has no name in this format"):
        megatron_names(model)
    manifest = read_manifest(trained[0])
    monkeypatch.setattr("megatron_llama.checkpoint.export.read_manifest", lambda folder: manifest)
    for kind, section, changed, words in (
        ("dcp", "model", {"model_type": "olmo2"}, "writes torchtitan's Llama, and this model is a olmo2"),
        ("torch_dist", "finetune", {"method": "lora"}, "this format has no adapters"),
    ):
        manifest.state.settings[section] |= changed
        with raises_with_message(ConfigError, words):
            export(trained[0], tmp_path / "new", kind=kind)
