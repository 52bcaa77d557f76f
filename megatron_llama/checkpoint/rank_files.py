"""Files of a checkpoint: one plain safetensors file per rank, with a hash per block of rows.

A rank reads the rectangles of the files that overlap its own. torch.distributed.checkpoint is not used: it writes a
pickle and one archive per tensor, and requires collectives.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.checkpoint.tensor_source import (
    DTYPE_NAMES,
    CorruptFile,
    Rectangles,
    Stored,
    StoredTensor,
    check_finite,
    overlap,
    safetensors_header,
)
from megatron_llama.system.files import open_regular, write_atomically
from megatron_llama.system.object_store import THREADS, Location, RemotePath

HASH = "sha256"
HASH_DIGITS = 32  # 128 bits
BLOCK_BYTES = 4 << 20
OBJECT_BYTES = 64 << 20
"""Size of a rank's objects in a store, if the rows of its tensors are smaller. Each is sent by one request."""
STATES = "optimizer."
"""Prefix of the names of optimizer states."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor in a file, row-major and contiguous."""

    file: str
    """File name in the checkpoint's folder."""
    start: int
    """First byte in the file."""
    offset: Shape
    """Offset of the rectangle in the tensor."""
    size: Shape
    """Shape of the rectangle."""
    hashes: tuple[str, ...]
    """Hash per block of rows, see ``block_rows``."""


@dataclass(frozen=True)
class ChunkedTensor(StoredTensor):
    """A tensor of a checkpoint, in the chunks of all ranks."""

    chunks: list[Chunk]


@dataclass(frozen=True)
class CheckpointTensors(Stored):
    """All tensors of a checkpoint."""

    tensors: Mapping[str, ChunkedTensor]
    block_bytes: int
    """Maximum size of a block of rows; a block has at least one row."""

    @torch.no_grad()
    def load_into(self, targets: Mapping[str, Rectangles]) -> None:
        """Fill the rectangles of ``targets``; verify the hash of each block read."""
        by_file = dict[str, list[tuple[str, Chunk, Shape, Shape, torch.Tensor]]]()
        for name, rectangles in targets.items():
            tensor = self.tensors[name]
            if tensor.shape != rectangles.shape:
                raise ValueError(f"{name} is saved as {list(tensor.shape)} and requested as {list(rectangles.shape)}")
            for chunk, (offset, target) in product(tensor.chunks, rectangles.parts):
                if (both := overlap(chunk.offset, chunk.size, offset, tuple(target.shape))) is not None:
                    part = target.detach()[_slices(*both, offset)]
                    by_file.setdefault(chunk.file, []).append((name, chunk, *both, part))

        def fill(file: str) -> None:
            with _open(self.folder / file) as content:
                for part in sorted(by_file[file], key=lambda part: part[1].start):
                    self._fill(content, *part)

        if isinstance(self.folder, Path):
            for file in sorted(by_file):
                fill(file)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(torch.no_grad()(fill), sorted(by_file)))  # raises the first error

    def _fill(self, content: BinaryIO, name: str, chunk: Chunk, low: Shape, high: Shape, target: torch.Tensor) -> None:
        """Copy the rectangle [low, high) of a tensor from a chunk into ``target``, block by block."""
        dtype, (first, *columns) = self.tensors[name].dtype, _slices(low, high, chunk.offset)
        blocks = _verified_blocks(content, chunk, dtype, self.block_bytes, first.start, first.stop, name)
        for start, block in blocks:
            begin, end = max(start, first.start), min(start + len(block), first.stop)
            values = block[(slice(begin - start, end - start), *columns)]
            if not name.startswith(STATES):  # exp_avg_sq may be infinite: that weight is then not updated
                check_finite(content.name, name, values, (chunk.offset[0] + begin, *low[1:]))
            target[begin - first.start : end - first.start].copy_(values)

    def verify_file(self, file: str) -> None:
        """Verify all hashes of a file, and its header against the manifest. Raises CorruptFile."""
        tensors = {
            part_key(n, c.offset): (t.dtype, c) for n, t in self.tensors.items() for c in t.chunks if c.file == file
        }
        in_order = dict(sorted(tensors.items(), key=lambda item: item[1][1].start))
        header, starts = safetensors_header({key: (dtype, c.size) for key, (dtype, c) in in_order.items()})
        with _open(self.folder / file) as content:
            stored_header = bytearray(len(header))
            _read(content, 0, memoryview(stored_header))
            if stored_header != header or any(starts[key] != chunk.start for key, (_, chunk) in tensors.items()):
                raise CorruptFile(f"{content.name}: the header does not match the manifest")
            for key, (dtype, chunk) in in_order.items():
                for _ in _verified_blocks(content, chunk, dtype, self.block_bytes, 0, chunk.size[0], key):
                    pass


