"""Folders of torch.distributed.checkpoint (DCP): ``.metadata``, and tensors in ``__RANK_NUMBER.distcp`` files.

DCP's own reader unpickles ``.metadata`` without restriction. This reader loads no class, then reads single chunks by
``torch.load(weights_only=True)``. Source of the layout: torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.arch.recognize_format import METADATA
from megatron_llama.checkpoint.foreign.tensors import SourceChunk, SourceTensor
from megatron_llama.checkpoint.foreign.unpickle import check_stored, load_metadata, load_pickle
from megatron_llama.checkpoint.tensor_source import CorruptFile, check_cover, check_file_name
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
        if name in self.tensors and math.prod(self.tensors[name].shape) == 1:
            return self.tensors[name].chunks[0].load()
        return None


def open_dcp(folder: Path) -> DcpFolder:
    """Read the metadata of a DCP folder, and check that all bytes exist.

    Raises:
        CorruptFile: The metadata is damaged or malicious, or files are missing or truncated.
    """
    path = folder / METADATA
    metadata = load_metadata(path)
    places = dict[Any, _Place]()
    try:
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise CorruptFile(f"{index.fqn} is compressed; save without extensions")
            place = _Place(folder / check_file_name(info.relative_path), int(info.offset), int(info.length))
            offset = getattr(index, "offset", None)  # a class attribute if it is None
            offset = None if offset is None else tuple(map(int, offset))
            places[index.fqn, offset] = place
        tensors, objects, used = dict[str, SourceTensor](), dict[str, _Place](), list[_Place]()
        for name, entry in metadata.state_dict_metadata.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(str(name), entry, places, used)
            elif (name, None) in places:
                objects[str(name)] = places[name, None]
                used.append(places[name, None])
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptFile(f"{path}: a value is missing or has the wrong type ({error!r})"[:300]) from error
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {error}") from error
    _check_places(path, used)
    return DcpFolder(folder, tensors, objects)


def _tensor(name: str, entry: Any, places: Mapping[Any, _Place], used: list[_Place]) -> SourceTensor:
    """Return a tensor of the metadata. Appends the places of its chunks to ``used``."""
    properties = entry.properties.state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has no dtype")
    shape, chunks = tuple(map(int, entry.size)), []
    for chunk in entry.chunks:
        offset, size = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        place = places.get((name, offset)) or places.get((name, None))
        if place is None:
            raise CorruptFile(f"has no file for {name} at {list(offset)}")
        used.append(place)
        chunks.append(SourceChunk(offset, size, place.file, partial(_load, place, name, dtype, size)))
    check_cover(name, shape, [(chunk.offset, chunk.size) for chunk in chunks])
    return SourceTensor(dtype, shape, chunks)


def _check_places(path: Path, places: list[_Place]) -> None:
    """Raise CorruptFile if bytes are missing, or are used twice."""
    sizes = dict[Path, int]()
    places = sorted(places, key=lambda place: (str(place.file), place.start))
    for before, place in zip([None, *places], places, strict=False):
        if place.file not in sizes:
            if not place.file.is_file():
                raise CorruptFile(f"{place.file}: is missing")
            sizes[place.file] = place.file.stat().st_size
        end = place.start + place.length
        if place.start < 0 or place.length < 0 or end > sizes[place.file]:
            raise CorruptFile(f"{place.file}: has {sizes[place.file]} of {end} bytes")
        if before is not None and before.file == place.file and place.start < before.start + before.length:
            raise CorruptFile(f"{path}: uses byte {place.start} of {place.file.name} twice")


def _load(place: _Place, name: str, dtype: torch.dtype, size: Shape) -> torch.Tensor:
    """Return the values of a chunk."""
    values = load_pickle(_read(place), place.file)
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != size or values.dtype != dtype:
        actual = f"{values.dtype} of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else "no tensor"
        raise CorruptFile(f"{place.file}: {name} is {actual}; the metadata states {dtype} of shape {list(size)}")
    check_stored(place.file, {name: values})
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
