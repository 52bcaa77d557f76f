"""Folders of torch.distributed.checkpoint (DCP): ``.metadata``, and tensors in ``__RANK_NUMBER.distcp`` files.

DCP's own reader unpickles ``.metadata`` without restriction. This reader loads only DCP's classes, then reads single
chunks by ``torch.load(weights_only=True)``. Source of the layout: torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron_llama.arch.checkpoint_formats import METADATA
from megatron_llama.arch.names import Shape
from megatron_llama.checkpoint.foreign.tensors import SourceChunk, SourceTensor
from megatron_llama.checkpoint.foreign.unpickle import load_metadata, load_pickle
from megatron_llama.checkpoint.stored_tensors import CorruptFile, check_file_name
from megatron_llama.system.files import open_regular


@dataclass(frozen=True)
class _Place:
    """Bytes of a chunk or object."""

    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class DcpFolder:
    """Content of a DCP folder."""

    folder: Path
    tensors: Mapping[str, SourceTensor]
    objects: Mapping[str, _Place]
    """Pickled values, by name."""

    def value(self, name: str, *, namespace: bool = False) -> Any:
        """Return a pickled value or a small tensor; None if the name is missing. Raises CorruptFile.

        ``namespace``: as ``load_pickle``.
        """
        if name in self.objects:
            place = self.objects[name]
            return load_pickle(_read(place), place.file, namespace=namespace)
        if name in self.tensors and len(self.tensors[name].chunks) == 1:
            return self.tensors[name].chunks[0].load()
        return None

    def number(self, *names: str) -> float | None:
        """Return the first of the values that is a number."""
        for name in names:
            value = self.value(name)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                return value
        return None


def open_dcp(folder: Path) -> DcpFolder:
    """Read the metadata of a DCP folder, and check that all bytes exist.

    Raises:
        CorruptFile: The metadata is damaged or malicious, or files are missing or truncated.
    """
    path = folder / METADATA
    metadata = load_metadata(path)
    places, sizes = dict[Any, _Place](), dict[Path, int]()
    try:
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise CorruptFile(f"{path}: {index.fqn} is compressed; save without extensions")
            place = _Place(folder / check_file_name(info.relative_path), int(info.offset), int(info.length))
            offset = None if index.offset is None else tuple(map(int, index.offset))
            places[index.fqn, offset] = place
            sizes[place.file] = max(sizes.get(place.file, 0), place.start + place.length)
        tensors, objects = dict[str, SourceTensor](), dict[str, _Place]()
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                tensors[name] = _tensor(folder, name, entry, places)
            elif isinstance(entry, BytesStorageMetadata) and (name, None) in places:
                objects[name] = places[name, None]
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CorruptFile(f"{path}: a value is missing or has the wrong type ({error!r})"[:300]) from error
    for file, size in sizes.items():
        if not file.is_file():
            raise CorruptFile(f"{file}: is missing")
        if file.stat().st_size < size:
            raise CorruptFile(f"{file}: has {file.stat().st_size} of {size} bytes")
    return DcpFolder(folder, tensors, objects)


def _tensor(folder: Path, name: str, entry: TensorStorageMetadata, places: Mapping[Any, _Place]) -> SourceTensor:
    dtype, shape, chunks = entry.properties.dtype, tuple(map(int, entry.size)), []
    for chunk in entry.chunks:
        offset, size = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        place = places.get((name, offset)) or places.get((name, None))
        if place is None:
            raise CorruptFile(f"{folder / METADATA}: has no file for {name} at {list(offset)}")
        inside = all(o >= 0 and n >= 0 and o + n <= m for o, n, m in zip(offset, size, shape, strict=True))
        if not inside or place.start < 0 or place.length < 0:
            raise CorruptFile(f"{folder / METADATA}: a chunk of {name} exceeds the tensor")
        chunks.append(SourceChunk(offset, size, place.file, partial(_load, place, name, dtype, size)))
    return SourceTensor(dtype, shape, chunks)


def _load(place: _Place, name: str, dtype: torch.dtype, size: Shape) -> torch.Tensor:
    """Return the values of a chunk."""
    values = load_pickle(_read(place), place.file)
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != size or values.dtype != dtype:
        actual = f"{values.dtype} of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else "no tensor"
        raise CorruptFile(f"{place.file}: {name} is {actual}; the metadata states {dtype} of shape {list(size)}")
    return values


def _read(place: _Place) -> bytes:
    try:
        with open_regular(place.file) as file:
            file.seek(place.start)
            content = file.read(place.length)
    except OSError as error:
        raise CorruptFile(f"{place.file}: {error.strerror}") from error
    if len(content) < place.length:
        raise CorruptFile(f"{place.file}: is truncated at byte {place.start + len(content)}")
    return content
