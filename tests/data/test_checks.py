"""Every problem of a dataset or tokenizer, and its message."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_llama.config import Config, Problem
from megatron_llama.config.problems import merge_problems
from megatron_llama.corpus.indexed_format import read_index
from megatron_llama.data.checks import check_data, check_ids
from tests.config.helpers import make
from tests.data.files import MAGIC, numbered, train_tokenizer, write_indexed

VOCABULARY = 2000


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset that nothing is wrong with."""
    return write_indexed(tmp_path / "text_document", numbered(COUNT))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def config_of(*prefixes: str, tokenizer: Path | None = None, vocabulary: int = VOCABULARY) -> Config:
    name = None if tokenizer is None else str(tokenizer)
    return make(
        **{"data.mock": False, "data.prefixes": list(prefixes), "data.tokenizer": name, "model.vocab_size": vocabulary}
    )


def only(problems: list[Problem]) -> str:
    (merged,) = merge_problems(problems)
    return merged


def write_manifest(prefix: str, tokenizer: Path) -> None:
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    Path(prefix + ".json").write_text(json.dumps({"tokenizer_sha256": digest}))


def test_a_good_dataset_has_no_problem(prefix: str, tokenizer: Path) -> None:
    write_manifest(prefix, tokenizer)
    assert check_data(config_of(prefix, tokenizer=tokenizer)) == []
    assert read_index(prefix).tokens() == sum(LENGTHS)
    Path(prefix + ".json").unlink()  # another program's dataset has no manifest
    assert check_data(config_of(prefix, tokenizer=tokenizer)) == []
    check_ids(np.array([0, VOCABULARY - 1]), VOCABULARY, pytest.fail)


def write(prefix: str, suffix: str, change: Callable[[bytes], bytes]) -> None:
    path = Path(prefix + suffix)
    path.write_bytes(change(path.read_bytes()))


def packed(content: bytes, offset: int, kind: str, *values: int) -> bytes:
    """Replace values of an .idx, ``offset`` bytes after its header."""
    changed = bytearray(content)
    struct.pack_into(f"<{len(values)}{kind}", changed, 34 + offset, *values)
    return bytes(changed)


COUNT = 60
LENGTHS = [len(document) for document in numbered(COUNT)]
# A document without tokens is no sequence, but is in the list of documents.
EMPTY_DOCUMENTS = MAGIC + struct.pack("<QBQQ", 1, 8, 0, 3) + struct.pack("<3q", 0, 0, 0)
# In an index: the lengths of sequences, their places in the .bin, and the first sequence of each document.
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "places": (".idx", lambda idx: packed(idx, 4 * COUNT, "q", *[0] * COUNT), "sequence 1 has"),
    "length": (".idx", lambda idx: packed(idx, 0, "i", sum(LENGTHS[:2]) + 5, -5), "sequence 1 has -5 tokens"),
    "documents": (".idx", lambda idx: packed(idx, 12 * COUNT + 8, "q", 3, 1), "its document boundaries do not match"),
    "cut index": (".idx", lambda idx: idx[:-8], "text_document.idx has"),
    "cut header": (".idx", lambda idx: MAGIC, "text_document.idx is not a Megatron index file"),
    "fairseq": (".idx", lambda idx: b"TNTIDX\0\0\0" + idx[9:], "text_document.idx is not a Megatron index file"),
    "dtype": (".idx", lambda idx: idx[:17] + b"\x63" + idx[18:], "text_document.idx has version 1 and dtype code 99"),
    "cut binary": (".bin", lambda binary: binary[:-2], "text_document.bin has"),
    "longer binary": (".bin", lambda binary: binary + b"\0\0", "text_document.bin has"),
}


