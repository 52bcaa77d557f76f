"""The full check of an indexed dataset: every length, pointer, index, token id and hash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.corpus.indexed_format import CHUNK, IndexedDataset
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, sha256_file

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("documents_read", "documents_written", "documents_skipped", "vocab_size"), (int,)),
    **dict.fromkeys(("tokenizer", "tokenizer_sha256"), (str,)),
    **dict.fromkeys(("options", "skipped"), (dict,)),
    "eod": (int, type(None)),
}
"""What a manifest must hold to be shown and checked, besides what only some have."""


def read_manifest(prefix: str) -> dict[str, Any] | None:
    """PREFIX.json, which preprocess.py or sft.py wrote; None where another program made the dataset.

    Raises:
        UserError: it is damaged, or can't be read.
    """
    try:
        manifest = read_json(Path(prefix + ".json"))
        if not isinstance(manifest, dict):
            raise ValueError("it is no JSON object")
        for name, kinds in _KINDS.items():
            if name not in manifest or type(manifest[name]) not in kinds:
                raise ValueError(f"{name} is {str(manifest.get(name, 'missing'))[:60]}")
        if not all(type(count) is int for count in manifest["skipped"].values()):
            raise ValueError("skipped holds no counts")
        if not isinstance(manifest.get("sha256", {}), dict):
            raise ValueError("sha256 is no object")
        return manifest
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}.json is damaged: {error}") from None


def problems(dataset: IndexedDataset, manifest: dict[str, Any] | None, check_hashes: bool) -> Iterator[str]:
    """Everything that is wrong with a dataset, one sentence each. Reads all of it once, in chunks."""
    index = dataset.index
    itemsize = index.dtype.itemsize
    end = 0
    for start in range(0, len(index.lengths), CHUNK):
        lengths = index.lengths[start : start + CHUNK].astype(np.int64)
        if (lengths <= 0).any():
            yield f"sequence {start + int(np.argmax(lengths <= 0))} has no tokens"
        sizes = lengths * itemsize
        wrong = index.pointers[start : start + CHUNK] != end + np.cumsum(sizes) - sizes
        if wrong.any():
            yield f"sequence {start + int(np.argmax(wrong))} does not begin where the one before it ends"
        end += int(sizes.sum())
    size = dataset.bin_path.stat().st_size
    if end != size:
        yield f"{dataset.bin_path.name} has {size:,} bytes; the index gives {end:,}"
    indices = index.document_indices
    if not len(indices) or indices[0] != 0 or indices[-1] != len(index):
        yield "the document indices do not run from 0 to the number of sequences"
    for start in range(0, len(indices) - 1, CHUNK):
        if (np.diff(indices[start : start + CHUNK + 1]) < 0).any():
            yield "the document indices fall"
            break
    if manifest is not None:
        vocab_size = manifest["vocab_size"]
        for start in range(0, len(dataset.tokens), CHUNK):
            part = dataset.tokens[start : start + CHUNK]
            if int(part.max()) >= vocab_size or int(part.min()) < 0:
                where = start + int(np.argmax((part >= vocab_size) | (part < 0)))
                yield f"token {where} is {int(dataset.tokens[where])}; the vocabulary has {vocab_size}"
                break
        yield from _against_manifest(dataset, manifest, check_hashes)


def _against_manifest(dataset: IndexedDataset, manifest: dict[str, Any], check_hashes: bool) -> Iterator[str]:
    index = dataset.index
    written = int(np.count_nonzero(np.diff(index.document_indices)))
    found = {
        "documents_written": written,
        "documents_empty": len(dataset) - written,
        "tokens": len(dataset.tokens),
    }
    for key, value in found.items():
        if manifest.get(key) != value:
            yield f"{key} is {value:,}; the manifest says {manifest.get(key)}"
    if manifest.get("eod") is not None and len(index):
        ends = index.pointers // index.dtype.itemsize + index.lengths - 1
        last = dataset.tokens[np.minimum(ends, len(dataset.tokens) - 1)]
        if (last != manifest["eod"]).any():
            yield f"document {int(np.argmax(last != manifest['eod']))} of those with tokens does not end with EOD"
    for suffix, path in ((".bin", dataset.bin_path), (".idx", dataset.idx_path)):
        expected = manifest.get("sha256", {}).get(suffix)
        if check_hashes and expected and sha256_file(path) != expected:
            yield f"{path.name} is not the file that was written: its sha256 differs from the manifest's"
