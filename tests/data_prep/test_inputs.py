"""All kinds of input give the reference dataset."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from functools import partial
from pathlib import Path

import pytest

from tests.cpu import children_cpu_seconds
from tests.data_prep.helpers import Run, assert_refused, listing, manifest, outputs, reference, some_texts, write_jsonl

zstandard = pytest.importorskip("zstandard")
SMALL = ("--block-mib", 0.01)
CUTS = [("gz", 0.5), ("zst", 0.5), ("xz", 0.5), ("bz2", 0.5), ("gz", 0.999), ("zst", 0.999), ("xz", 0.999)]
PACKERS = {"gz": partial(gzip.compress, mtime=0), "xz": lzma.compress, "bz2": bz2.compress}


def packed(path: Path, kind: str) -> Path:
    """Write a compressed copy in two frames or members, as parallel compressors do."""
    data = path.read_bytes()
    half = len(data) // 2
    if kind in PACKERS:
        target = path.with_name(f"{path.name}.{kind}")
        target.write_bytes(PACKERS[kind](data[:half]) + PACKERS[kind](data[half:]))
    else:
        target = path.with_name("en_head.json.gz.dedup." + path.name + ".zst")
        compressor = zstandard.ZstdCompressor()
        target.write_bytes(compressor.compress(data[:half]) + compressor.compress(data[half:]))
    return target


@pytest.mark.parametrize(
    ("kind", "workers"), [("plain", 1), ("plain", 3), ("gz", 1), ("gz", 3), ("zst", 3), ("xz", 2), ("bz2", 2)]
)
def test_small_blocks_and_any_number_of_workers(
    tmp_path: Path, preprocess: Run, tokenizer: Path, kind: str, workers: int
) -> None:
    """About 60 blocks of 10 KiB, cut inside lines; some lines are longer than a block."""
    texts = some_texts(250) + ["long " * 9000] + some_texts(60, seed=5)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    if kind != "plain":
        path = packed(path, kind)
    done = preprocess("--input", path, "--output-prefix", tmp_path / "x", *SMALL, workers=workers)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)


@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "xz", "bz2"])
def test_every_block_size_gives_the_same_lines(tmp_path: Path, compression: str) -> None:
    """Cut with all block sizes from 1 byte, and resume at each block's end."""
    from data_prep.lib.blocks import BlockPosition, Slots, cut_blocks, segment_lines
    from data_prep.lib.input_files import find_sources

    data = b"\n".join([b"a", b"", b"bcd", b"e" * 30, b"f\r", b"", b"gh" * 7]) + b"\nlast without a feed"
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        {"": bytes, "gzip": gzip.compress, "zstd": zstandard.compress, "xz": lzma.compress, "bz2": bz2.compress}[
            compression
        ](data)
    )
    sources = find_sources([str(path)]).sources
    expected = data.split(b"\n")
    for size in range(1, len(data) + 2):
        lines: list[bytes] = []
        ends = [(BlockPosition(), 0)]
        slots = Slots(1000, size)
        for block in cut_blocks(sources, BlockPosition(), slots, 1000, size):
            for segment in block.segments:
                lines += segment_lines(segment, sources[segment.source], slots, 1000)
            last = block.segments[-1]
            ends.append((BlockPosition(last.source, last.end), len(lines)))
        assert lines == expected, size
        for position, done in ends:
            slots = Slots(1000, size)
            rest = [
                line
                for block in cut_blocks(sources, position, slots, 1000, size)
                for segment in block.segments
                for line in segment_lines(segment, sources[segment.source], slots, 1000)
            ]
            assert rest == expected[done:], (size, position)


def test_folder_pattern_and_files_in_order(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    texts = {name: some_texts(20, seed=seed) for seed, name in enumerate("abcde")}
    write_jsonl(tmp_path / "dir/b.jsonl", texts["b"])
    write_jsonl(tmp_path / "dir/sub/c.json", texts["c"])
    packed(write_jsonl(tmp_path / "g/d.json", texts["d"]), "gz")
    packed(write_jsonl(tmp_path / "g/e.json", texts["e"]), "gz")
    (tmp_path / "dir/manifest.json").write_text(json.dumps({"files": 2}, indent=1))
    (tmp_path / "dir/README.txt").write_text("not a document")
    last = write_jsonl(tmp_path / "a.jsonl", texts["a"])
    done = preprocess(
        *("--input", tmp_path / "dir", tmp_path / "g/*.json.gz", last, "--output-prefix", tmp_path / "x"), workers=2
    )
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, [text for name in "bcdea" for text in texts[name]])
    assert "note: 2 of 7 files found are ignored" in done.stderr
    assert (
        "manifest.json (a single JSON value" in done.stderr
        and "README.txt (a text file in an input of record files" in done.stderr
    )
    assert "7 files found = 5 used + 2 ignored" in done.stdout
    report = manifest(tmp_path / "x")
    assert [Path(path).name for path in report["files_not_taken"]] == ["README.txt", "manifest.json"]
    assert report["files_found"] == report["files_taken"] + 2 == len(report["sources"]) + 2


