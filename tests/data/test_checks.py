"""Every problem of a dataset or tokenizer, and its message."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_llama.config import Problem
from megatron_llama.config.problems import merge_problems
from megatron_llama.corpus.indexed_format import read_index
from megatron_llama.data.checks import check_data, check_ids
from tests.config.helpers import make
from tests.data.files import MAGIC, numbered, train_tokenizer, write_indexed
from tests.golden import GoldenFiles

VOCABULARY = 2000


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset that nothing is wrong with."""
    return write_indexed(tmp_path / "text_document", numbered(COUNT))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


def problems_of(*prefixes: object, tokenizer: Path | None = None, vocabulary: int = VOCABULARY) -> list[Problem]:
    """Return the problems of a run on these datasets."""
    data = {"data.prefixes": [*prefixes], "data.tokenizer": None if tokenizer is None else str(tokenizer)}
    return check_data(make(**{"data.mock": False, "model.vocab_size": vocabulary, **data}))


def write_manifest(prefix: str, tokenizer: Path) -> None:
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    Path(prefix + ".json").write_text(json.dumps({"tokenizer": str(tokenizer), "tokenizer_sha256": digest}))


def test_a_good_dataset_has_no_problem(prefix: str, tokenizer: Path) -> None:
    write_manifest(prefix, tokenizer)
    assert problems_of(prefix, tokenizer=tokenizer) == []
    assert read_index(prefix).tokens() == sum(LENGTHS)
    Path(prefix + ".json").unlink()  # another program's dataset has no manifest
    assert problems_of(prefix, tokenizer=tokenizer) == []
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
BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "places": (".idx", lambda idx: packed(idx, 4 * COUNT, "q", *[0] * COUNT)),
    "length": (".idx", lambda idx: packed(idx, 0, "i", sum(LENGTHS[:2]) + 5, -5)),
    "documents": (".idx", lambda idx: packed(idx, 12 * COUNT + 8, "q", 3, 1)),
    "cut index": (".idx", lambda idx: idx[:-8]),
    "cut header": (".idx", lambda idx: MAGIC),
    "fairseq": (".idx", lambda idx: b"TNTIDX\0\0\0" + idx[9:]),
    "dtype": (".idx", lambda idx: idx[:17] + b"\x63" + idx[18:]),
    "cut binary": (".bin", lambda binary: binary[:-2]),
    "longer binary": (".bin", lambda binary: binary + b"\0\0"),
    "empty documents": (".idx", lambda idx: EMPTY_DOCUMENTS),
}


def test_messages(prefix: str, tmp_path: Path, tokenizer: Path) -> None:
    problems = {}
    for name, (suffix, change) in BROKEN.items():
        write_indexed(Path(prefix), [] if name == "empty documents" else numbered(COUNT))
        write(prefix, suffix, change)
        problems[name] = problems_of(prefix)
    write_indexed(Path(prefix), [])
    problems["empty"] = problems_of(prefix)
    for kind, last in (("H", VOCABULARY), ("i", VOCABULARY), ("i", -6)):
        write_indexed(Path(prefix), [[5, 6], [7, last]], kind)
        problems[f"id {last}, {kind}"] = problems_of(prefix)
        assert bool(problems_of(prefix, vocabulary=VOCABULARY + 1)) == (last < 0)
    Path(prefix + ".bin").unlink()
    problems["no binary"] = problems_of(prefix)
    write_indexed(Path(prefix), numbered(COUNT))
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("tokenizer.json", "nothing.model"):
        problems[f"not a tokenizer: {name}"] = problems_of(prefix, tokenizer=tmp_path / name)
    large = train_tokenizer(tmp_path / "large.model", size=320)
    write_manifest(prefix, tokenizer)
    problems["tokenizer of another dataset"] = problems_of(prefix, tokenizer=large)
    (base := tmp_path / "base").mkdir()
    (base / "tokenizer.json").write_text("{}")
    on_base = make(**{"data.mock": False, "data.prefixes": [prefix], "data.tokenizer": None, "init_from": str(base)})
    problems["tokenizer of another base"] = check_data(on_base)
    (base / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    assert check_data(on_base) == []
    for text in ("{", "[]"):
        Path(prefix + ".json").write_text(text)
        problems[f"manifest {text}"] = problems_of(prefix, tokenizer=tokenizer)
    Path(prefix + ".json").unlink()
    write_indexed(Path(prefix), [[1, 2, 3]])
    problems["tokenizer larger than the model"] = problems_of(prefix, tokenizer=large, vocabulary=100)
    several = [write_indexed(tmp_path / name, numbered(20)) for name in ("good", "cut", "magic", "large")]
    write(several[1], ".bin", lambda binary: binary[:-2])
    write(several[2], ".idx", lambda idx: MAGIC)
    write_indexed(Path(several[3]), [[VOCABULARY + 5]])
    problems["several"] = problems_of(*several)
    problems["with weights"] = problems_of(0.5, several[1], 0.5, several[2])
    page = "\n".join(f"{name}\n" + "\n".join(merge_problems(each)) + "\n" for name, each in problems.items())
    GoldenFiles.check("data/checks.txt", page, {str(tmp_path): "FOLDER", str(tokenizer.parent): "OTHER"})


def test_the_suggested_vocabulary_fits_the_tokenizer_too(tmp_path: Path, tokenizer: Path) -> None:
    prefix = write_indexed(tmp_path / "text", [[1, 20]])
    for problem in problems_of(prefix, tokenizer=tokenizer, vocabulary=10):
        size = int(problem.instead.split("model.vocab_size=")[1].split(",")[0])
        assert problems_of(prefix, tokenizer=tokenizer, vocabulary=size) == []
