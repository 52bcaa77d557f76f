"""Megatron's indexed dataset on disk: the .idx writer, a reader, and the integrity check.

.bin: the tokens of all sequences back to back. .idx: 9 bytes `MMIDIDX` and two zeros; u64 version 1; u8 dtype code;
u64 N sequences; u64 M document indices; N int32 lengths; N int64 byte pointers; M int64 document indices from 0:
34 + 12 N + 8 M bytes, little-endian. An empty document repeats its index and writes no sequence. Both files are what
megatron-core's own writer makes (tests/data_prep holds it down byte by byte), without its loop in Python.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

import numpy as np

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
# megatron-core's own border: above it a token does not fit two bytes with room to spare
UINT16_MAX_VOCABULARY = 65500
CHUNK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of a token on disk: uint16 below 65,500 pieces, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_MAX_VOCABULARY else np.dtype("<i4")


def dtype_code(dtype: np.dtype) -> int:
    """Megatron's number for a token type."""
    return next(code for code, kind in CODES.items() if np.dtype(kind) == dtype)


def write_index(file: IO[bytes], lengths_path: Path, dtype: np.dtype) -> tuple[int, int]:
    """Writes an .idx from a file of int32 lengths, one per document, 0 for an empty one.

    Memory does not grow with the number of documents: every section is one pass over the lengths.

    Returns:
        (sequences, tokens).
    """
    size = lengths_path.stat().st_size
    lengths = np.memmap(lengths_path, dtype="<i4", mode="r") if size else np.zeros(0, dtype="<i4")
    chunks = [slice(start, start + CHUNK) for start in range(0, len(lengths), CHUNK)]
    sequences = sum(int(np.count_nonzero(lengths[chunk])) for chunk in chunks)
    file.write(HEADER.pack(MAGIC, 1, dtype_code(dtype), sequences, len(lengths) + 1))
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
