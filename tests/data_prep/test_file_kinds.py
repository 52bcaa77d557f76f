"""Parquet, Arrow, CSV and pipes give the dataset of their records; folders, and datasets of Hugging Face."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import preprocess, sft
from data_prep.lib import input_readers, parquet_csv
from data_prep.lib.find_inputs import find_sources
from data_prep.lib.input_readers import read_lines
from data_prep.lib.join_parts import split_input
from megatron_llama.system.errors import UserError
from tests.data_prep.helpers import (
    arguments,
    check_block_ends,
    command,
    listing,
    manifest,
    outputs,
    reference,
    sft_arguments,
    some_texts,
    write_csv,
    write_jsonl,
    write_parquet,
)
from tests.golden import GoldenFiles

pa = pytest.importorskip("pyarrow", reason="an extra")
import pyarrow.parquet as pq  # noqa: E402

Rows = list[dict[str, Any]]
Make = Callable[..., int]
TEXTS = [text.replace("\r", "") for text in some_texts(120)] + ["long " * 3000, 'a "quoted", one\nof two lines', ""]
RECORDS: Rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def write_arrow(path: Path, records: Rows, rows: int = 10, stream: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(records)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "csv": lambda folder: write_csv(folder / "a.csv", RECORDS),
    "csv.gz": lambda folder: zipped(write_csv(folder / "a.csv", RECORDS)),
    "parquet": lambda folder: write_parquet(folder / "a.parquet", RECORDS),
    "arrow stream": lambda folder: write_arrow(folder / "a.arrow", RECORDS),
    "arrow file": lambda folder: write_arrow(folder / "a.arrow", RECORDS, stream=False),
}


def zipped(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.fixture
def make(tokenizer: Path, tmp_path: Path) -> Make:
    """Return a function that runs preprocess.py in this process and writes out/x below tmp_path."""

    def run(*given: object, workers: int = 1, prefix: str = "out/x") -> int:
        args = arguments(tokenizer, tmp_path / prefix, *given, "--block-mib", 0.01, "--workers", workers)
        return preprocess.main([*map(str, args)])

    return run


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_gives_the_same_dataset(tmp_path: Path, make: Make, tokenizer: Path, kind: str) -> None:
    assert make(WRITERS[kind](tmp_path), workers=2) == 0
    assert outputs(tmp_path / "out/x") == reference(tokenizer, TEXTS)
    inputs = manifest(tmp_path / "out/x")
    assert inputs["documents_read"] == len(TEXTS) == inputs["documents_written"] + inputs["documents_empty"]


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "csv"])
def test_every_block_end_is_a_resume_position(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest after each block's end is complete, also for Parquet with a single row group or none."""
    path = WRITERS[kind](tmp_path)
    for largest in (input_readers.LARGEST_PART, 1):
        monkeypatch.setattr(input_readers, "LARGEST_PART", largest)
        assert [json.loads(line)["text"] for line in check_block_ends(path, (100, 3000, 1 << 20))] == TEXTS


