"""JSON array files are read element by element, with the same counts as JSON lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import sft
from data_prep.lib.input_files import find_sources
from data_prep.lib.records import element_lines
from data_prep.lib.sources import with_array
from megatron_llama.system.errors import UserError
from tests.data_prep.helpers import BAD_LINES, GOOD, read

TRICKY: list[Any] = [{"a": 'b"]},[{\\'}, {"c": ["\\\\", {"d": [1, -2.5e3, None]}]}, [[], {}], "x,\ny", "é🤯\u2028", 3]


def chunks(data: bytes, size: int) -> Iterator[tuple[bytes, int]]:
    return ((data[start : start + size], start) for start in range(0, len(data), size))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_elements_are_lines_for_any_chunk_size(indent: int | None, size: int) -> None:
    data = b" \n" + json.dumps(TRICKY, indent=indent, ensure_ascii=False).encode() + b"\r\n"
    lines = b"".join(line for line, _ in element_lines("f", chunks(data, size)))
    assert [json.loads(line) for line in lines.decode().removesuffix("\n").split("\n")] == TRICKY


def test_invalid_json_stays_invalid() -> None:
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
    for name, given in (("out", source.parent), ("wanted", lines)):  # the folder: no file there is passed over
        prepare(folder, given, tmp_path / name, "--on-bad-line", "skip")
    assert read(tmp_path / "out")[2]["documents_written"] == 40
    for suffix in ("_sft.bin", "_sft.idx", "_sft_mask.bin"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"wanted{suffix}").read_bytes()


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
