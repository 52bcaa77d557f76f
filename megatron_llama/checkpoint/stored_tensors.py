"""What stands on disk: which tensors, in which files, at which bytes; the same for our checkpoints and Hugging Face's
folders.

Nothing here is unpickled, and a name from a file is never used as a path before ``plain_name`` has looked at it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
# safetensors' names of the dtypes we write or read
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class CorruptFile(Exception):
    """What stands on disk is not what was written, or can't be read; the message names the file."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor as it lies in a file: row by row, without gaps."""

    file: str
    """Name of the file, in the folder."""
    start: int
    """Its first byte there."""
    offset: Shape
    """Where the rectangle starts in the tensor."""
    size: Shape
    """Extent of the rectangle."""
    hashes: tuple[str, ...] = ()
    """One per block of rows, see ``block_rows``; none for files that others wrote."""


@dataclass
class StoredTensor:
    """A tensor on disk."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Stored:
    """Everything in a folder."""

    folder: Path
    tensors: dict[str, StoredTensor]
    block_bytes: int = 4 << 20
    """A block is as many whole rows of a chunk as fit in this many bytes, at least one."""


def block_rows(size: Shape, itemsize: int, block_bytes: int) -> int:
    """Rows of a chunk that are hashed together."""
    return max(1, block_bytes // max(1, math.prod(size[1:]) * itemsize))


def plain_name(name: Any) -> str:
    """``name`` if it names a file in the folder itself; raises CorruptFile for anything that could lead elsewhere."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CorruptFile(f"names a file {name!r}, which is no plain file name")
    return name


def whole_numbers(values: Any) -> Shape:
    """``values`` as a shape; raises CorruptFile unless they are integers of at least 0."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise CorruptFile(f"has {values!r} where sizes should stand")
    return tuple(values)


def read_json(path: Path) -> Any:
    """The file's content; raises CorruptFile where it can't be read."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: is no JSON ({error})") from error


def safetensors_header(
    entries: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file with these tensors in this order, and the byte of the file where each starts."""
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, position = {}, 0
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        starts[name] = position
        position += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + start for name, start in starts.items()}


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, each one chunk; raises CorruptFile for a truncated or invalid file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CorruptFile(f"{path}: is no whole safetensors file")
            head = json.loads(file.read(length))
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: its header is no JSON ({error})") from error
    if not isinstance(head, dict):
        raise CorruptFile(f"{path}: its header is no JSON object")
    head.pop("__metadata__", None)
    try:
        return {name: _stored(path, entry, 8 + length, size) for name, entry in head.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path}: its header lacks something ({error})") from error
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {error}") from error


def _stored(path: Path, entry: dict[str, Any], data: int, file_size: int) -> StoredTensor:
    """One entry of a header, checked against the file's size."""
    shape, (start, stop) = whole_numbers(entry["shape"]), whole_numbers(entry["data_offsets"])
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CorruptFile(f"holds values of type {entry['dtype']}, which no Llama has")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise CorruptFile(f"{start}..{stop} is not the size of {list(shape)} values of {entry['dtype']}")
    if data + stop > file_size:
        raise CorruptFile(f"ends after {file_size} bytes, and its header promises {data + stop}")
    return StoredTensor(dtype, shape, [Chunk(path.name, data + start, (0,) * len(shape), shape)])
