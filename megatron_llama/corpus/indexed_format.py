"""Reader and writer of Megatron's indexed datasets, without torch.

PREFIX.bin contains the tokens of all sequences. PREFIX.idx has 34 + 12 N + 8 M bytes, little-endian:

    9 bytes      ``MMIDIDX`` and two zeros
    u64, u8      version 1, dtype code
    u64, u64     N sequences, M document indices
    N int32      lengths in tokens
    N int64      byte offsets into the .bin (pointers)
    M int64      document indices: the first sequence of each document

Both may be in an object store: the .idx is then mirrored, and the .bin is read through a cache (store_cache.py).

An empty document repeats its index and has no sequence. Both files are identical to the output of megatron-core's
IndexedDatasetBuilder (tests/data_prep/test_inputs.py).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_llama.corpus.store_cache import CachedObject, CachedTokens
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import file_size, mirror, open_regular, read_json
from megatron_llama.system.object_store import RemotePath, is_url, location, missing_package

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
"""Dtypes by their code in an .idx, megatron-core's ``DType``."""
UINT16_MAX_VOCABULARY = 65500
"""megatron-core's bound (``DType.optimal_dtype``), not 65,536."""
MASK_DTYPE = "uint8"
"""Dtype of a fine-tuning dataset's loss masks: 1 for tokens with loss."""
CHUNK = 1 << 20
"""Sequences per chunk in the writer and the checks."""
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True)
class Index:
    """An .idx file, memory-mapped."""

    dtype: np.dtype
    """Dtype of the tokens in the .bin."""
    lengths: np.ndarray
    """Tokens of each sequence, int32 [sequences]."""
    pointers: np.ndarray
    """Byte offsets into the .bin, int64 [sequences]."""
    document_indices: np.ndarray
    """First sequence of each document, int64 [documents + 1]."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """Return the tokens of sequences ``first`` to ``last`` (exclusive), computed from two pointers."""
        last = len(self) if last is None else last
        if first >= last:
            return 0
        end = int(self.pointers[last - 1]) + int(self.lengths[last - 1]) * self.dtype.itemsize
        return (end - int(self.pointers[first])) // self.dtype.itemsize


def read_index(prefix: str) -> Index:
    """Open PREFIX.idx; PREFIX.bin may be missing.

    Raises:
        OSError: The file cannot be read.
        UserError: The file is not a Megatron index, or its size does not match its header.
    """
    path = local_file(prefix + ".idx")
    with open_regular(path) as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path} is not a Megatron index file: it does not start with {MAGIC!r}")
    _, version, code, sequences, indices = HEADER.unpack(header)
    if version != VERSION or code not in DTYPES:
        raise UserError(f"{path} has version {version} and dtype code {code}, which are unknown")
    size, expected = path.stat().st_size, HEADER.size + 12 * sequences + 8 * indices
    if size != expected:
        raise UserError(f"{path} has {size:,} bytes, but its header gives {expected:,}")

    content = np.memmap(path, np.uint8, "r")  # one map for all sections: each map keeps a file descriptor

    def section(dtype: str, count: int, offset: int) -> np.ndarray:
        return content[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    return Index(
        dtype=np.dtype(DTYPES[code]),
        lengths=section("<i4", sequences, HEADER.size),
        pointers=section("<i8", sequences, HEADER.size + 4 * sequences),
        document_indices=section("<i8", indices, HEADER.size + 12 * sequences),
    )


def local_file(path: str) -> Path:
    """Return a path, or the local copy of an object. Raises OSError, or UserError if its store cannot be used."""
    return _mirrored(path) if is_url(path) else Path(path)


@cache
def _mirrored(url: str) -> Path:
    """Return the local copy of an object; it is the same one until this process ends."""
    remote = RemotePath(url)
    if reason := missing_package(url):
        raise UserError(f"{url} {reason[0]}: {reason[1]}")
    return mirror(remote)


class IndexedDataset:
    """PREFIX.bin and PREFIX.idx, memory-mapped; of a store, the .bin is read by blocks."""

    def __init__(self, prefix: str) -> None:
        """``prefix`` with or without .bin or .idx.

        Raises:
            OSError: A file cannot be read.
            UserError: A file is missing, or the index is invalid.
        """
        self.prefix = prefix.removesuffix(".bin").removesuffix(".idx")
        self.bin_path, self.idx_path = location(self.prefix + ".bin"), local_file(self.prefix + ".idx")
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise UserError(f"there is no {path}")
        self.index = read_index(self.prefix)
        dtype = self.index.dtype
        content = CachedObject(self.bin_path) if isinstance(self.bin_path, RemotePath) else None
        self.version = RemotePath(self.prefix + ".idx").facts().version if content is not None else None
        """Version of the index's object; None of a local file."""
        self.bin_size = file_size(self.bin_path) if content is None else content.facts.size
        """Bytes of the .bin."""
        if self.bin_size % dtype.itemsize:
            rule = f"has {self.bin_size:,} bytes, not a multiple of {dtype.itemsize} bytes per token"
            raise UserError(f"{self.bin_path} {rule}")
        self.tokens: Any = np.zeros(0, dtype)
        """All tokens, [tokens] of ``index.dtype``: an array, or CachedTokens of a store."""
        if content is not None:
            self.tokens = CachedTokens(content, dtype)
        elif self.bin_size:
            self.tokens = np.memmap(str(self.bin_path), dtype, "r")

    def __len__(self) -> int:
        """Return the number of documents, empty ones included."""
        return max(0, len(self.index.document_indices) - 1)

    def sequence(self, number: int) -> np.ndarray:
        """Return the tokens of a sequence, a view of the mapped file."""
        start = int(self.index.pointers[number]) // self.index.dtype.itemsize
        return self.tokens[start : start + int(self.index.lengths[number])]

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of all sequences of a document.

        Raises:
            UserError: There is no such document.
        """
        if not 0 <= number < len(self):
            raise UserError(f"there is no document {number}; there are {len(self):,}, counted from 0")
        first, last = (int(index) for index in self.index.document_indices[number : number + 2])
        if first == last:
            return self.tokens[:0]
        start = int(self.index.pointers[first]) // self.index.dtype.itemsize
        return self.tokens[start : start + self.index.tokens(first, last)]


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of tokens on disk: uint16 for vocabularies below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_MAX_VOCABULARY else np.dtype("<i4")


def write_index(file: IO[bytes], lengths_path: Path, dtype: np.dtype) -> tuple[int, int]:
    """Write an .idx from a file of int32 lengths, one per document, 0 for an empty one.

    Memory does not grow with the number of documents: the lengths are read in chunks for each section.

    Returns:
        (sequences, tokens).
    """
    size = lengths_path.stat().st_size
    lengths = np.memmap(lengths_path, dtype="<i4", mode="r") if size else np.zeros(0, dtype="<i4")
    chunks = [slice(start, start + CHUNK) for start in range(0, len(lengths), CHUNK)]
    sequences = sum(int(np.count_nonzero(lengths[chunk])) for chunk in chunks)
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, sequences, len(lengths) + 1))
    for chunk in chunks:
        part = lengths[chunk]
        file.write(part[part != 0].tobytes())
    end = 0
    for chunk in chunks:
        part = lengths[chunk]
        sizes = part[part != 0].astype("<i8") * dtype.itemsize
        file.write((np.cumsum(sizes) - sizes + end).astype("<i8").tobytes())
        end += int(sizes.sum())
    count = 0
    file.write(struct.pack("<q", 0))
    for chunk in chunks:
        indices = np.cumsum(lengths[chunk] != 0, dtype="<i8") + count
        file.write(indices.tobytes())
        count = int(indices[-1])
    return sequences, end // dtype.itemsize


def dataset_facts(prefix: str) -> dict[str, Any]:
    """Return properties that identify a dataset regardless of its path. Reads headers, the manifest and 3 MiB.

    Raises OSError or ValueError.
    """
    dataset = IndexedDataset(prefix)
    size, sampled = dataset.bin_size, _SAMPLED_BYTES // dataset.index.dtype.itemsize
    with dataset.idx_path.open("rb") as file:
        digest = hashlib.sha256(file.read(_SAMPLED_BYTES))
    for start in (0, max(0, len(dataset.tokens) - sampled)):
        digest.update(dataset.tokens[start : start + sampled].tobytes())
    manifest = location(prefix + ".json")  # missing if another program made the dataset
    described = read_json(manifest) if manifest.is_file() else {}
    return {
        "sequences": len(dataset.index),
        "tokens": dataset.index.tokens(),
        "bin_bytes": size,
        "fingerprint": digest.hexdigest(),
        "tokenizer_sha256": described.get("tokenizer_sha256"),
    }


def same_dataset(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two results of ``dataset_facts`` agree in all keys that both have, except the tokenizer's hash."""
    return all(saved[key] == now[key] for key in saved.keys() & now.keys() if key != "tokenizer_sha256")
