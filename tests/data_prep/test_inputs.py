"""Text of all kinds gives the dataset of a reference writer and of megatron-core; damaged lines are rejected."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sentencepiece

from data_prep import sft
from data_prep.lib import record_formats
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import with_array
from data_prep.lib.record_formats import REPEATED_KEY, element_lines
from megatron_llama.corpus import indexed_format
from megatron_llama.corpus.indexed_format import token_dtype, write_index
from megatron_llama.system.errors import UserError
from megatron_llama.text.conversation import RecordError
from tests.data_prep.helpers import (
    BAD_LINES,
    GOOD,
    Run,
    assert_refused,
    check_block_ends,
    listing,
    manifest,
    output_of,
    outputs,
    read,
    reference,
    run_script,
    sft_arguments,
    some_texts,
    write_jsonl,
)

Check = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("--block-mib", 0.01)
CUTS = [("gz", 0.5), ("zst", 0.5), ("xz", 0.5), ("bz2", 0.5), ("gz", 0.999), ("zst", 0.999), ("xz", 0.999)]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0),
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pytest.importorskip("zstandard").compress(data),
}


def packed(path: Path, kind: str) -> Path:
    """Write a compressed copy in two frames or members, as parallel compressors do."""
    data = path.read_bytes()
    half = len(data) // 2
    name = "en_head.json.gz.dedup." + path.name if kind == "zst" else path.name
    target = path.with_name(f"{name}.{kind}")
    target.write_bytes(PACKERS[kind](data[:half]) + PACKERS[kind](data[half:]))
    return target


@pytest.fixture
def check(tmp_path: Path, preprocess: Run, tokenizer: Path) -> Check:
    """Return a function that prepares an input and compares the dataset with the reference of some texts."""

    def run(texts: list[str], *given: object, workers: int = 1, key: str = "text") -> subprocess.CompletedProcess[str]:
        done = preprocess("--input", *given, "--output-prefix", tmp_path / "out/x", workers=workers)
        output_of(done)
        assert outputs(tmp_path / "out/x", key) == reference(tokenizer, texts)
        return done

    return run


@pytest.mark.parametrize(
    ("kind", "workers"), [("plain", 1), ("plain", 3), ("gz", 1), ("gz", 3), ("zst", 3), ("xz", 2), ("bz2", 2)]
)
def test_small_blocks_and_any_number_of_workers(tmp_path: Path, check: Check, kind: str, workers: int) -> None:
    """About 60 blocks of 10 KiB, cut inside lines; some lines are longer than a block."""
    texts = some_texts(250) + ["long " * 9000] + some_texts(60, seed=5)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    check(texts, path if kind == "plain" else packed(path, kind), *SMALL, workers=workers)


@pytest.mark.parametrize("compression", ["plain", *PACKERS])
def test_every_block_size_gives_the_same_lines(tmp_path: Path, compression: str) -> None:
    """Cut with all block sizes from 1 byte, and resume at each block's end."""
    data = b"\n".join([b"a", b"", b"bcd", b"e" * 30, b"f\r", b"", b"gh" * 7]) + b"\nlast without a feed"
    path = tmp_path / "a.jsonl"
    path.write_bytes({"plain": bytes, **PACKERS}[compression](data))
    assert check_block_ends(path, range(1, len(data) + 2)) == data.split(b"\n")


def test_folder_pattern_and_files_in_order(tmp_path: Path, check: Check) -> None:
    texts = {name: some_texts(20, seed=seed) for seed, name in enumerate("abcde")}
    write_jsonl(tmp_path / "dir/b.jsonl", texts["b"])
    write_jsonl(tmp_path / "dir/sub/c.json", texts["c"])
    for name in "de":
        packed(write_jsonl(tmp_path / f"g/{name}.json", texts[name]), "gz")
    last = write_jsonl(tmp_path / "a.jsonl", texts["a"])
    in_order = [text for name in "bcdea" for text in texts[name]]
    check(in_order, tmp_path / "dir", tmp_path / "g/*.json.gz", last, workers=2)