def test_dates_that_python_lacks(tmp_path: Path, make: Make, tokenizer: Path) -> None:
    """Columns besides the text are read too: dates after the year 9999 become text, and lists of them are an error."""
    far = pa.array([1 << 62, None]).cast(pa.timestamp("ms"))
    columns = {"text": ["a cat", "a dog"], "at": far, "day": pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())}
    pq.write_table(pa.table({**columns, "for": far.cast(pa.int64()).cast(pa.duration("ms"))}), tmp_path / "a.parquet")
    assert make(tmp_path / "a.parquet") == 0
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["a cat", "a dog"])
    lists = pa.array([[1 << 62], []]).cast(pa.list_(pa.timestamp("ms")))
    pq.write_table(pa.table({**columns, "all": lists}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: column 'all' has a value that cannot be read"):
        make(tmp_path / "b.parquet")


def test_zstd_with_long_windows_and_skippable_frames(tmp_path: Path, make: Make, tokenizer: Path) -> None:
    """zstd --long=31, and the frames of pzstd, which begin with a skippable one."""
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    long = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    frame = zstandard.ZstdCompressor().compress(lines[: len(lines) // 2])
    stream = zstandard.ZstdCompressor(compression_params=long).compressobj()
    skippable = struct.pack("<III", 0x184D2A50, 4, len(frame))
    content = skippable + frame + stream.compress(lines[len(lines) // 2 :]) + stream.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    assert make(tmp_path / "a.jsonl.zst") == 0
    assert outputs(tmp_path / "out/x") == reference(tokenizer, TEXTS)


def test_bad_rows_are_reported_with_row_numbers(tmp_path: Path, make: Make, tokenizer: Path) -> None:
    rows_with_extra = tmp_path / "a.csv"
    rows_with_extra.write_bytes(b'id,text\n1,good\n2\n3,caf\xe9\n4,"one, two",more\n\n5,"last ""one"""\n')
    text = pa.array([b"fine", None, b"caf\xe9", "é".encode(), b'"\xff\n"']).cast(pa.binary())
    view = pa.StringArray.from_buffers(5, text.buffers()[1], text.buffers()[2], text.buffers()[0])
    pq.write_table(pa.table({"text": view}), tmp_path / "b.parquet", row_group_size=2)
    other = write_parquet(tmp_path / "c.parquet", [{"body": "no text"}, {"body": "none"}])
    with pytest.raises(UserError, match=r"a\.csv, row 2: bad_columns: 1 cells"):
        make(rows_with_extra)
    with pytest.raises(UserError, match=r"b\.parquet, row 2: null_text"):
        make(tmp_path / "b.parquet")
    assert make(rows_with_extra, tmp_path / "b.parquet", other, "--on-bad-line", "skip") == 0
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["good", 'last "one"', "fine", "é"])
    inputs = manifest(tmp_path / "out/x")
    assert inputs["skipped"] == {"bad_columns": 2, "bad_utf8": 3, "missing_text": 2, "null_text": 1}
    assert inputs["documents_read"] == 12
    entries = [json.loads(one) for one in (tmp_path / "out" / inputs["quarantine"]).read_bytes().splitlines()]
    assert [(Path(one["file"]).name[0], one["line"], one["reason"]) for one in entries] == [
        *(("a", 2, "bad_columns"), ("a", 3, "bad_utf8"), ("a", 4, "bad_columns")),
        *(("b", 2, "null_text"), ("b", 3, "bad_utf8"), ("b", 5, "bad_utf8")),
        *(("c", 1, "missing_text"), ("c", 2, "missing_text")),
    ]


# (file, its content, words): bytes, or a kind of WRITERS and a change of its bytes.
DAMAGED: dict[str, tuple[str, bytes | tuple[str, Callable[[bytes], bytes]], str]] = {
    "csv with an open quote": ("a.csv", b'id,text\n1,fine\n2,"never closed\n3,x\n', "row 2 .*unexpected end of data"),
    "csv with text after a quote": ("a.csv", b'id,text\n1,"a" b\n2,"c"\n', r"a\.csv, row 1 .*expected after"),
    "csv with semicolons": ("a.csv", b"id;text\n1;a\n", "has no comma"),
    "csv in Latin-1": ("a.csv", b"id,text\xe9\n1,a\n", "header is not UTF-8"),
    "csv in UTF-16": ("a.csv", "id,text\n1,a\n".encode("utf-16"), "header is not UTF-8"),
    "csv with a name twice": ("a.csv", b"text,text\na,b\n", "'text' twice"),
    "parquet cut off": ("a.parquet", ("parquet", lambda b: b[:-200]), r"a\.parquet: damaged parquet"),
    "parquet without its end": ("a.parquet", ("parquet", lambda b: b[: len(b) // 2]), "damaged"),
    "parquet with damaged pages": (
        *("a.parquet", ("parquet", lambda b: b[:600] + bytes(3000) + b[3600:])),
        r"a\.parquet: damaged parquet",
    ),
    "parquet by name only": ("a.parquet", b'{"text": "a"}\n', "truncated or not of this format"),
    "parquet in gzip": ("a.parquet.gz", ("parquet", gzip.compress), "compressed as a whole"),
    "a pointer of git-lfs": (
        *("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "git lfs pull",
    ),
    "arrow stream without its end": ("a.arrow", ("arrow stream", lambda b: b[:-8]), "is truncated"),
    "arrow stream cut in a batch": (
        *("a.arrow", ("arrow stream", lambda b: b[: len(b) // 2] + parquet_csv.STREAM_END)),
        "damaged arrow",
    ),
    "arrow file cut off": ("a.arrow", ("arrow file", lambda b: b[:-9]), "damaged arrow"),
    "zip": ("a.jsonl", b"PK\x03\x04 and more", "a zip archive. Unpack it"),
    "xz by name only": ("a.jsonl.xz", b"\x00\x01\x02\x03", "is not compressed with any of"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, make: Make, kind: str) -> None:
    """Also with --on-bad-line skip, since documents after the damage cannot be counted."""
    name, content, words = DAMAGED[kind]
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if isinstance(content, tuple):
        content = content[1](WRITERS[content[0]](tmp_path).read_bytes())
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as refused:
        make(path, "--on-bad-line", "skip")
    assert path.name in str(refused.value) and listing(tmp_path / "out") == []


def test_missing_pyarrow_error_has_install_command(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["parquet"](tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install -e .*\[parquet\]'"):
        make(path)
    assert make(write_jsonl(tmp_path / "b.jsonl", ["a"])) == 0, "nothing else needs it"


def test_every_file_is_used_or_listed_with_a_reason(
    tmp_path: Path, make: Make, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("in")
    write_jsonl(folder / "a.jsonl", ["first"])
    write_jsonl(folder / "part-00000", ["in a pattern only"])
    write_jsonl(folder / "i.json.1", ["there too"])
    (folder / "manifest.json").write_text('{\n "files": 2\n}')
    write_parquet(folder / "sub/c.parquet", [{"text": "second"}])
    for name in ("d.zip", "e.lz4", "README.md", ".gitattributes", "t.tsv", "readme.txt"):
        (folder / name).write_bytes(b"x")
    write_jsonl(folder / "old.quarantine.jsonl", ["bad"])
    write_jsonl(folder / ".cache/b.jsonl", ["hidden"])
    os.mkfifo(folder / "pipe.jsonl")
    page = ""
    for given, prefix in ((folder, "out/x"), (f"{folder}/*", "out/y")):
        assert make(given, prefix=prefix) == 0
        inputs, message = manifest(tmp_path / prefix), capsys.readouterr()
        reasons = dict(sorted(inputs["files_not_taken"].items()))
        assert inputs["files_found"] == inputs["files_taken"] + len(reasons)
        page += f"== {given}\nused: {', '.join(one['path'] for one in inputs['sources'])}\n"
        page += "".join(f"{path}: {reason}\n" for path, reason in reasons.items())
        page += message.err + "".join(f"{line}\n" for line in message.out.splitlines() if "found" in line)
    assert outputs(tmp_path / "out/x") == reference(tokenizer, ["first", "second"])
    GoldenFiles.check("data_prep/files.txt", page.replace(f"{tmp_path}/", ""))
    with pytest.raises(UserError, match=r"(?s)has no supported file .*README\.md \(unsupported suffix"):
        make(folder / "*.md")


@pytest.mark.parametrize(("by", "packed"), [("stdin", True), ("fifo", False)])
def test_pipes(tmp_path: Path, tokenizer: Path, packed: bool, by: str) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    data = gzip.compress(data) if packed else data
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    args = arguments(tokenizer, tmp_path / "x", "-" if by == "stdin" else pipe, "--workers", 2, "--block-mib", 0.01)
    for message in ("documents = ", "already complete"):  # same content, same input
        writer = threading.Thread(target=pipe.write_bytes, args=(data,), daemon=True)
        if by == "fifo":
            writer.start()
        given = data if by == "stdin" else None
        done = subprocess.run(command("preprocess.py", *args), input=given, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert message in done.stdout.decode()
        assert outputs(tmp_path / "x") == reference(tokenizer, TEXTS)
    if by == "stdin":
        empty = subprocess.run(command("preprocess.py", *args, "--overwrite"), input=b"", capture_output=True)
        assert empty.returncode == 2 and b"no documents:" in empty.stderr


def test_labelled_rows_match_tsv_lines(tmp_path: Path, folder: Path) -> None:
    """For CSV, Parquet and JSON Lines. A label may be a number; a row without a label is bad."""
    rows: Rows = [{"index": 1, "sentence": "fine, and good", "label": 1}, {"index": 2, "sentence": "no", "label": 0}]
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + "fine, and good\t1\nno\t0\n")
    write_parquet(tmp_path / "a.parquet", rows)
    write_csv(tmp_path / "a.csv", rows)
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = {}
    for name in ("a.tsv", "a.parquet", "a.csv", "a.jsonl"):
        assert sft.main(sft_arguments(folder, tmp_path / name, tmp_path / name[2:] / "x", "--template", "sst2")) == 0
        made[name] = [(tmp_path / name[2:] / f"x_sft{end}").read_bytes() for end in (".bin", ".idx", "_mask.bin")]
    assert made["a.tsv"] == made["a.parquet"] == made["a.csv"] == made["a.jsonl"]
    write_parquet(tmp_path / "b.parquet", [*rows, {"index": 3, "sentence": "neither", "label": None}])
    with pytest.raises(UserError, match=r"row 3: unknown_label"):
        sft.main(sft_arguments(folder, tmp_path / "b.parquet", tmp_path / "b/x", "--template", "sst2"))


def test_parts_are_cut_between_row_groups(tmp_path: Path, make: Make) -> None:
    records: Rows = [{"text": text} for text in some_texts(200)]
    files = [write_parquet(tmp_path / "in/a.parquet", records), write_arrow(tmp_path / "in/b.arrow", records)]
    cuts = split_input(find_sources([str(tmp_path / "in")]).sources, 6)
    assert sum(begin.offset > 0 for begin, _ in cuts) >= 4, "both files are shared"
    make(*files, prefix="one/x")
    for number in range(6, 0, -1):
        make(*files, "--part", f"{number}/6", prefix="parts/x")
    for end in ("bin", "idx", "json"):
        whole, joined = ((tmp_path / f"{name}/x_text_document.{end}").read_bytes() for name in ("one", "parts"))
        assert joined == whole, end


# Downloaded Hugging Face datasets: files of the selected split, and reasons for the others.
TRAIN = ["one", "two"], ["three"]


def listed(*given: object) -> str:
    """Return the texts of an input, and the other files with their reasons."""
    inputs = find_sources([str(each) for each in given])
    texts = [json.loads(line)["text"] for source in inputs.sources for line in read_lines(source)]
    others = sorted((Path(path).name, reason) for path, reason in inputs.not_taken.items())
    return "".join([f"texts: {', '.join(texts)}\n", *(f"{name}: {reason}\n" for name, reason in others), "\n"])


def records(names: list[str]) -> list[dict[str, str]]:
    return [{"text": name} for name in names]


def saved(folder: Path, shards: tuple[list[str], ...]) -> None:
    """Write a split in the layout of datasets.save_to_disk."""
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, part in zip(names, shards, strict=True):
        write_arrow(folder / name, records(part))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": folder.name}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def hub(folder: Path, **files: list[str]) -> Path:
    """Write a repository in the layout of the hub cache, with links into blobs."""
    for number, (name, part) in enumerate(files.items()):
        path = folder / "snapshots/0a1b" / name.replace("__", "/")
        blob = write_parquet(folder / "blobs" / f"b{number}", records(part))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".parquet").symlink_to(blob)
    (folder / "snapshots/0a1b/.gitattributes").write_text("*.parquet filter=lfs")
    return folder / "snapshots/0a1b"


SHARDS = {f"data__train-{n:05}-of-00002": part for n, part in enumerate(TRAIN)} | {"data__test-00000-of-00001": ["t"]}


README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: more
  %s
  data_files: {train: more/x.parquet, validation: [more/y.parquet]}
---
# Dataset
"""


def test_downloaded_datasets(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "all"
    saved(one, TRAIN)
    write_arrow(one / "cache-0123456789abcdef.arrow", records(["of a map"]))
    saved(several / "train", TRAIN)
    saved(several / "test", (["held out"],))
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    shards, configs = hub(tmp_path / "shards", **SHARDS), tmp_path / "configs"
    configs = hub(configs, **SHARDS, more__x=["more"], more__y=["validation"], z=["unknown"])
    (configs / "README.md").write_text(README % "")
    with pytest.raises(UserError, match=r"several configs \(main, more\) and no default"):
        find_sources([str(configs)])
    (configs / "README.md").write_text(README % "default: true")
    given = {"a split": one, "splits": several, "a split by its name": several / "test", "shards": shards}
    given |= {"configs": configs, "a pattern, which names the files": f"{configs}/data/train-*"}
    page = "".join(f"== {name}\n{listed(each)}" for name, each in given.items())
    GoldenFiles.check("data_prep/downloads.txt", page)
    (one / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="lists data-00001-of-00002.arrow, which does not exist"):
        find_sources([str(one)])
