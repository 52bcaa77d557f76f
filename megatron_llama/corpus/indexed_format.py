"""Megatron's indexed dataset on disk: a reader and a writer without torch.

PREFIX.bin holds the tokens of all sequences back to back. PREFIX.idx is, little-endian: 9 bytes ``MMIDIDX`` and two
zeros; u64 version 1; u8 dtype code; u64 N sequences; u64 M document indices; N int32 lengths in tokens; N int64 byte
offsets into the .bin (pointers); M int64 document indices, the number of a document's first sequence: 34 + 12 N + 8 M
bytes. An empty document repeats its index and has no sequence. Both files are byte for byte what megatron-core's
IndexedDatasetBuilder writes (tests/data_prep/test_format.py), without its Python loop over sequences.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_llama.system.errors import UserError
from megatron_llama.system.files import open_regular, read_json

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
"""By their codes in an .idx, megatron-core's ``DType``."""
UINT16_MAX_VOCABULARY = 65500
"""megatron-core's bound (``DType.optimal_dtype``), not 65,536."""
MASK_DTYPE = "uint8"
"""Of a fine-tuning set's loss masks: 1 where a token has loss."""
CHUNK = 1 << 20
"""Sequences that the writer and the checks hold in memory at a time."""
_SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True)
class Index:
    """An .idx file, memory-mapped."""

    dtype: np.dtype
    """Of the tokens in the .bin."""
    lengths: np.ndarray
    """int32 [sequences], tokens."""
    pointers: np.ndarray
    """int64 [sequences], byte offsets into the .bin."""
    document_indices: np.ndarray
    """int64 [documents + 1], each document's first sequence."""

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """Tokens of sequences ``first`` to ``last`` (exclusive), from two pointers rather than a sum of lengths."""
        last = len(self) if last is None else last
        if first >= last:
            return 0
        end = int(self.pointers[last - 1]) + int(self.lengths[last - 1]) * self.dtype.itemsize
        return (end - int(self.pointers[first])) // self.dtype.itemsize


def read_index(prefix: str) -> Index:
    """Opens PREFIX.idx; PREFIX.bin need not be there.

    Raises:
        OSError: it can't be read.
        UserError: it is no Megatron index, or its size differs from what its header gives.
    """
    path = Path(prefix + ".idx")
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

    def section(dtype: str, count: int, offset: int) -> np.ndarray:
        if not count:  # nothing can't be mapped
            return np.zeros(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    return Index(
        dtype=np.dtype(DTYPES[code]),
        lengths=section("<i4", sequences, HEADER.size),
        pointers=section("<i8", sequences, HEADER.size + 4 * sequences),
        document_indices=section("<i8", indices, HEADER.size + 12 * sequences),
    )


class IndexedDataset:
    """PREFIX.bin and PREFIX.idx, memory-mapped."""

    def __init__(self, prefix: str) -> None:
        """``prefix`` with or without .bin or .idx.

        Raises:
            OSError: a file can't be read.
            UserError: a file is missing, or the index is no index or has the wrong size.
        """
        self.prefix = prefix.removesuffix(".bin").removesuffix(".idx")
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise UserError(f"there is no {path}")
        self.index = read_index(self.prefix)
        dtype = self.index.dtype
        size = self.bin_path.stat().st_size
        if size % dtype.itemsize:
            raise UserError(f"{self.bin_path} has {size:,} bytes, which are no whole tokens of {dtype.itemsize} bytes")
        has_tokens = size > 0
        self.tokens: np.ndarray = np.memmap(self.bin_path, dtype, "r") if has_tokens else np.zeros(0, dtype)
        """All tokens, [tokens] of ``index.dtype``."""

    def __len__(self) -> int:
        """Documents, empty ones included."""
        return max(0, len(self.index.document_indices) - 1)

    def sequence(self, number: int) -> np.ndarray:
        """The tokens of a sequence, a view of the mapped file."""
        start = int(self.index.pointers[number]) // self.index.dtype.itemsize
        return self.tokens[start : start + int(self.index.lengths[number])]

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document, that is of all its sequences.

        Raises:
            UserError: there is no such document.
        """
        if not 0 <= number < len(self):
            raise UserError(f"there is no document {number}; there are {len(self):,}, counted from 0")
        first, last = (int(index) for index in self.index.document_indices[number : number + 2])
        if first == last:
            return self.tokens[:0]
        start = int(self.index.pointers[first]) // self.index.dtype.itemsize
        return self.tokens[start : start + self.index.tokens(first, last)]


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of tokens on disk: uint16 for vocabularies below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_MAX_VOCABULARY else np.dtype("<i4")


def write_index(file: IO[bytes], lengths_path: Path, dtype: np.dtype) -> tuple[int, int]:
    """Writes an .idx from a file of int32 lengths, one per document, 0 for an empty one.

    Memory does not grow with the number of documents: each section is one pass over the lengths.

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
    """By what a dataset is known wherever it lies; reads its headers, a manifest and 3 MiB. Raises OSError or
    ValueError."""
    dataset = IndexedDataset(prefix)
    size = dataset.bin_path.stat().st_size
    digest = hashlib.sha256()
    for path, starts in ((dataset.idx_path, (0,)), (dataset.bin_path, (0, max(0, size - _SAMPLED_BYTES)))):
        with path.open("rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(_SAMPLED_BYTES))
    manifest = Path(prefix + ".json")  # a dataset of another program has none
    described = read_json(manifest) if manifest.exists() else {}
    return {
        "sequences": len(dataset.index),
        "tokens": dataset.index.tokens(),
        "bin_bytes": size,
        "fingerprint": digest.hexdigest(),
        "tokenizer_sha256": described.get("tokenizer_sha256"),
    }


def same_dataset(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two datasets have the same content, by the facts that both records have."""
    return all(saved[key] == now[key] for key in saved.keys() & now.keys() if key != "tokenizer_sha256")
