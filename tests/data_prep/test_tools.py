"""inspect.py, analyze.py, train_tokenizer.py, split_by_length.py and python_stdlib.py."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece

from data_prep import analyze, preprocess, split_by_length
from data_prep import train_tokenizer as tokenizer_program
from data_prep.lib import run_options
from data_prep.lib.output_files import find_problems, read_manifest
from data_prep.python_stdlib import split_source
from data_prep.train_tokenizer import sample_sentences, train
from megatron_llama.corpus.difficulty_index import MANIFEST, open_difficulty_index
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system import progress
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import locked_folder, scratch_folder
from tests.data.files import numbered, train_tokenizer, write_indexed
from tests.data_prep.helpers import (
    Run,
    assert_refused,
    kill_this_process,
    output_of,
    run_in_fork,
    run_script,
    some_texts,
    start,
    write_jsonl,
)


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


def test_inspect_finds_damage(dataset: Path, tmp_path: Path) -> None:
    for suffix, where, data, word in DAMAGE.values():
        path = Path(f"{dataset}{suffix}")
        content = path.read_bytes()
        start = where % len(content)
        path.write_bytes(content[:start] + data + content[start + len(data) :])
        assert_refused(run_script("inspect.py", dataset), word)
        path.write_bytes(content)
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


def test_an_interrupt_ends_the_training_of_a_tokenizer_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Iterator[str]:
        os.kill(os.getpid(), signal.SIGINT)
        yield from itertools.repeat("text")

    monkeypatch.setattr(tokenizer_program, "sample_sentences", endless)
    text = write_jsonl(tmp_path / "a.jsonl", ["text"])
    done = run_in_fork(lambda: start("train_tokenizer.py", "--input", text, "--model-prefix", tmp_path / "t"))
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (130, "Stopped by SIGINT.\n", ["a.jsonl"])


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


def test_the_time_left_excludes_the_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    for module in (run_options, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with run_options.PrepareProgress(1000) as bar:
        for seconds, done in ((60, 0), (100, 100), (131, 131), (162, 162)):  # 100 s until the first result
            now[0] = seconds
            bar.update(done, done * 10**6, done * 10**6)
    assert capsys.readouterr().err.splitlines() == [
        "prepare: 0.0%",
        "prepare: 10.0%",
        "prepare: 13.1%  1.0 MB/s  1.00 M tokens/s  14:29 left",
        "prepare: 16.2%  1.0 MB/s  1.00 M tokens/s  13:58 left",
    ]


NUMBERED = numbered(60)


@pytest.fixture
def numbered_set(tmp_path: Path) -> str:
    return write_indexed(tmp_path / "book_text_document", NUMBERED)


def documents(numbered_set: str) -> list[list[int]]:
    dataset = IndexedDataset(numbered_set)
    assert list(find_problems(dataset, read_manifest(numbered_set), check_hashes=True)) == []
    return [dataset.document(number).tolist() for number in range(len(dataset))]


def test_each_document_is_in_the_part_of_its_length(numbered_set: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert split_by_length.main([numbered_set, "--at", "20", "40"]) == 0
    names = ("below_20", "20_to_40", "from_40")
    parts = [documents(numbered_set.replace("book_", f"book_{name}_")) for name in names]
    for part, (low, high) in zip(parts, ((1, 20), (20, 40), (40, 100)), strict=True):
        assert part == [each for each in NUMBERED if low <= len(each) < high] and part
    assert {20, 40} <= {len(each) for part in parts for each in part}, "both limits occur"
    output, total = capsys.readouterr().out, sum(map(len, NUMBERED))
    for part in parts:
        assert f"{sum(map(len, part)) / total:.1%}" in output
    assert "data.prefixes=" in output and sorted(Path(numbered_set).parent.glob(".*")) == []


def test_manifests_and_empty_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["short", "", "a much longer text, with many more words than the others", "tiny"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = train_tokenizer(tmp_path / "tokenizer.model")
    words = ["--input", tmp_path / "a.jsonl", "--tokenizer-model", tokenizer, "--output-prefix", tmp_path / "a"]
    assert preprocess.main([*map(str, words), "--workers", "1"]) == 0
    whole = str(tmp_path / "a_text_document")
    lengths = [len(each) for each in documents(whole)]
    assert lengths[1] == 0 and lengths[2] == max(lengths)
    assert split_by_length.main([whole, "--at", str(lengths[2])]) == 0 and str(tokenizer) in capsys.readouterr().out
    short, long = (f"{tmp_path}/a_{name}_{lengths[2]}_text_document" for name in ("below", "from"))
    assert [*map(len, documents(short))] == [lengths[0], 0, lengths[3]] and len(documents(long)) == 1
    described = read_manifest(short)
    assert described is not None and described["tokenizer_sha256"] == read_manifest(whole)["tokenizer_sha256"]  # type: ignore[index]
    assert (described["documents_read"], described["documents_written"], described["documents_empty"]) == (3, 2, 1)


def test_a_part_may_have_no_document(numbered_set: str) -> None:
    assert split_by_length.main([numbered_set, "--at", "5000"]) == 0
    assert documents(numbered_set.replace("book_", "book_from_5000_")) == []


def test_existing_parts_need_overwrite(numbered_set: str) -> None:
    assert split_by_length.main([numbered_set, "--at", "20"]) == 0
    with pytest.raises(UserError, match="write --overwrite"):
        split_by_length.main([numbered_set, "--at", "20"])
    assert split_by_length.main([numbered_set, "--at", "20", "--overwrite"]) == 0


def test_a_killed_publication_is_repeated(numbered_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, move, moves = [numbered_set, "--at", "20", "40"], os.replace, itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: move(*paths) if next(moves) < 3 else kill_this_process())
        assert run_in_fork(lambda: split_by_length.main(words)).returncode == -signal.SIGKILL
    assert Path(numbered_set.replace("book_", "book_below_20_") + ".idx").exists()
    assert split_by_length.main(words) == 0 and documents(numbered_set.replace("book_", "book_from_40_"))


def test_two_processes_divide_one_dataset(numbered_set: str) -> None:
    with scratch_folder(Path(numbered_set).parent / ".book_below_20_text_document.split") as other:
        (other / "part").write_text("of the other process")
        with pytest.raises(UserError, match="another process"):
            split_by_length.main([numbered_set, "--at", "20"])
        assert (other / "part").exists()
    assert split_by_length.main([numbered_set, "--at", "20"]) == 0


def test_a_failure_leaves_nothing(numbered_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    before = sorted(path.name for path in Path(numbered_set).parent.iterdir())
    monkeypatch.setattr(split_by_length, "write_index", fail)
    with pytest.raises(OSError, match="disk full"):
        split_by_length.main([numbered_set, "--at", "20"])
    assert sorted(path.name for path in Path(numbered_set).parent.iterdir()) == before


LENGTH = 16
ANALYZED = [[1 + (token * token) % 997 for token in document] for document in numbered(60)]
TEXT = [token for document in ANALYZED for token in document]
KILL = "KILL_ANALYSIS"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze, "SHARD_TOKENS", 10 * LENGTH)


@pytest.fixture
def analyzed_set(tmp_path: Path) -> str:
    return write_indexed(tmp_path / "a", ANALYZED)


def fatal(ids: np.ndarray) -> float:
    """A metric that kills the process at sample 50 while KILL is set in the environment."""
    if KILL in os.environ and np.array_equal(ids, TEXT[50 * LENGTH : 51 * LENGTH + 1]):
        kill_this_process()
    return float(ids.sum())


def measure(analyzed_set: str, metric: str, *more: str) -> None:
    assert analyze.main([analyzed_set, "--metric", metric, "--seq-length", str(LENGTH), "--workers", "1", *more]) == 0


def written(analyzed_set: str, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(f"{analyzed_set}_metrics/{name}-{LENGTH}").iterdir()}


def test_values_match_definitions(analyzed_set: str) -> None:
    for metric in ("vocab_rarity", "length", "tests.data_prep.test_tools.fatal"):
        measure(analyzed_set, metric)
    count = (len(TEXT) - 1) // LENGTH
    units = [TEXT[unit * LENGTH : (unit + 1) * LENGTH + 1] for unit in range(count)]
    counts = Counter(TEXT[: count * LENGTH])
    rarities = [int(sum(-math.log(counts[id] / (count * LENGTH)) for id in unit)) for unit in units]
    owners = [len(document) for document in ANALYZED for _ in document]
    lengths = [float(np.mean(owners[unit * LENGTH : (unit + 1) * LENGTH + 1])) for unit in range(count)]
    for name, values in (("vocab_rarity", rarities), ("length", lengths), ("fatal", list(map(sum, units)))):
        measured = open_difficulty_index(Path(f"{analyzed_set}_metrics/{name}-{LENGTH}"), analyzed_set)
        np.testing.assert_allclose(measured.values, values, rtol=1e-12)
        assert measured.order.tolist() == sorted(range(count), key=lambda unit: (measured.values[unit], unit))
        assert measured.ranks[measured.order].tolist() == list(range(count))


def test_workers_and_parts_give_identical_files(analyzed_set: str, tmp_path: Path) -> None:
    measure(analyzed_set, "vocab_rarity")
    whole = written(analyzed_set, "vocab_rarity")
    assert set(whole) == {"values.npy", "order.npy", "index.json"}
    output = tmp_path / "elsewhere"
    measure(analyzed_set, "vocab_rarity", "--workers", "3", "--output", str(output))
    shared = Path(output / "a_metrics" / f"vocab_rarity-{LENGTH}")
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == whole
    # Each part runs twice, in any order: counts, then values.
    other = write_indexed(tmp_path / "b", ANALYZED)
    for part in ("3/3", "1/3", "2/3", "1/3", "3/3"):
        measure(other, "vocab_rarity", "--part", part)
    assert written(other, "vocab_rarity") == whole


def test_resumed_analysis_is_identical(analyzed_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = "tests.data_prep.test_tools.fatal"
    other = write_indexed(tmp_path / "b", ANALYZED)
    measure(other, metric)
    monkeypatch.setenv(KILL, "1")
    assert run_in_fork(lambda: measure(analyzed_set, metric)).returncode == -signal.SIGKILL
    monkeypatch.delenv(KILL)
    work = Path(f"{analyzed_set}_metrics/fatal-{LENGTH}/.partial")
    done = sorted(work.glob("values-*.npy"))
    assert len(done) == 5 and not (work.parent / "index.json").exists()
    with pytest.raises(UserError, match="there is no index"):
        open_difficulty_index(work.parent, analyzed_set)
    (work / done[0].name).write_bytes(b"")  # after a power failure, incomplete files must be detected
    with pytest.raises((ValueError, EOFError, OSError)):
        measure(analyzed_set, metric)
    done[0].unlink()
    measure(analyzed_set, metric)
    assert written(analyzed_set, "fatal") == written(other, "fatal")


def test_other_analysis_needs_overwrite(analyzed_set: str) -> None:
    measure(analyzed_set, "length")
    before = written(analyzed_set, "length")
    measure(analyzed_set, "length")  # already complete
    with pytest.raises(UserError, match="--overwrite"):
        measure(analyzed_set, "tests.data_prep.test_tools.fatal", "--name", "length")
    write_indexed(Path(analyzed_set), ANALYZED[1:])
    with pytest.raises(UserError, match="another version of"):
        measure(analyzed_set, "length")
    assert written(analyzed_set, "length") == before
    measure(analyzed_set, "length", "--overwrite")
    assert written(analyzed_set, "length") != before


def test_overwrite_waits_for_running_parts(analyzed_set: str) -> None:
    measure(analyzed_set, "length")
    before = written(analyzed_set, "length")
    write_indexed(Path(analyzed_set), ANALYZED[1:])
    folder = Path(f"{analyzed_set}_metrics/length-{LENGTH}")
    with locked_folder(folder, shared=True), pytest.raises(UserError, match="another process"):
        measure(analyzed_set, "length", "--overwrite")
    assert written(analyzed_set, "length") == before
    write_indexed(Path(analyzed_set), ANALYZED)
    (folder / MANIFEST).unlink()
    with locked_folder(folder), pytest.raises(UserError, match="another process"):
        measure(analyzed_set, "length")
