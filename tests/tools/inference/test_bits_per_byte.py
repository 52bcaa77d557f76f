"""Bits per byte: the likelihood of a dataset's text over the bytes of the text from which it was made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_llama.config import ModelConfig
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.errors import UserError
from megatron_llama.text.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megatron_llama.tools.inference.evaluation import bits_per_byte, open_examples, open_windows, predicted_bytes
from tests.data.files import write_indexed
from tests.data_prep.helpers import run_script
from tests.tools.inference.commands import CPU, command, evaluate
from tests.tools.inference.models import make_folder, train_sentencepiece, write_tokenizer

TEXTS = ["the cat sat on the mat", " a dog  and\n\n a cat", "é ü 😀 日本", "", "on the mat " * 30]
MODEL = ModelConfig(vocab_size=400)


@pytest.fixture(scope="module", params=["huggingface", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "huggingface":
        write_tokenizer(folder, template=False)
        return HuggingFaceTokenizer(folder)
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return SentencePieceTokenizer(train_sentencepiece(folder / "tokenizer", **plain))


def test_bytes_of_a_dataset_are_the_documents_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Windows of 7 tokens cut documents and characters."""
    assert tokenizer.end is not None
    documents = [[*tokenizer.encode_text(text), tokenizer.end] for text in TEXTS]
    prefix = write_indexed(tmp_path / "data", documents)
    examples = open_windows(prefix, MODEL, 7, None)
    first = len(tokenizer.decode(documents[0][:1]).encode())
    assert predicted_bytes(tokenizer, prefix, examples) == sum(len(text.encode()) for text in TEXTS) - first
    # The first 2 documents.
    some = open_windows(prefix, MODEL, 7, len(documents[0]) + len(documents[1]))
    assert predicted_bytes(tokenizer, prefix, some) == sum(len(text.encode()) for text in TEXTS[:2]) - first


def test_bytes_of_a_fine_tuning_set_are_the_answers_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [("cat", "the mat"), ("a dog", "é 😀 on"), ("é", "Hello the cat sat")]
    content = "".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in lines)
    (tmp_path / "set.jsonl").write_text(content)
    options = ["--tokenizer-model", tokenizer.path, "--seq-length", 128, "--chat-template", "plain"]
    done = run_script("sft.py", "--input", tmp_path / "set.jsonl", *options, "--output-prefix", tmp_path / "set")
    assert done.returncode == 0, done.stderr
    prefix = f"{tmp_path / 'set'}_sft"
    examples = open_examples(prefix, MODEL)
    assert examples is not None
    ids, mask = (IndexedDataset(prefix + end).document(0) for end in ("", "_mask"))
    assert 0 < mask.sum() < len(ids) - 1, "a prompt without loss"
    assert predicted_bytes(tokenizer, prefix, examples) == sum(len(answer.encode()) for _, answer in lines)


def test_ids_outside_the_tokenizer_are_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "data", [[5, tokenizer.size]])
    with pytest.raises(UserError, match=f"id {tokenizer.size}, and .* has only {tokenizer.size} ids"):
        predicted_bytes(tokenizer, prefix, open_windows(prefix, MODEL, 7, None))


def test_the_formula() -> None:
    assert bits_per_byte(math.log(2), 6, 3) == 2
    assert bits_per_byte(1.0, 6, 0) is None


def test_the_report_has_bits_per_byte_if_the_tokenizer_is_known(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf")
    tokenizer = HuggingFaceTokenizer(folder)
    prefix = write_indexed(tmp_path / "data", [tokenizer.encode_text(text) for text in TEXTS if text])
    arguments = (folder, *CPU, "--dataset", prefix, "--output", tmp_path / "report.json")
    done = command(evaluate, *arguments)
    report = json.loads((tmp_path / "report.json").read_text())
    assert f"{report['bits_per_byte']:.4f} bits per byte" in done.out
    assert report["bits_per_byte"] == pytest.approx(report["loss"] * report["tokens"] / math.log(2) / report["bytes"])
    first = tokenizer.decode(IndexedDataset(prefix).tokens[:1].tolist())
    assert report["bytes"] == sum(len(text.encode()) for text in TEXTS) - len(first)
