"""README.md of exported folders, in tests/golden/checkpoint, and exports that replace no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import State
from megatron_llama.checkpoint.model_card import base_license, model_card
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig
from megatron_llama.system.files import atomic_folder
from tests.checkpoint.runner import run
from tests.golden import GoldenFiles
from tests.messages import raises_with_message


def test_card_of_an_exported_run(tmp_path: Path) -> None:
    run(2, tmp_path / "run", "trainer.tp=2", "model.vocab_size=61", "model.tie_word_embeddings=true", until=3)
    folder = export(find_checkpoint(tmp_path / "run"), tmp_path / "hf", "bfloat16").folder
    card = (folder / "README.md").read_text()
    GoldenFiles.check("checkpoint/card_of_a_run.md", card)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert f"| Parameters | {stored:,} (" in card
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is a development dependency")
    assert hub.ModelCard.load(folder / "README.md").data.library_name == "transformers"


def test_no_file_of_the_user_is_replaced(tmp_path: Path) -> None:
    run(1, tmp_path / "run", until=1)
    checkpoint, target = find_checkpoint(tmp_path / "run"), tmp_path / "hf"
    with atomic_folder(target) as folder:
        (folder / "README.md").write_text("# Mine\n")
        with raises_with_message(ConfigError, "OUT = .* another process is writing this folder"):
            export(checkpoint, target)
    with raises_with_message(ConfigError, "OUT = .* the folder exists and is not empty"):
        export(checkpoint, target)
    assert (target / "README.md").read_text() == "# Mine\n"
    link, empty = tmp_path / "link", tmp_path / "empty"
    empty.mkdir()
    for linked in (empty, tmp_path / "missing", link):
        link.symlink_to(linked)
        with raises_with_message(ConfigError, f"is a link.*remove {link}"):
            export(checkpoint, link)
        link.unlink()
    export(checkpoint, empty)
    assert "| Training tokens | 128 in 1 step |" in (empty / "README.md").read_text()


def make_card(state: dict[str, Any], **options: Any) -> str:
    """The card of a fine-tuned model."""
    complete = State(7, 56, "adamw", 7, 1, {"data": {"seq_length": 16, **state.pop("data", {})}}, **state)
    options = {"adapter": True, "dtype": "float32", "tokenizer": False, **options}
    return model_card(complete, ModelConfig(name="hf"), FinetuneConfig(method="lora"), **options)


def test_cards_of_fine_tuned_models(tmp_path: Path) -> None:
    """Only a model of the hub is the base_model: the hub rejects other names. No card has a path."""
    base = tmp_path / "models--org--Base-1.1B" / "snapshots" / "0123abc"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Base\n")
    adapter = {"hf_folder": str(base), "data": {"name": "chat", "prefixes": ["0.5", "/secret/a b|c_sft"]}}
    GoldenFiles.check("checkpoint/card_of_an_adapter.md", make_card(adapter))
    local = make_card({"hf_folder": "/home/someone/my model<: |x"}, adapter=False, tokenizer=True)
    GoldenFiles.check("checkpoint/card_of_a_fine_tuned_model.md", local)


def test_unknown_licenses(tmp_path: Path) -> None:
    assert base_license(tmp_path / "missing") == "unknown"
    os.mkfifo(tmp_path / "README.md")
    assert base_license(tmp_path) == "unknown"
    (tmp_path / "README.md").unlink()
    cards = (b"", b"# Base\n", b"---\nlicense: mit\n", b"---\n- x\n---\n")
    values = (b"[a]", b"a b", b"\xff", b"[" * 100_000)
    for content in (*cards, *(b"---\nlicense: %b\n---\n" % value for value in values)):
        (tmp_path / "README.md").write_bytes(content)
        assert base_license(tmp_path) == "unknown", content[:40]
