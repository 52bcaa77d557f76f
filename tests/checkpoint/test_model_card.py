"""README.md of exported folders: valid front matter, correct numbers, and nothing that Markdown or YAML interprets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import State
from megatron_llama.checkpoint.model_card import base_license, model_card
from megatron_llama.config import ConfigError, FinetuneConfig, ModelConfig
from megatron_llama.system.files import atomic_folder
from tests.checkpoint.runner import run
from tests.messages import raises_with_message


def front_matter(card: str) -> dict[str, Any]:
    """The YAML at the beginning, which the Hugging Face hub reads."""
    begin, text, rest = card.split("---\n", 2)
    assert begin == "" and rest.startswith("\n# ")
    return yaml.safe_load(text)


def rows(card: str) -> dict[str, str]:
    """The card's table, by label."""
    cells = [line.split("|") for line in card.splitlines() if line.startswith("| ")]
    assert all(len(line) == 4 for line in cells)
    return {label.strip(): text.strip() for _, label, text, _ in cells}


def test_the_numbers_are_those_of_the_exported_run(tmp_path: Path) -> None:
    run(2, tmp_path / "run", "trainer.tp=2", "model.vocab_size=61", "model.tie_word_embeddings=true", until=3)
    folder = export(find_checkpoint(tmp_path / "run"), tmp_path / "hf", "bfloat16").folder
    card = (folder / "README.md").read_text()
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    table = rows(card)
    assert table["Parameters"].startswith(f"{stored:,} (")
    assert table["Training tokens"] == f"{3 * 8 * 16:,} in 3 steps"  # 8 samples of 16 tokens per step
    assert table["Data type of the weights"] == "bfloat16" and table["Data"] == "random tokens (data=mock)"
    assert "4 layers, hidden size 32, 4 heads of 8 (2 for keys and values)" in table["Architecture"]
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["llama", "megatron_llama"],
        "license": "unknown",
    }
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is a development dependency")
    assert hub.ModelCard.load(folder / "README.md").data.library_name == "transformers"
    assert str(tmp_path) not in card and "AutoTokenizer" not in card and "--tokenizer TOKENIZER" in card


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
    assert rows((empty / "README.md").read_text())["Training tokens"] == "128 in 1 step"


def make_card(state: dict[str, Any], **options: Any) -> str:
    """The card of a fine-tuned model."""
    complete = State(7, 56, "adamw", 7, 1, {"data": {"seq_length": 16, **state.pop("data", {})}}, **state)
    options = {"adapter": True, "dtype": "float32", "tokenizer": False, **options}
    return model_card(complete, ModelConfig(name="hf"), FinetuneConfig(method="lora"), **options)


def test_a_model_of_the_hub_is_the_base(tmp_path: Path) -> None:
    base = tmp_path / "models--org--Base-1.1B" / "snapshots" / "0123abc"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Base\n")
    card = make_card({"hf_folder": str(base), "data": {"name": "chat", "prefixes": ["0.5", "/secret/a b|c_sft"]}})
    expected = {"library_name": "peft", "base_model": "org/Base-1.1B", "license": "apache-2.0"}
    assert front_matter(card).items() >= expected.items() and "lora" in front_matter(card)["tags"]
    table = rows(card)
    assert table["Base model"] == "org/Base-1.1B" and table["Data"] == "chat (a b_c_sft)"
    assert "# org/Base-1.1B, fine-tuned (LoRA adapter)\n" in card and "secret" not in card
    assert 'AutoPeftModelForCausalLM.from_pretrained("FOLDER")' in card and "--tokenizer" not in card


def test_a_local_folder_is_no_model_of_the_hub() -> None:
    """The hub rejects a card whose base_model is not one of its models."""
    card = make_card({"hf_folder": "/home/someone/my model<: |x"}, adapter=False, tokenizer=True)
    assert "base_model" not in front_matter(card) and "<" not in card and "someone" not in card
    assert rows(card)["Base model"] == "my model__ _x"
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer\n" in card
    assert 'AutoTokenizer.from_pretrained("FOLDER")' in card


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
