"""Fixtures: small tokenizers, and preprocess.py with one of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.data_prep.helpers import CHATML, SPECIAL, Run, run_script
from tests.paths import ROOT


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model with a vocabulary of 600, trained by train_tokenizer.py."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = folder / "text.jsonl"
    with open(text, "w", encoding="utf-8") as file:
        for path in sorted((ROOT / "data_prep").rglob("*.py")):
            file.write(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n")
    done = run_script("train_tokenizer.py", "--input", text, "--vocab-size", 600, "--model-prefix", folder / "tok")
    assert done.returncode == 0, done.stderr
    return folder / "tok.model"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face tokenizer: byte-level BPE with three special tokens, and a chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    path = tmp_path_factory.mktemp("folder")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text, "answer: yes\n answer: no\n\n yes\n" * 50], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, **SPECIAL}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def preprocess(tokenizer: Path) -> Run:
    """Return a function that runs preprocess.py with the small tokenizer and --append-eod."""

    def run(*args: object, workers: int = 1) -> subprocess.CompletedProcess[str]:
        given = [] if "--tokenizer-model" in args else ["--tokenizer-model", tokenizer]
        return run_script("preprocess.py", *given, "--append-eod", "--workers", workers, *args)

    return run
