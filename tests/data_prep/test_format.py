"""Bytes on disk, compared with a reference writer and with megatron-core's reader and writer."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron_llama.corpus import indexed_format
from megatron_llama.corpus.indexed_format import token_dtype, write_index
from tests.data_prep.helpers import Run, manifest, output_of, outputs, reference, run_script, some_texts, write_jsonl


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


def test_index_bytes(tmp_path: Path) -> None:
    """Expected bytes of three documents with 3, 0 and 2 tokens."""
    (tmp_path / "lengths").write_bytes(struct.pack("<3i", 3, 0, 2))
    file = io.BytesIO()
    assert write_index(file, tmp_path / "lengths", token_dtype(32000)) == (2, 5)
    expected = bytes.fromhex(
        "4d4d49444944580000"  # MMIDIDX and two zeros
        "0100000000000000"  # version 1
        "08"  # uint16
        "0200000000000000"  # sequences
        "0400000000000000"  # document indices
        "0300000002000000"  # lengths
        "00000000000000000600000000000000"  # byte pointers
        "0000000000000000010000000000000001000000000000000200000000000000"  # document indices; the empty one repeats
    )
    assert file.getvalue() == expected


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
    """Pointers and document indices continue across the chunks of a large index."""
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
    output_of(preprocess(*args, "--output-prefix", tmp_path / "x", workers=2))
    assert outputs(tmp_path / "x") == reference(tokenizer, texts)
    assert outputs(tmp_path / "x", "title") == reference(tokenizer, titles)
    assert manifest(tmp_path / "x", "title")["documents_empty"] == 20
