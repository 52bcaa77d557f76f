"""All kinds of text input give the reference dataset; damaged and truncated files are rejected."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_prep import sft
from data_prep.lib.blocks import BlockPosition, Slots, cut_blocks, segment_lines
from data_prep.lib.input_files import find_sources
from data_prep.lib.records import element_lines
from data_prep.lib.sources import with_array
from megatron_llama.system.errors import UserError
from tests.data_prep.helpers import (
    BAD_LINES,
    GOOD,
    Run,
    assert_refused,
    listing,
    manifest,
    output_of,
    outputs,
    read,
    reference,
    some_texts,
    write_jsonl,
)

zstandard = pytest.importorskip("zstandard")
Check = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("--block-mib", 0.01)
CUTS = [("gz", 0.5), ("zst", 0.5), ("xz", 0.5), ("bz2", 0.5), ("gz", 0.999), ("zst", 0.999), ("xz", 0.999)]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0),
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
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
    sources, expected = find_sources([str(path)]).sources, data.split(b"\n")

    def lines_from(position: BlockPosition, size: int) -> Iterator[tuple[list[bytes], BlockPosition]]:
        slots = Slots(1000, size)
        for block in cut_blocks(sources, position, slots, 1000, size):
            lines = [segment_lines(segment, sources[segment.source], slots, 1000) for segment in block.segments]
            yield sum(map(list, lines), []), BlockPosition(block.segments[-1].source, block.segments[-1].end)

    for size in range(1, len(data) + 2):
        done, position = 0, BlockPosition()
        for lines, end in [([], position), *lines_from(position, size)]:
            done += len(lines)
            assert sum((rest for rest, _ in lines_from(end, size)), []) == expected[done:], (size, end)
        assert done == len(expected)


def test_folder_pattern_and_files_in_order(tmp_path: Path, check: Check) -> None:
    texts = {name: some_texts(20, seed=seed) for seed, name in enumerate("abcde")}
    write_jsonl(tmp_path / "dir/b.jsonl", texts["b"])
    write_jsonl(tmp_path / "dir/sub/c.json", texts["c"])
    for name in "de":
        packed(write_jsonl(tmp_path / f"g/{name}.json", texts[name]), "gz")
    (tmp_path / "dir/manifest.json").write_text(json.dumps({"files": 2}, indent=1))
    (tmp_path / "dir/README.txt").write_text("not a document")
    last = write_jsonl(tmp_path / "a.jsonl", texts["a"])
    in_order = [text for name in "bcdea" for text in texts[name]]
    done = check(in_order, tmp_path / "dir", tmp_path / "g/*.json.gz", last, workers=2)
    for words in (
        "note: 2 of 7 files found are ignored",
        "manifest.json (a single JSON value",
        "README.txt (a text file in an input of record files",
    ):
        assert words in done.stderr
    assert "7 files found = 5 used + 2 ignored" in done.stdout
    report = manifest(tmp_path / "out/x")
    assert [Path(path).name for path in report["files_not_taken"]] == ["README.txt", "manifest.json"]
    assert report["files_found"] == report["files_taken"] + 2 == len(report["sources"]) + 2


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


def test_byte_order_mark_blank_lines_crlf_and_no_last_feed(tmp_path: Path, check: Check) -> None:
    texts = ["one", "two", "three\u2028four"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + "\r\n\r\n  \n".join(lines)).encode())
    check(texts, tmp_path / "a.jsonl")
    assert manifest(tmp_path / "out/x")["documents_read"] == 3


def test_nan_in_metadata_is_accepted(tmp_path: Path, check: Check) -> None:
    """json.loads, which Megatron uses, accepts these; orjson rejects them."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n{"meta": "\\ud800", "text": "c"}\n'
    )
    check(["a", "b", "c"], tmp_path / "a.jsonl")


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b" \n\t\r\n"])
def test_empty_files_give_an_empty_dataset(tmp_path: Path, preprocess: Run, check: Check, data: bytes) -> None:
    given = (tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst")
    given[0].write_bytes(data)
    given[1].write_bytes(zstandard.compress(data))
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
    assert [with_array(source).is_array for source in inputs.sources] == [True]
    assert list(inputs.not_taken) == [str(tmp_path / "about.json")]
    with pytest.raises(UserError, match="a single JSON value"):  # preprocess.py's rule stays
        find_sources([str(tmp_path)])


def prepare(folder: Path, source: Path, prefix: Path, *more: str) -> None:
    made = ["--input", str(source), "--tokenizer-model", str(folder), "--seq-length", "128", "--workers", "1", *more]
    assert sft.main([*made, "--output-prefix", str(prefix)]) == 0


@pytest.mark.parametrize("shape", ["one line", "gzip"])
def test_array_file_matches_lines(folder: Path, tmp_path: Path, shape: str) -> None:
    """An array gives the dataset of its lines, including bad records and their numbers."""
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
