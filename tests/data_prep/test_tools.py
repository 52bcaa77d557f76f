"""inspect.py, train_tokenizer.py and python_stdlib.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece

from data_prep.lib import job
from data_prep.python_stdlib import split_source
from data_prep.train_tokenizer import sample_sentences, train
from megatron_llama.system import progress
from megatron_llama.system.errors import UserError
from tests.data_prep.helpers import Run, assert_refused, output_of, run_script, some_texts, write_jsonl


@pytest.fixture
def dataset(tmp_path: Path, preprocess: Run) -> Path:
    """A small dataset; returns its prefix."""
    output_of(
        preprocess("--input", write_jsonl(tmp_path / "a.jsonl", some_texts(80)), "--output-prefix", tmp_path / "x")
    )
    return tmp_path / "x_text_document"


def test_inspect_shows_counts_histogram_and_a_document(dataset: Path) -> None:
    texts = some_texts(80)
    output = output_of(run_script("inspect.py", dataset, "--document", 4, "--characters", 100_000))
    empty = sum(not text for text in texts)
    assert f"80 documents ({empty} empty)" in output
    assert f"read 80 = {80 - empty} written + {empty} empty + 0 skipped" in output
    assert texts[4].strip() in output
    bars = [line.split("  ")[-1] for line in output.splitlines() if " to " in line and line.endswith("#")]
    assert max(map(len, bars)) == 40
    output_of(run_script("inspect.py", f"{dataset}.idx", "--no-hashes"))


DAMAGE = {
    "a token beyond the vocabulary": (".bin", 10, b"\xff\xff", "vocabulary"),
    "another token": (".bin", 20, b"\x21\x01", "sha256"),
    "no EOD at the end": (".bin", -2, b"\x05\x00", "EOD"),
    "a length": (".idx", 34, b"\x09\x09", "does not start at the end of"),
    "a pointer": (".idx", -8, b"\x01\x00\x00", "indices do not run from 0"),
    "the magic": (".idx", 0, b"X", "not a Megatron index"),
    "the version": (".idx", 9, b"\x02", "version 2"),
    "the count": (".idx", 18, b"\x01", "its header gives"),
}


def test_inspect_finds_damage(dataset: Path) -> None:
    for suffix, where, data, word in DAMAGE.values():
        path = Path(f"{dataset}{suffix}")
        content = path.read_bytes()
        start = where % len(content)
        path.write_bytes(content[:start] + data + content[start + len(data) :])
        assert_refused(run_script("inspect.py", dataset), word)
        path.write_bytes(content)


def test_inspect_finds_truncation_and_the_wrong_tokenizer(dataset: Path, tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "t.jsonl", some_texts(300))
    run_script("train_tokenizer.py", "--input", text, "--vocab-size", 320, "--model-prefix", tmp_path / "other")
    done = run_script("inspect.py", dataset, "--tokenizer-model", tmp_path / "other.model")
    assert_refused(done, "is not the tokenizer of this dataset")
    binary = Path(f"{dataset}.bin")
    binary.write_bytes(binary.read_bytes()[:-100])
    assert_refused(run_script("inspect.py", dataset), "the index requires")


def test_trained_tokenizer_has_llama_2s_settings(tmp_path: Path) -> None:
    texts = ["def f(x):\n        return 12345 + x  # naïve 日本\n"] * 20 + some_texts(200)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes().replace(b'"text"', b'"raw_content"') + b"[]\n{}\n"))
    models = []
    for number, source in enumerate((path, path, packed)):
        prefix = tmp_path / f"t{number}"
        done = run_script("train_tokenizer.py", "--input", source, "--vocab-size", 340, "--model-prefix", prefix)
        assert ("2 records without text under raw_content are ignored" in done.stderr) == (source == packed), done
        models.append(Path(f"{prefix}.model").read_bytes())
    assert models[0] == models[1] == models[2]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t0.model"))
    assert processor.vocab_size() == 340
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    assert not any(part.isdigit() and len(part) > 1 for part in map(processor.id_to_piece, range(340)))
    for text in ["  two  spaces  ", "tab\tand\nline\r\n", "unseen: ⚛ ǅ ﬁ Å", *some_texts(50, seed=9)]:
        assert processor.decode(processor.encode(text)) == text
        assert 0 not in processor.encode(text)


@pytest.mark.parametrize(
    ("text", "size", "fault"),
    [("too little text", 9000, "too large"), ("".join(map(chr, range(0x4E00, 0x4EC8))), 300, "too small")],
)
def test_refused_vocabulary_size_names_one_that_works(text: str, size: int, fault: str) -> None:
    with pytest.raises(UserError, match=f"--vocab-size {size} is {fault}") as refused:
        train(iter([text] * 5), size)
    size = int(str(refused.value).partition("write --vocab-size ")[2].split()[0])
    with pytest.raises(UserError, match="no text"):
        train(sample_sentences(iter(["", ""]), 9, 9), size)
    assert sentencepiece.SentencePieceProcessor(model_proto=train(iter([text] * 5), size)).vocab_size() == size


def test_standard_library_text(tmp_path: Path) -> None:
    out = tmp_path / "python_stdlib.jsonl"
    output_of(run_script("python_stdlib.py", "--output", out))
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(records) > 300 and out.stat().st_size > 4e6
    assert all(record["text"].strip() and record["meta"]["source"] == "python_stdlib" for record in records)
    assert any("dataclass" in record["text"] for record in records)
    before = out.stat().st_mtime_ns
    output_of(run_script("python_stdlib.py", "--output", out))
    assert out.stat().st_mtime_ns == before  # unchanged, so that datasets made from it stay valid
    output_of(run_script("python_stdlib.py", "--output", tmp_path / "small.jsonl", "--max-mib", 1))
    assert out.read_bytes().startswith((tmp_path / "small.jsonl").read_bytes())
    assert (tmp_path / "small.jsonl").stat().st_size <= 2**20


def test_long_modules_are_cut_between_definitions_without_loss() -> None:
    text = "import os\n\n" + "".join(f"@decorator\ndef f{n}(x):\n    return {n}\n\n\n" for n in range(200))
    parts = split_source(text, 500)
    assert "".join(parts) == text and len(parts) > 5
    assert all(part.startswith(("import", "@decorator")) for part in parts)
    assert all(len(part) < 600 for part in parts)


def test_the_time_left_excludes_the_start_of_the_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    for module in (job, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with job.PrepareProgress(1000) as bar:
        for seconds, done in ((60, 0), (100, 100), (131, 131), (162, 162)):  # 100 s until the first result
            now[0] = seconds
            bar.update(done, done * 10**6, done * 10**6)
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 0.0%",
        "prepare: 10.0%",
        "prepare: 13.1%  1.0 MB/s  1.00 M tokens/s  14:29 left",
        "prepare: 16.2%  1.0 MB/s  1.00 M tokens/s  13:58 left",
    ]