def test_text_folder_is_one_document_a_file(tmp_path: Path, check: Check) -> None:
    texts = some_texts(40, seed=2)
    (tmp_path / "books").mkdir()
    for number, text in enumerate(texts):
        if number % 3 == 1:
            (tmp_path / f"books/{number:03}.txt.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (tmp_path / f"books/{number:03}.txt").write_bytes((b"\xef\xbb\xbf" if number % 2 else b"") + text.encode())
    check(texts, tmp_path / "books", *SMALL, workers=2)


@pytest.mark.parametrize("key", ["text", "content", "raw_content"])
def test_the_key_of_oscar_and_redpajama_v2_is_detected(tmp_path: Path, check: Check, key: str) -> None:
    texts = some_texts(30)
    records = [{"warc_headers": {}, key: text, "metadata": {"quality_warnings": None}} for text in texts]
    (tmp_path / "oscar.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    check(texts, tmp_path / "oscar.jsonl", key=key)


def test_marks_feeds_and_numbers_that_json_lacks(tmp_path: Path, check: Check) -> None:
    """Byte order mark, blank lines, CRLF, no last line feed; NaN in metadata, which orjson rejects."""
    texts = ["one", "two", "three\u2028four"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + "\r\n\r\n  \n".join(lines)).encode())
    check(texts, tmp_path / "a.jsonl")
    assert manifest(tmp_path / "out/x")["documents_read"] == 3
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n{"meta": "\\ud800", "text": "c"}\n'
    )
    check(["a", "b", "c"], tmp_path / "a.jsonl", "--overwrite")


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b" \n\t\r\n"])
def test_empty_files_give_an_empty_dataset(tmp_path: Path, preprocess: Run, check: Check, data: bytes) -> None:
    given = (tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst")
    given[0].write_bytes(data)
    given[1].write_bytes(PACKERS["zst"](data))
    refused = preprocess("--input", *given, "--output-prefix", tmp_path / "out/x")
    assert_refused(refused, "no documents:", "--allow-empty")
    assert listing(tmp_path / "out") == []
    check([], *given, "--allow-empty")


@pytest.mark.parametrize(("kind", "where"), [*CUTS, *((kind, None) for kind in PACKERS)])
def test_damaged_compressed_files_are_rejected(tmp_path: Path, preprocess: Run, kind: str, where: float | None) -> None:
    """Truncated at a share of their size, or with zeros in the middle. Also with --on-bad-line skip, since the
    remaining documents cannot be counted."""
    path = packed(write_jsonl(tmp_path / "a.jsonl", some_texts(300)), kind)
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[: int(len(data) * where)] if where else data[:half] + bytes(64) + data[half + 64 :])
    done = preprocess("--input", path, "--output-prefix", tmp_path / "out/x", "--on-bad-line", "skip", workers=2)
    assert_refused(done, path.name, "truncated" if where else "")
    assert listing(tmp_path / "out") == []


TRICKY: list[Any] = [{"a": 'b"]},[{\\'}, {"c": ["\\\\", {"d": [1, -2.5e3, None]}]}, [[], {}], "x,\ny", "é🤯\u2028", 3]


def chunks(data: bytes, size: int) -> Iterator[tuple[bytes, int]]:
    return ((data[start : start + size], start) for start in range(0, len(data), size))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_elements_of_an_array_are_lines_for_any_chunk_size(indent: int | None, size: int) -> None:
    data = b" \n" + json.dumps(TRICKY, indent=indent, ensure_ascii=False).encode() + b"\r\n"
    lines = b"".join(line for line, _ in element_lines("f", chunks(data, size)))
    assert [json.loads(line) for line in lines.decode().removesuffix("\n").split("\n")] == TRICKY


def test_empty_chunks_of_an_array_are_skipped() -> None:
    parts = [b"", b'\xef\xbb\xbf["a\\', b"", b'"b"]']
    assert b"".join(line for line, _ in element_lines("f", iter([(part, 0) for part in parts]))) == b'"a\\"b"\n'


def test_invalid_arrays_stay_invalid() -> None:
    """Splitting makes no invalid element valid, and loses no content silently."""
    data = b'\xef\xbb\xbf[1 2, "a\nb", nul l, {"a": 1,}'
    lines = b"".join(line for line, _ in element_lines("f", chunks(data + b"]", 5))).split(b"\n")[:-1]
    assert len(lines) == 4
    for line in lines:
        with pytest.raises(ValueError):
            json.loads(line)
    for bad, word in (
        (b'[{"a": 1}', "has no end"),
        (b'["a', "has no end"),
        (b"[1] [2]", "content follows the JSON array"),
        (b"[1}", "match"),
    ):
        with pytest.raises(UserError, match=word):
            list(element_lines("f", chunks(bad, 3)))


