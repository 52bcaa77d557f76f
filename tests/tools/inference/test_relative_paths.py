"""A run's relative path of the tokenizer is found from other folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.tools.inference.saved_model import open_saved_model
from tests.checkpoint.jobs import Job
from tests.data.files import train_tokenizer


def test_the_tokenizer_is_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the project was moved: then below a parent of the checkpoint."""
    (tmp_path / "project").mkdir()
    content = train_tokenizer(tmp_path / "project/tokenizer.model").read_bytes()
    monkeypatch.chdir(tmp_path / "project")
    for folder in ("runs/inside", "../elsewhere/outside"):
        job = Job(Path(folder), "data.tokenizer=tokenizer.model", "model.vocab_size=512", "trainer.steps=1")
        assert job.wait() == 0, job.output
    monkeypatch.chdir("/")
    inside, outside = tmp_path / "project/runs/inside", tmp_path / "elsewhere/outside"
    assert [open_saved_model(run).tokenizer for run in (inside, outside)] == [tmp_path / "project/tokenizer.model"] * 2
    export(find_checkpoint(outside), tmp_path / "exported")
    assert (tmp_path / "exported/tokenizer.model").read_bytes() == content
    (tmp_path / "project").rename(tmp_path / "moved")
    assert open_saved_model(tmp_path / "moved/runs/inside").tokenizer == tmp_path / "moved/tokenizer.model"
    assert open_saved_model(outside).tokenizer is None
