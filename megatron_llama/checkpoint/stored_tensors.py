"""Tensors on disk, whoever wrote them: their names, dtypes and shapes, and how any rectangle of them is read.

storage.py has those of our checkpoints, hf_folder.py those in other programs' safetensors files, adapter.py the sum
that LoRA makes of two. Nothing is unpickled, and ``check_file_name`` checks each file name that comes from a file.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.names import Shape
from megatron_llama.devices import HOST
from megatron_llama.system import files

# safetensors' names of the dtypes that we read or write
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
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


class CorruptFile(Exception):
    """A file is truncated, invalid, changed since it was written, or can't be read; the message names it."""


@dataclass(frozen=True)
class Rectangles:
    """A tensor of which this rank holds some rectangles, to be saved or filled."""

    shape: Shape
    """Of the whole tensor."""
    parts: list[tuple[Shape, torch.Tensor]]
    """(offset in the whole tensor, local tensor), all of one dtype and on one device."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Stored(ABC):
    """Tensors on disk, by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def load_into(self, wanted: Mapping[str, Rectangles]) -> int:
        """Fills rectangles of the named tensors, converting to their dtype; returns the bytes read from files.

        Reads no more than the rectangles need, and takes part in no collective. Raises CorruptFile.
        """

    def read(
        self,
        name: str,
        offset: Shape,
        size: Shape,
        dtype: torch.dtype | None = None,
        device: torch.device | str = HOST,
    ) -> torch.Tensor:
        """One rectangle of a tensor, in its stored dtype unless another is given. Raises CorruptFile."""
        tensor = self.tensors[name]
        values = torch.empty(size, dtype=dtype or tensor.dtype, device=device)
        self.load_into({name: Rectangles(tensor.shape, [(offset, values)])})
        return values

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows [first, last) of a tensor, all of them by default. Raises CorruptFile."""
        rows, *columns = self.tensors[name].shape
        last = rows if last is None else last
        return self.read(name, (first, *(0 for _ in columns)), (last - first, *columns))


def check_finite(where: Path | str, name: str, values: torch.Tensor, offset: Shape) -> None:
    """Raises CorruptFile where some of a weight's values, a rectangle at ``offset``, are infinite or no number.

    One such weight makes every loss NaN, at a step that names no file. Costs one pass over the values.
    """
    if not values.is_floating_point() or not values.numel():
        return
    ends = torch.stack(torch.aminmax(values))  # NaN if any value is
    if ends.isfinite().all():
        return
    wrong = (~values.isfinite()).nonzero()
    place = [int(o + n) for o, n in zip(offset, wrong[0], strict=True)]
    found = values[tuple(wrong[0])].item()
    others = f", and {len(wrong) - 1:,} more values are not finite" if len(wrong) > 1 else ""
    raise CorruptFile(f"{where}: {name} holds {found} at {place}{others}: no model has such weights")


def check_file_name(name: Any) -> str:
    """``name`` if it is the plain name of a file; raises CorruptFile for anything that could lead out of its folder."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CorruptFile(f"names a file {name!r}, which is no plain file name")
    return name


def parse_shape(values: Any) -> Shape:
    """``values`` as a shape. Raises CorruptFile unless they are integers of at least 0."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise CorruptFile(f"has {values!r} instead of sizes")
    return tuple(values)


def read_json(path: Path) -> Any:
    """The file's content. Raises CorruptFile."""
    try:
        return files.read_json(path)
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CorruptFile(f"{path}: is not JSON ({error})") from error


def safetensors_header(entries: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file with these tensors in this order, and the byte of the file where each starts.

    The format: https://huggingface.co/docs/safetensors/index#format
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
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
