"""split_by_length.py: all documents are in one part, in their order, and each part is a valid dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep import preprocess, split_by_length
from data_prep.lib.dataset import find_problems, read_manifest
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import scratch_folder
from tests.data.files import numbered, train_tokenizer, write_indexed

DOCUMENTS = numbered(60)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_indexed(tmp_path / "book_text_document", DOCUMENTS)


def documents(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    assert list(find_problems(dataset, read_manifest(prefix), check_hashes=True)) == []
    return [dataset.document(number).tolist() for number in range(len(dataset))]


def test_each_document_is_in_the_part_of_its_length(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert split_by_length.main([prefix, "--at", "20", "40"]) == 0
    names = ("below_20", "20_to_40", "from_40")
    parts = [documents(prefix.replace("book_", f"book_{name}_")) for name in names]
    for part, (low, high) in zip(parts, ((1, 20), (20, 40), (40, 100)), strict=True):
        assert part == [each for each in DOCUMENTS if low <= len(each) < high] and part
    assert {20, 40} <= {len(each) for part in parts for each in part}, "both limits occur"
    output, total = capsys.readouterr().out, sum(map(len, DOCUMENTS))
    for part in parts:
        assert f"{sum(map(len, part)) / total:.1%}" in output
    assert "data.prefixes=" in output and sorted(Path(prefix).parent.glob(".*")) == []


def test_manifests_and_empty_documents(tmp_path: Path) -> None:
    lines = ["short", "", "a much longer text, with many more words than the others", "tiny"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = train_tokenizer(tmp_path / "tokenizer.model")
    words = ["--input", tmp_path / "a.jsonl", "--tokenizer-model", tokenizer, "--output-prefix", tmp_path / "a"]
    assert preprocess.main([*map(str, words), "--workers", "1"]) == 0
    whole = str(tmp_path / "a_text_document")
    lengths = [len(each) for each in documents(whole)]
    assert lengths[1] == 0 and lengths[2] == max(lengths)
    assert split_by_length.main([whole, "--at", str(lengths[2])]) == 0
    short, long = (f"{tmp_path}/a_{name}_{lengths[2]}_text_document" for name in ("below", "from"))
    assert [*map(len, documents(short))] == [lengths[0], 0, lengths[3]] and len(documents(long)) == 1
    described = read_manifest(short)
    assert described is not None and described["tokenizer_sha256"] == read_manifest(whole)["tokenizer_sha256"]  # type: ignore[index]
    assert (described["documents_read"], described["documents_written"], described["documents_empty"]) == (3, 2, 1)


def test_a_part_may_have_no_document(prefix: str) -> None:
    assert split_by_length.main([prefix, "--at", "5000"]) == 0
    assert documents(prefix.replace("book_", "book_from_5000_")) == []


def test_existing_parts_need_overwrite(prefix: str) -> None:
    assert split_by_length.main([prefix, "--at", "20"]) == 0
    with pytest.raises(UserError, match="write --overwrite"):
        split_by_length.main([prefix, "--at", "20"])
    assert split_by_length.main([prefix, "--at", "20", "--overwrite"]) == 0


def test_two_processes_divide_one_dataset(prefix: str) -> None:
    with scratch_folder(Path(prefix).parent / ".book_below_20_text_document.split") as other:
        (other / "part").write_text("of the other process")
        with pytest.raises(UserError, match="another process"):
            split_by_length.main([prefix, "--at", "20"])
        assert (other / "part").exists()
    assert split_by_length.main([prefix, "--at", "20"]) == 0


def test_a_failure_leaves_nothing(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    before = sorted(path.name for path in Path(prefix).parent.iterdir())
    monkeypatch.setattr(split_by_length, "write_index", fail)
    with pytest.raises(OSError, match="disk full"):
        split_by_length.main([prefix, "--at", "20"])
    assert sorted(path.name for path in Path(prefix).parent.iterdir()) == before