def test_indented_array_in_a_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text("[\n {}\n]")
    (tmp_path / "about.json").write_text("{\n}")
    inputs = find_sources([str(tmp_path)], text_suffixes=(), arrays=True)
    assert [with_array(source).kind for source in inputs.sources] == ["array"]
    assert list(inputs.not_taken) == [str(tmp_path / "about.json")]
    with pytest.raises(UserError, match="a single JSON value"):  # preprocess.py's rule stays
        find_sources([str(tmp_path)])


def prepare(folder: Path, source: Path, prefix: Path, *more: str) -> None:
    assert sft.main(sft_arguments(folder, source, prefix, *more)) == 0


@pytest.mark.parametrize("shape", ["one line", "gzip"])
def test_array_file_matches_lines(folder: Path, tmp_path: Path, shape: str) -> None:
    records = [json.loads(line) for line in [*GOOD[:30], BAD_LINES["unknown_role"], *GOOD[30:]]]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = json.dumps(records, indent=None if shape == "one line" else 2).encode()
    source = tmp_path / "in" / ("set.json.gz" if shape == "gzip" else "set.json")
    source.parent.mkdir()
    source.write_bytes(gzip.compress(text) if shape == "gzip" else text)
    with pytest.raises(UserError, match="record 31: unknown_role"):
        prepare(folder, source, tmp_path / "out")
    for name, given in (("out", source.parent), ("expected", lines)):  # the folder: no file there is passed over
        prepare(folder, given, tmp_path / name, "--on-bad-line", "skip")
    assert read(tmp_path / "out")[2]["documents_written"] == 40
    for suffix in ("_sft.bin", "_sft.idx", "_sft_mask.bin"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()


def test_split_of_an_array_and_empty_result(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "set.json"
    source.write_text(json.dumps([json.loads(line) for line in GOOD], indent=1))
    prepare(folder, source, tmp_path / "out", "--split", "30,10")
    parts = [(tmp_path / f"out_{part}.jsonl").read_text().splitlines() for part in ("train", "validation")]
    assert sorted(json.dumps(json.loads(line)) for part in parts for line in part) == sorted(GOOD)
    source.write_text(json.dumps([json.loads(BAD_LINES["unknown_role"])] * 3))
    with pytest.raises(UserError, match=r"no examples: all records are bad \(3 unknown_role\)"):
        prepare(folder, source, tmp_path / "none", "--on-bad-line", "skip")
    assert not list(tmp_path.glob("none*")) and not list(tmp_path.glob(".none*"))


BAD: dict[str, tuple[bytes, str]] = {
    "lone surrogate": (rb'{"text": "a \ud83d b"}', "lone_surrogate"),
    "second half of a surrogate pair": (rb'{"text": "\ude00"}', "lone_surrogate"),
    "null": (b'{"text": null}', "null_text"),
    "missing": (b'{"meta": {}}', "missing_text"),
    "number": (b'{"text": 5}', "text_not_a_string"),
    "list": (b'{"text": ["a", "b"]}', "text_not_a_string"),
    "a list for a record": (b'["text"]', "not_an_object"),
    "a string for a record": (b'"text"', "not_an_object"),
    "a number for a record": (b"17", "not_an_object"),
    "null for a record": (b"null", "not_an_object"),
    "bad UTF-8": (b'{"text": "caf\xe9"}', "bad_utf8"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\x80"}', "bad_utf8"),
    "overlong UTF-8": (b'{"text": "\xc0\xaf"}', "bad_utf8"),
    "truncated": (b'{"text": "hello wor', "bad_json"),
    "two records": (b'{"text": "a"}{"text": "b"}', "bad_json"),
    "raw control character": (b'{"text": "a\x01b"}', "bad_json"),
    "zeros": (bytes(40), "bad_json"),
    "nested deeper than any parser goes": (b'{"text": ' + b"[" * 200_000, "bad_json"),
    "too long": (b'{"text": "' + b"x" * 300_000 + b'"}', "line_too_long"),
}
ARGS = ("--max-line-mib", 0.25, "--block-mib", 0.01)


@pytest.mark.parametrize("compressed", [False, True])
def test_skip_quarantines_each_line(tmp_path: Path, preprocess: Run, tokenizer: Path, compressed: bool) -> None:
    lines: list[bytes] = []
    texts, bad_at = [], {}
    for number, (bad, reason) in enumerate(BAD.values()):
        texts.append(f"good {number} " * (1 + 400 * (number % 3 == 0)))
        lines.append(json.dumps({"text": texts[-1]}).encode())
        bad_at[len(lines) + 1] = (bad, reason)
        lines.append(bad)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    if compressed:
        path.write_bytes(PACKERS["zst"](path.read_bytes()))
    done = preprocess("--input", path, "--output-prefix", tmp_path / "x", "--on-bad-line", "skip", *ARGS, workers=2)
    output = output_of(done)
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)
    report = manifest(tmp_path / "x")
    assert report["documents_read"] == 2 * len(BAD) == report["documents_written"] + report["documents_skipped"]
    assert report["skipped"] == Counter(reason for _, reason in bad_at.values())
    assert f"{len(BAD)} skipped" in output
    entries = [json.loads(line) for line in (tmp_path / report["quarantine"]).read_bytes().splitlines()]
    assert [(entry["line"], entry["reason"]) for entry in entries] == [
        (line, reason) for line, (_, reason) in bad_at.items()
    ]
    for entry in entries:
        raw = entry["raw"].encode() if "raw" in entry else base64.b64decode(entry["raw_base64"])
        if entry["complete"]:
            assert raw == bad_at[entry["line"]][0]
        else:
            assert bad_at[entry["line"]][0].startswith(raw)


def test_first_bad_line_is_reported_with_any_number_of_workers(tmp_path: Path, preprocess: Run) -> None:
    """A later block may finish first; the message must not depend on that."""
    good = json.dumps({"text": "word " * 300}).encode()
    lines = [good] * 400
    lines[233], lines[380] = b"null", b"{"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b""]))
    for workers in (1, 4):
        done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o/x", *ARGS, workers=workers)
        assert_refused(done, "a.jsonl, line 234", "not_an_object")
        assert listing(tmp_path / "o") == []


