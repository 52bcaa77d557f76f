"""Interface of tensors on disk: names, dtypes, shapes, and reads of any rectangle.

Implementations: rank_files.py (checkpoints), hf_folder.py (safetensors files of other programs) and lora_adapter.py
(base model plus LoRA adapter). Nothing is unpickled, and ``check_file_name`` checks each file name read from a file.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

import torch

from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import HOST
from megatron_llama.system import files
from megatron_llama.system.object_store import Location
from megatron_llama.system.wrapping import escape_controls

# dtype names of safetensors
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
WEIGHT_DTYPES = {name: DTYPES[name] for name in ("F32", "BF16", "F16", "F64")}
"""Dtypes of weights and moments by their names in safetensors files."""
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of exported weights, by name."""
MOST_DIMENSIONS = 8
"""Tensors of more dimensions are rejected: a chunk has 2^dimensions corners."""
MOST_PAIRS = 100_000
"""Pairs of chunks that are compared to name one that holds values twice."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


class CorruptFile(Exception):
    """A file is truncated, invalid, modified or unreadable; the message names it."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())  # it may have names of the file


@dataclass(frozen=True)
class Rectangles:
    """Rectangles of a tensor on this rank, to save or to fill."""

    shape: Shape
    """Shape of the whole tensor."""
    parts: list[tuple[Shape, torch.Tensor]]
    """(offset in the whole tensor, local tensor); all have one dtype and device."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Stored(ABC):
    """Tensors on disk, by name. Subclasses: CheckpointTensors, SafetensorsFiles, MergedTensors, AveragedTensors."""

    folder: Location
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        """Fill rectangles of the named tensors, converted to the targets' dtype.

        Reads only the bytes of the rectangles. Calls no collective. Raises CorruptFile.
        """

    def read(
        self, name: str, offset: Shape, size: Shape, dtype: torch.dtype | None = None, device: torch.device | str = HOST
    ) -> torch.Tensor:
        """Read one rectangle of a tensor; default dtype: the stored one. Raises CorruptFile."""
        tensor = self.tensors[name]
        values = torch.empty(size, dtype=dtype or tensor.dtype, device=device)
        self.load_into({name: Rectangles(tensor.shape, [(offset, values)])})
        return values

    def rows(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Read rows [first, last) of a tensor; default: all. Raises CorruptFile."""
        rows, *columns = self.tensors[name].shape
        last = rows if last is None else last
        return self.read(name, (first, *(0 for _ in columns)), (last - first, *columns))


@dataclass(frozen=True)
class AveragedTensors(Stored):
    """Weighted mean of the tensors of several checkpoints, summed in fp64 and rounded once to the target's dtype."""

    sources: Sequence[Stored]
    weights: Sequence[float]
    """Relative weights of the sources."""

    @staticmethod
    def of(newest: Stored, older: Sequence[Stored], decay: float) -> AveragedTensors:
        """Average checkpoints of a run, each with ``decay`` times the weight of the next newer one."""
        tensors = {name: StoredTensor(torch.float32, tensor.shape) for name, tensor in newest.tensors.items()}
        weights = [decay**age for age in range(len(older) + 1)]
        return AveragedTensors(newest.folder, tensors, [newest, *older], weights)

    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        for name, rectangles in targets.items():
            for offset, target in rectangles.parts:
                total = torch.zeros(target.shape, dtype=torch.float64)
                for source, weight in zip(self.sources, self.weights, strict=True):
                    total.add_(source.read(name, offset, tuple(target.shape), torch.float32), alpha=weight)
                target.copy_(total.div_(sum(self.weights)))


