"""preprocess.py from and to an object store: the files of a local run, through faults."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from megatron_llama.system import object_store
from tests.data_prep.helpers import Run, assert_refused, some_texts
from tests.object_store import Store

SUFFIXES = (".bin", ".idx", ".json")


def read_all(folder: Path) -> list[bytes]:
    return [(folder / f"x_text_document{suffix}").read_bytes() for suffix in SUFFIXES]


def test_from_and_to_a_store(store: Store, preprocess: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_DELAYS", (0.0, 0.01, 0.02))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [some_texts(60, seed) for seed in range(4)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part).encode() for part in texts]
    (folder / "a.jsonl").write_bytes(lines[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines[2]))
    parquet.write_table(pyarrow.table({"text": texts[3]}), folder / "d.parquet")
    (folder / "e.png").write_bytes(b"")
    for path in folder.iterdir():
        store.put(f"in/{path.name}", path.read_bytes())
    options = ("--block-mib", "0.01")
    assert preprocess("--input", folder, "--output-prefix", tmp_path / "local/x", *options).returncode == 0
    expected = read_all(tmp_path / "local")
    for kind, method in (("slow down", "GET"), ("truncated", "GET"), ("reset", "PUT"), ("error", "GET")):
        store.fault(kind, "in/" if method == "GET" else "out/", method)
    to_store = preprocess("--input", folder, "--output-prefix", store.url("out/x"), *options)
    assert to_store.returncode == 0 and f"data.prefixes=[{store.url('out/x')}_text_document]" in to_store.stdout
    assert [store.get(f"out/x_text_document{suffix}") for suffix in SUFFIXES] == expected
    second = preprocess("--input", folder, "--output-prefix", store.url("out/x"), *options)
    assert "already complete" in second.stdout and "uploaded" not in second.stdout
    for number, pattern in enumerate(("in", "in/*")):
        done = preprocess(
            "--input", store.url(pattern), "--output-prefix", tmp_path / f"{number}/x", *options, workers=2
        )
        assert done.returncode == 0, done.stderr
        assert read_all(tmp_path / f"{number}")[:2] == expected[:2]
    assert json.loads(read_all(tmp_path / "1")[2])["sources"][0]["path"] == store.url("in/a.jsonl")
    done = preprocess("--input", store.url("nothing/*.jsonl"), "--output-prefix", tmp_path / "none/x")
    assert_refused(done, "does not exist")