def test_bad_text_files(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    for name, data in [("a", b"fine"), ("b", b"caf\xe9"), ("c", b"y" * 300_000), ("d", b"")]:
        (tmp_path / f"{name}.txt").write_bytes(data)
    args = ("--input", tmp_path, "--output-prefix", tmp_path / "out/x", *ARGS)
    assert_refused(preprocess(*args), "b.txt", "bad_utf8")
    output_of(preprocess(*args, "--on-bad-line", "skip"))
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["fine", ""])
    assert manifest(tmp_path / "out/x")["skipped"] == {"bad_utf8": 1, "line_too_long": 1}


def test_repeated_keys_are_counted(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    lines = ['{"text": "a", "text": "b"}', '{"text": "c", "meta": {"text": 1}}', '{"x": 1, "x": "text", "text": "d"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "out/x")
    assert f"1 {REPEATED_KEY}" in output_of(done)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["b", "c", "d"])
    assert manifest(tmp_path / "out/x")["changed"] == {REPEATED_KEY: 1}


def test_dump_texts_without_orjson_is_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(map(chr, (*range(0x300), 0x2028, 0x2029, 0xFFFD, 0xFFFF, 0x1F642, 0x10FFFF)))
    examples = [{text: text, "": ""}, [text, "a"], {"a": "caf\udce9"}]
    fast = [record_formats.dump_texts(record) for record in examples]  # type: ignore[arg-type]
    monkeypatch.setattr(record_formats, "_fast_dumps", None)
    assert [record_formats.dump_texts(record) for record in examples] == fast  # type: ignore[arg-type]
    assert fast[2] == b'{"a":"caf\xe9"}'


def test_parsing_without_orjson_is_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [b'{"text": "a\\u00e9\\n\xc3\xa9"}', b' {"text":"", "x": NaN}\r', b'{"text": "a", "text": "b"}']
    lines = good + [bad for bad, reason in BAD.values() if reason != "line_too_long"]

    def parsed(line: bytes) -> list[str] | tuple[str, str]:
        try:
            return record_formats.parse_line(line, ["text"])
        except RecordError as bad:
            return bad.reason, bad.detail

    fast = [parsed(line) for line in lines]
    monkeypatch.setattr(record_formats, "loads", json.loads)
    assert [parsed(line) for line in lines] == fast
    assert fast[: len(good)] == [["aé\né"], [""], ["b"]]


@pytest.mark.parametrize(("eod", "bos"), [(True, False), (False, False), (True, True)])
def test_output_is_the_reference_byte_by_byte(tmp_path: Path, tokenizer: Path, eod: bool, bos: bool) -> None:
    """And the manifest has its counts and hashes. A Hugging Face folder adds BOS to prompts, which the note reports."""
    texts = some_texts(300)
    args = ["--input", write_jsonl(tmp_path / "a.jsonl", texts), "--output-prefix", tmp_path / "out/x"]
    shutil.copy(tokenizer, tmp_path / "tokenizer.model")
    folder = tokenizer if eod and not bos else tmp_path
    args += ["--tokenizer-model", folder, "--workers", 1, *["--append-eod"] * eod, *["--prepend-bos"] * bos]
    run = run_script("preprocess.py", *args)
    output_of(run)
    assert ("documents get no begin-of-text token" in run.stderr) == (not eod)
    binary, index = outputs(tmp_path / "out/x")
    assert (binary, index) == reference(tokenizer, texts, eod, bos)
    output_of(run_script("inspect.py", f"{tmp_path}/out/x_text_document"))
    report, empty = manifest(tmp_path / "out/x"), sum(not text for text in texts)
    assert (report["documents_read"], report["documents_written"]) == (300, 300 - empty)
    assert (report["documents_empty"], report["documents_skipped"], report["skipped"]) == (empty, 0, {})
    assert report["tokens"] * 2 == len(binary)
    assert report["tokenizer_sha256"] == hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    assert report["sha256"] == {".bin": hashlib.sha256(binary).hexdigest(), ".idx": hashlib.sha256(index).hexdigest()}


def test_megatron_core_writes_the_same_and_reads_ours(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    texts = some_texts(200, seed=1)
    output_of(preprocess("--input", write_jsonl(tmp_path / "a.jsonl", texts), "--output-prefix", tmp_path / "x"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=DType.optimal_dtype(processor.vocab_size()))
    expected = []
    for text in texts:
        ids = processor.encode(text)
        if ids:
            ids.append(processor.eos_id())
            expected.append(ids)
        builder.add_document(np.array(ids), [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "m.idx"))
    assert outputs(tmp_path / "x") == ((tmp_path / "m.bin").read_bytes(), (tmp_path / "m.idx").read_bytes())
    dataset = IndexedDataset(str(tmp_path / "x_text_document"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == expected
    assert len(dataset.document_indices) == len(texts) + 1


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65499, "<u2"), (65500, "<i4"), (128256, "<i4")])
def test_token_type_follows_the_vocabulary(vocabulary: int, dtype: str) -> None:
    assert token_dtype(vocabulary) == np.dtype(dtype)


def test_index_chunks_are_contiguous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(0, 5, 1000).astype("<i4")
    lengths.tofile(tmp_path / "lengths")
    files = []
    for chunk in (7, 1 << 20):
        monkeypatch.setattr(indexed_format, "CHUNK", chunk)
        file = io.BytesIO()
        write_index(file, tmp_path / "lengths", np.dtype("<i4"))
        files.append(file.getvalue())
    assert files[0] == files[1]
    sequences = int(np.count_nonzero(lengths))
    pointers = np.frombuffer(files[0], dtype="<i8", count=sequences, offset=34 + 4 * sequences)
    assert pointers[-1] == 4 * (lengths.sum() - lengths[lengths > 0][-1])


def test_several_keys_make_several_datasets(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    """The datasets stay aligned, document by document: one bad key of two skips the whole record."""
    texts, titles = some_texts(60), [f"title {n}" if n % 3 else "" for n in range(60)]
    records: list[dict[str, object]] = [{"title": a, "text": b} for a, b in zip(titles, texts, strict=True)]
    records.insert(30, {"title": "3", "text": None})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    args = ("--input", tmp_path / "a.jsonl", "--json-keys", "text", "title", "--on-bad-line", "skip")
    with patch("fcntl.flock", side_effect=OSError(37, "No locks available")):
        output_of(preprocess(*args, "--output-prefix", tmp_path / "x", workers=2))
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)
    assert outputs(tmp_path / "x", "title") == reference(tokenizer, titles)
    assert manifest(tmp_path / "x", "title")["documents_empty"] == 20