def test_text_folder_is_one_document_a_file(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    texts = some_texts(40, seed=2)
    (tmp_path / "books").mkdir()
    for number, text in enumerate(texts):
        data = text.encode()
        if number % 3 == 1:
            (tmp_path / f"books/{number:03}.txt.gz").write_bytes(gzip.compress(data))
        else:
            (tmp_path / f"books/{number:03}.txt").write_bytes((b"\xef\xbb\xbf" if number % 2 else b"") + data)
    done = preprocess("--input", tmp_path / "books", "--output-prefix", tmp_path / "x", *SMALL, workers=2)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)


@pytest.mark.parametrize("key", ["text", "content", "raw_content"])
def test_the_key_of_oscar_and_redpajama_v2_is_found(tmp_path: Path, preprocess: Run, tokenizer: Path, key: str) -> None:
    texts = some_texts(30)
    with open(tmp_path / "oscar.jsonl", "w") as file:
        for text in texts:
            file.write(json.dumps({"warc_headers": {}, key: text, "metadata": {"quality_warnings": None}}) + "\n")
    done = preprocess("--input", tmp_path / "oscar.jsonl", "--output-prefix", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x", key) == reference(tokenizer, texts)


def test_byte_order_mark_blank_lines_crlf_and_no_last_feed(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("one", "two", "three\u2028four")]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + "\r\n\r\n  \n".join(lines)).encode())
    done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, ["one", "two", "three\u2028four"])
    assert manifest(tmp_path / "x")["documents_read"] == 3


def test_nan_in_metadata_is_accepted(tmp_path: Path, preprocess: Run, tokenizer: Path) -> None:
    """json.loads, which Megatron uses, accepts these; orjson rejects them."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n{"meta": "\\ud800", "text": "c"}\n'
    )
    done = preprocess("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "x") == reference(tokenizer, ["a", "b", "c"])


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b" \n\t\r\n"])
def test_empty_files_give_an_empty_dataset(tmp_path: Path, preprocess: Run, tokenizer: Path, data: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(data))
    given = ("--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst", "--output-prefix", tmp_path / "out/x")
    assert_refused(preprocess(*given), "no documents:", "--allow-empty")
    assert listing(tmp_path / "out") == []
    done = preprocess(*given, "--allow-empty")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out/x") == reference(tokenizer, [])


@pytest.mark.parametrize(("kind", "where"), CUTS)
def test_truncated_compressed_file_is_rejected(tmp_path: Path, preprocess: Run, kind: str, where: float) -> None:
    """Also with --on-bad-line skip, since the remaining documents cannot be counted."""
    path = packed(write_jsonl(tmp_path / "a.jsonl", some_texts(300)), kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * where)])
    done = preprocess("--input", path, "--output-prefix", tmp_path / "out/x", "--on-bad-line", "skip", workers=2)
    assert_refused(done, path.name, "truncated")
    assert listing(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["gz", "zst", "xz", "bz2"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, preprocess: Run, kind: str) -> None:
    path = packed(write_jsonl(tmp_path / "a.jsonl", some_texts(300)), kind)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(data)
    done = preprocess("--input", path, "--output-prefix", tmp_path / "out/x")
    assert_refused(done, path.name)
    assert listing(tmp_path / "out") == []


def test_wrong_inputs_are_refused(tmp_path: Path, preprocess: Run) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x00\x01\x02\x03")
    for given, words in [
        ([tmp_path / "none.jsonl"], ["none.jsonl does not exist"]),
        ([tmp_path / "none*.jsonl"], ["no match for the pattern"]),
        (
            [tmp_path / "none.jsonl", source, source, tmp_path / "gone.txt"],
            ["none.jsonl does not exist", "gone.txt does not exist", "occurs twice in --input"],
        ),
        ([tmp_path / "empty"], ["has no supported file"]),
        ([source, source], ["occurs twice in --input"]),
        ([tmp_path / "b.jsonl.gz"], ["not compressed with any of zst, zstd, gz, xz, bz2"]),
    ]:
        assert_refused(preprocess("--input", *given, "--output-prefix", tmp_path / "out/x"), *words)
    assert listing(tmp_path / "out") == []


def test_help_is_fast() -> None:
    from tests.data_prep.helpers import run_script

    for script in ("preprocess.py", "python_stdlib.py", "train_tokenizer.py", "inspect.py", "redpajama.py"):
        with children_cpu_seconds(2.0):
            done = run_script(script, "--help")
        assert done.returncode == 0, done.stderr