def check_finite(
    where: Location | str, name: str, values: torch.Tensor, offset: Shape, *, negative: bool = True
) -> None:
    """Raise CorruptFile if ``values``, a rectangle of a tensor at ``offset``, has NaN, Inf or a rejected sign.

    A single non-finite weight makes every loss NaN.

    Args:
        negative: Whether negative values are valid; they are not in Adam's averages of squares.
    """
    if not values.is_floating_point() or not values.numel():
        return
    ends = torch.stack(torch.aminmax(values))  # NaN if any value is NaN
    if ends.isfinite().all() and (negative or ends[0] >= 0):
        return
    invalid = ~values.isfinite() if negative else ~values.isfinite() | (values < 0)
    wrong = invalid.nonzero()
    place = [int(o + n) for o, n in zip(offset, wrong[0], strict=True)]
    value = values[tuple(wrong[0])].item()
    kind = "non-finite" if negative else "invalid"
    others = f" and {len(wrong) - 1:,} more {kind} values" if len(wrong) > 1 else ""
    raise CorruptFile(f"{where}: {name} has {value} at {place}{others}")


def cast_weights(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights in another dtype. Raises ConfigError if a finite value becomes infinite in it."""
    cast = values.to(dtype)
    if not cast.isfinite().all():
        most, limit = values.abs().max().item(), torch.finfo(dtype).max
        others = ", ".join(word for word, other in EXPORT_DTYPES.items() if torch.finfo(other).max >= most)
        rule = f"{name} has the magnitude {most:g}, and the largest value of this dtype is {limit:g}"
        raise ConfigError([Problem("--dtype", str(dtype).removeprefix("torch."), rule, f"write one of: {others}")])
    return cast


def overlap(offset: Shape, size: Shape, other_offset: Shape, other_size: Shape) -> tuple[Shape, Shape] | None:
    """Return the beginning and the end of the overlap of two rectangles of a tensor; None without one."""
    low = tuple(map(max, offset, other_offset))
    high = tuple(min(o + n, p + m) for o, n, p, m in zip(offset, size, other_offset, other_size, strict=True))
    return (low, high) if all(first < end for first, end in zip(low, high, strict=True)) else None


def check_cover(name: str, shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CorruptFile unless the chunks of a tensor, (offset, size), cover each of its values exactly once.

    Takes linear time in the number of chunks.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise CorruptFile(f"{name} has {len(shape)} dimensions, more than {MOST_DIMENSIONS}")
    for offset, size in chunks:
        inside = len(offset) == len(size) == len(shape)
        if not inside or any(o < 0 or n < 0 or o + n > m for o, n, m in zip(offset, size, shape, strict=True)):
            raise CorruptFile(f"a chunk of {name} at {list(offset)} exceeds the tensor")
    held, values = sum(math.prod(size) for _, size in chunks), math.prod(shape)
    # If each corner of the tensor and the chunks occurs an even number of times, the chunks contain each value an odd
    # number of times: at least once, and by their total size exactly once.
    boxes = [[(0, n) for n in shape], *([(o, o + n) for o, n in zip(*chunk, strict=True)] for chunk in chunks)]
    corners = Counter(corner for box in boxes for corner in product(*box))
    if held == values and all(count % 2 == 0 for count in corners.values()):
        return
    filled = sorted((offset, size) for offset, size in chunks if math.prod(size))
    for first, second in islice(combinations(filled, 2), MOST_PAIRS):
        if overlap(*first, *second) is not None:
            raise CorruptFile(f"has values of {name} at {list(second[0])} twice")
    raise CorruptFile(f"has {held} of {values} values of {name}" + ", some twice" * (held >= values))


def check_file_name(name: Any) -> str:
    """Return ``name`` if it is a plain file name. Raises CorruptFile for paths and other values."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CorruptFile(f"has the invalid file name {name!r}")
    return name


def parse_shape(values: Any) -> Shape:
    """Return ``values`` as a shape. Raises CorruptFile unless all are integers of at least 0."""
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise CorruptFile(f"has {values!r} instead of a shape")
    return tuple(values)


def read_json(path: Location) -> Any:
    """Read a JSON file. Raises CorruptFile."""
    try:
        return files.read_json(path)
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CorruptFile(f"{path}: not JSON ({error})") from error


def safetensors_header(entries: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file with these tensors in order, and the first byte of each tensor.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers rejects files without it
    starts, position = {}, 0
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * dtype.itemsize
        head[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        starts[name] = position
        position += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