@pytest.mark.parametrize(("suffix", "change", "rule"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named(prefix: str, suffix: str, change: Callable[[bytes], bytes], rule: str) -> None:
    write(prefix, suffix, change)
    message = only(check_data(config_of(prefix)))
    assert message.startswith("data.prefixes") and rule in message and "prepare the dataset again" in message


def test_missing_and_empty_datasets(prefix: str) -> None:
    Path(prefix + ".bin").unlink()
    assert "text_document.bin" in only(check_data(config_of(prefix)))
    write_indexed(Path(prefix), [])
    assert "text_document.bin has no tokens" in only(check_data(config_of(prefix)))
    write(prefix, ".idx", lambda idx: EMPTY_DOCUMENTS)
    assert "text_document.bin has no tokens" in only(check_data(config_of(prefix)))


@pytest.mark.parametrize("kind", ["H", "i"])
def test_ids_beyond_the_vocabulary(tmp_path: Path, kind: str) -> None:
    prefix = write_indexed(tmp_path / "text", [[5, 6], [7, VOCABULARY]], kind)
    message = only(check_data(config_of(prefix)))
    assert prefix in message and f"token id {VOCABULARY}" in message and f"model.vocab_size={VOCABULARY + 1}" in message
    assert check_data(config_of(prefix, vocabulary=VOCABULARY + 1)) == []
    if kind == "i":
        negative = write_indexed(tmp_path / "text", [[5, -6], [7, 8]], "i")
        assert "negative token id -6" in only(check_data(config_of(negative)))


def test_the_suggested_vocabulary_fits_the_tokenizer_too(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_indexed(tmp_path / "text", [[1, 20]])
    for problem in check_data(config_of(prefix, tokenizer=tokenizer, vocabulary=10)):
        size = int(problem.instead.split("model.vocab_size=")[1].split(",")[0])
        assert check_data(config_of(prefix, tokenizer=tokenizer, vocabulary=size)) == []


def test_tokenizers_that_do_not_fit(prefix: str, tmp_path: Path, tokenizer: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text("{}")
    for path in (other, tmp_path / "nothing.model"):
        message = only(check_data(config_of(prefix, tokenizer=path)))
        assert message.startswith("data.tokenizer") and str(path) in message
        assert "neither a sentencepiece model" in message
    write_manifest(prefix, tokenizer)
    other = train_tokenizer(tmp_path / "other.model", size=320)
    message = only(check_data(config_of(prefix, tokenizer=other)))
    assert str(other) in message and prefix in message and "sha256 differ" in message
    assert "name the tokenizer of the dataset" in message
    for text in ("{", "[]"):
        Path(prefix + ".json").write_text(text)
        assert prefix + ".json cannot be read" in only(check_data(config_of(prefix, tokenizer=tokenizer)))


def test_a_tokenizer_larger_than_the_model(prefix: str, tmp_path: Path) -> None:
    large = train_tokenizer(tmp_path / "large.model", size=320)
    write_indexed(Path(prefix), [[1, 2, 3]])
    message = only(check_data(config_of(prefix, tokenizer=large, vocabulary=100)))
    assert str(large) in message and "vocabulary has 100" in message and "write model.vocab_size=" in message


def test_all_problems_at_once(tmp_path: Path) -> None:
    prefixes = [write_indexed(tmp_path / name, numbered(20)) for name in ("good", "cut", "magic", "large")]
    write(prefixes[1], ".bin", lambda binary: binary[:-2])
    write(prefixes[2], ".idx", lambda idx: MAGIC)
    write_indexed(Path(prefixes[3]), [[VOCABULARY + 5]])
    problems = check_data(config_of(*prefixes))
    assert len(problems) == 3 and {problem.field for problem in problems} == {"data.prefixes"}
    text = "\n".join(merge_problems(problems))
    assert prefixes[0] not in text and all(name in text for name in ("cut.bin", "magic.idx", "large"))
    weighted = config_of()
    weighted.data.prefixes = [0.5, prefixes[1], 0.5, prefixes[2]]
    assert len(check_data(weighted)) == 2