def block_rows(size: Shape, itemsize: int, block_bytes: int) -> int:
    """Return the rows per hashed block of a chunk."""
    return max(1, block_bytes // max(1, math.prod(size[1:]) * itemsize))


def part_name(rank: int, writer: str = "") -> str:
    """Return the name of the description of a rank's part. The file exists if the part is complete.

    Args:
        writer: Name of the run's start in the names of objects: no start replaces the objects of another.
    """
    return f"rank_{rank:05d}{writer and '.'}{writer}.json"


def save_part(tensors: Mapping[str, Rectangles], folder: Location, rank: int, writer: str = "") -> None:
    """Write this rank's part of a checkpoint: ``rank_00003.safetensors`` and its description ``rank_00003.json``.

    In an object store the part is ``rank_00003.<writer>.0000.safetensors`` and further objects. Calls no collective, so
    it can run in a thread. No two ranks write the same rectangle; ``manifest.merge`` checks this. Raises OSError.
    """
    description, stem = part_name(rank, writer), part_name(rank, writer).removesuffix(".json")
    if isinstance(folder, RemotePath):
        groups = list(_objects(tensors))
        names = [f"{stem}.{number:04d}.safetensors" for number in range(len(groups))]
        with ThreadPoolExecutor(THREADS // 2) as pool:
            written = list(pool.map(partial(_write_object, folder), names, groups))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        parts = [(name, offset, part) for name, whole in tensors.items() for offset, part in whole.parts]
        names = [f"{stem}.safetensors"]
        with (folder / names[0]).open("xb") as file:
            written = [_write_file(file, names[0], parts)]
            file.flush()
            os.fsync(file.fileno())
    described = describe_chunks(tensors, (chunk for _, chunks in written for chunk in chunks))
    sizes = {name: size for name, (size, _) in zip(names, written, strict=True)}
    write_atomically(folder / description, json.dumps({"files": sizes, "tensors": described}))


def describe_chunks(tensors: Mapping[str, Rectangles], chunks: Iterable[tuple[str, Chunk]]) -> dict[str, Any]:
    """Return dtype, shape and chunks of each tensor, as JSON."""
    described: dict[str, dict[str, Any]] = {
        name: {"dtype": DTYPE_NAMES[whole.parts[0][1].dtype], "shape": list(whole.shape), "chunks": []}
        for name, whole in tensors.items()
    }
    for name, chunk in chunks:
        described[name]["chunks"].append(asdict(chunk))
    return described


Part = tuple[str, Shape, torch.Tensor]
"""Name of a tensor, offset of a rectangle in it, values of the rectangle."""


def _objects(tensors: Mapping[str, Rectangles]) -> Iterator[list[Part]]:
    """Yield groups of rectangles of about OBJECT_BYTES, each for one object; larger rectangles are divided by rows."""
    group: list[Part] = []
    size = 0
    for name, whole in tensors.items():
        for offset, part in whole.parts:
            rows = block_rows(tuple(part.shape), part.dtype.itemsize, OBJECT_BYTES)
            for start in range(0, part.shape[0], rows):
                span = part[start : start + rows]
                if group and size + span.nbytes > OBJECT_BYTES:
                    yield group
                    group, size = [], 0
                group.append((name, (offset[0] + start, *offset[1:]), span))
                size += span.nbytes
    if group:
        yield group


def _write_object(folder: RemotePath, name: str, parts: Sequence[Part]) -> tuple[int, list[tuple[str, Chunk]]]:
    content = io.BytesIO()
    size, chunks = _write_file(content, name, parts)
    (folder / name).write_bytes(content.getvalue())
    return size, chunks


def _write_file(file: Any, file_name: str, parts: Sequence[Part]) -> tuple[int, list[tuple[str, Chunk]]]:
    """Write a safetensors file; return its size and its chunks by tensor.

    The header is written last: a truncated file has no header.
    """
    header, starts = part_header(parts)
    chunks = []
    file.seek(len(header))
    with ThreadPoolExecutor(1) as hasher:
        for name, offset, part in parts:
            hashes = []
            for block in _blocks(part.detach().contiguous()):
                digest = hasher.submit(_digest, block)  # during the write
                file.write(block)
                hashes.append(digest.result())
            start, size = starts[part_key(name, offset)], tuple(part.shape)
            chunks.append((name, Chunk(file_name, start, offset, size, tuple(hashes))))
    end = file.tell()
    file.seek(0)
    file.write(header)
    return max(end, len(header)), chunks


def part_header(parts: Iterable[Part]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file with these rectangles, and the first byte of each by ``part_key``."""
    return safetensors_header({part_key(name, offset): (part.dtype, tuple(part.shape)) for name, offset, part in parts})


def _slices(low: Shape, high: Shape, origin: Shape) -> tuple[slice, ...]:
    """Return the slices of [low, high) in a rectangle that begins at ``origin``."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


@contextmanager
def _open(path: Location) -> Iterator[BinaryIO]:
    """Open a file to read. Raises CorruptFile for errors of the operating system."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error


def _read(file: BinaryIO, start: int, into: memoryview) -> None:
    """Fill ``into`` from byte ``start``. Raises CorruptFile if the file is too short."""
    file.seek(start)
    count = file.readinto(into)  # type: ignore[attr-defined]
    if count < len(into):
        raise CorruptFile(f"{file.name}: is truncated at byte {start + count}")


def part_key(name: str, offset: Iterable[int]) -> str:
    """Return a chunk's name in its file: tensor name and offset."""
    return f"{name}@{','.join(map(str, offset))}"


def hash_blocks(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the hash of each block of rows."""
    return tuple(map(_digest, _blocks(tensor)))


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    rows = block_rows(tuple(tensor.shape), tensor.dtype.itemsize, BLOCK_BYTES)
    for start in range(0, tensor.shape[0], rows):
        yield _memory(tensor[start : start + rows].reshape(-1).view(torch.uint8))


def _memory(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor without a copy."""
    return memoryview(values.numpy())  # type: ignore[arg-type]


def _digest(block: memoryview) -> str:
    return hashlib.new(HASH, block, usedforsecurity=False).hexdigest()[:HASH_DIGITS]


def _verified_blocks(
    content: BinaryIO, chunk: Chunk, dtype: torch.dtype, block_bytes: int, first: int, last: int, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, values) of each block that overlaps rows [first, last) of the chunk.

    Raises CorruptFile if a hash differs.
    """
    rows = block_rows(chunk.size, dtype.itemsize, block_bytes)
    row_bytes = dtype.itemsize * math.prod(chunk.size[1:])
    buffer = torch.empty(min(rows, chunk.size[0]) * row_bytes, dtype=torch.uint8)
    for start in range(first // rows * rows, last, rows):
        count = min(rows, chunk.size[0] - start)
        raw = buffer[: count * row_bytes]
        view = _memory(raw)
        _read(content, chunk.start + start * row_bytes, view)
        if _digest(view) != chunk.hashes[start // rows]:
            raise CorruptFile(f"{content.name}: wrong hash of {name} from row {chunk.offset[0] + start}")
        yield start, raw.view(dtype).view(count, *chunk.size[1:])
