"""The files of a checkpoint: one plain safetensors file for each rank, with a hash of each block of rows.

torch.distributed.checkpoint plans which rectangles of the files a rank needs. Its own storage is not used: that adds a
pickle, makes an archive of each tensor, and needs collectives. Here each rank writes its file without one, and reads
only the blocks that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_llama.arch.names import Shape
from megatron_llama.checkpoint.stored_tensors import (
    DTYPE_NAMES,
    CorruptFile,
    Rectangles,
    Stored,
    StoredTensor,
    check_finite,
    safetensors_header,
)
from megatron_llama.system.files import open_regular

HASH = "sha256"
HASH_DIGITS = 32  # 128 of its bits
BLOCK_BYTES = 4 << 20
STATES = "optimizer."
"""With this the names of the optimizer's states begin."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor in a file: row by row, without gaps."""

    file: str
    """Name of the file, in the checkpoint's folder."""
    start: int
    """Its first byte in the file."""
    offset: Shape
    """Where the rectangle starts in the tensor."""
    size: Shape
    """Extent of the rectangle."""
    hashes: tuple[str, ...]
    """One per block of rows, see ``block_rows``."""


@dataclass(frozen=True)
class ChunkedTensor(StoredTensor):
    """A tensor of a checkpoint, in the chunks that the ranks wrote."""

    chunks: list[Chunk]


@dataclass(frozen=True)
class CheckpointTensors(Stored):
    """All tensors of a checkpoint."""

    tensors: Mapping[str, ChunkedTensor]
    block_bytes: int
    """A block is as many whole rows of a chunk as fit in this many bytes, at least one."""

    @torch.no_grad()
    def load_into(self, wanted: Mapping[str, Rectangles]) -> int:
        """Fills the rectangles, and checks the hash of every block that it reads."""
        read, by_file = 0, dict[str, list[tuple[Chunk, torch.Tensor, ReadItem]]]()
        for name, rectangles in wanted.items():
            tensor = self.tensors[name]
            if tensor.shape != rectangles.shape:
                raise ValueError(f"{name} is saved as {list(tensor.shape)} and wanted as {list(rectangles.shape)}")
            for item in _read_items(name, tensor, rectangles):
                assert item.storage_index.index is not None and item.dest_index.index is not None
                chunk, (_, target) = tensor.chunks[item.storage_index.index], rectangles.parts[item.dest_index.index]
                by_file.setdefault(chunk.file, []).append((chunk, target.detach(), item))
        for file, parts in sorted(by_file.items()):
            with _open(self.folder / file) as content:
                for chunk, target, item in sorted(parts, key=lambda part: part[0].start):
                    read += self._fill(content, chunk, target, item)
        return read

    def _fill(self, content: BinaryIO, chunk: Chunk, target: torch.Tensor, item: ReadItem) -> int:
        """Copies a rectangle of a chunk to its place in ``target``, block by block; returns the bytes read."""
        read, name = 0, item.storage_index.fqn
        dtype = self.tensors[name].dtype
        target = target[_slices(item.dest_offsets, item.lengths)]
        first, last = item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]
        columns = _slices(item.storage_offsets[1:], item.lengths[1:])
        for start, block in _verified_blocks(content, chunk, dtype, self.block_bytes, first, last, name):
            low, high = max(start, first), min(start + len(block), last)
            values = block[(slice(low - start, high - start), *columns)]
            if not name.startswith(STATES):  # the square of a large gradient may be infinite: that weight rests
                place = (chunk.offset[0] + low, *(o + c.start for o, c in zip(chunk.offset[1:], columns, strict=True)))
                check_finite(content.name, name, values, place)
            target[low - first : high - first].copy_(values)
            read += block.nbytes
        return read

    def verify_file(self, file: str) -> None:
        """Checks every hash of one file, and that its header agrees with the manifest. Raises CorruptFile."""
        tensors = {_key(n, c.offset): (t.dtype, c) for n, t in self.tensors.items() for c in t.chunks if c.file == file}
        in_order = dict(sorted(tensors.items(), key=lambda item: item[1][1].start))
        header, starts = safetensors_header({key: (dtype, c.size) for key, (dtype, c) in in_order.items()})
        with _open(self.folder / file) as content:
            found = bytearray(len(header))
            _read(content, 0, memoryview(found))
            if found != header or any(starts[key] != chunk.start for key, (_, chunk) in tensors.items()):
                raise CorruptFile(f"{content.name}: its header is not that of the tensors in the manifest")
            for key, (dtype, chunk) in in_order.items():
                for _ in _verified_blocks(content, chunk, dtype, self.block_bytes, 0, chunk.size[0], key):
                    pass


def block_rows(size: Shape, itemsize: int, block_bytes: int) -> int:
    """Rows of a chunk that are hashed together."""
    return max(1, block_bytes // max(1, math.prod(size[1:]) * itemsize))


def save_part(tensors: Mapping[str, Rectangles], folder: Path, rank: int) -> None:
    """Writes this rank's part of a checkpoint: ``rank_00003.safetensors``, and ``rank_00003.json`` that describes it.

    Takes part in no collective, so that it can run in a thread beside training. The layout guarantees that no two ranks
    write the same rectangle, and ``manifest.merge`` checks it. Values are written first and the header last, so that a
    truncated file has no header; both files are on disk when it returns. Raises OSError.
    """
    values = {_key(name, offset): part for name, whole in tensors.items() for offset, part in whole.parts}
    header, starts = safetensors_header({key: (part.dtype, tuple(part.shape)) for key, part in values.items()})
    path = folder / f"rank_{rank:05d}.safetensors"
    described: dict[str, dict[str, Any]] = {}
    with path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
        file.seek(len(header))
        for name, whole in tensors.items():
            chunks = []
            for offset, part in whole.parts:
                hashes = tuple(_write_blocks(file, part.detach().contiguous(), hasher))
                chunk = Chunk(path.name, starts[_key(name, offset)], tuple(offset), tuple(part.shape), hashes)
                chunks.append(asdict(chunk))
            dtype = DTYPE_NAMES[whole.parts[0][1].dtype]
            described[name] = {"dtype": dtype, "shape": list(whole.shape), "chunks": chunks}
        size = file.tell()
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    with path.with_suffix(".json").open("x", encoding="utf-8") as description:
        json.dump({"file": path.name, "bytes": max(size, len(header)), "tensors": described}, description)


def _read_items(name: str, tensor: ChunkedTensor, wanted: Rectangles) -> list[ReadItem]:
    """What to read of which chunk for each part that is wanted."""
    chunks = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in tensor.chunks]
    saved = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
    parts = [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in wanted.parts]
    return create_read_items_for_chunk_list(name, saved, parts)


def _slices(offset: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The file, to be read; the operating system's errors become a CorruptFile that names it."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise CorruptFile(f"{path}: {error.strerror}") from error


def _read(file: BinaryIO, start: int, into: memoryview) -> None:
    """Fills ``into`` from byte ``start`` on. Raises CorruptFile where the file is too short."""
    file.seek(start)
    count = file.readinto(into)  # type: ignore[attr-defined]
    if count < len(into):
        raise CorruptFile(f"{file.name}: ends at byte {start + count}, before its values do")


def _key(name: str, offset: Iterable[int]) -> str:
    """A chunk's name in its file: the tensor's name, and where the chunk starts in it."""
    return f"{name}@{','.join(map(str, offset))}"


def _write_blocks(file: Any, tensor: torch.Tensor, hasher: Executor) -> Iterator[str]:
    """Appends the values, and yields each block's hash, which a thread computes while the block is written."""
    rows = block_rows(tuple(tensor.shape), tensor.dtype.itemsize, BLOCK_BYTES)
    for start in range(0, tensor.shape[0], rows):
        block = _memory(tensor[start : start + rows].reshape(-1).view(torch.uint8))
        digest = hasher.submit(_digest, block)
        file.write(block)
        yield digest.result()


def _memory(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    return memoryview(values.numpy())  # type: ignore[arg-type]


def _digest(block: memoryview) -> str:
    return hashlib.new(HASH, block, usedforsecurity=False).hexdigest()[:HASH_DIGITS]


def _verified_blocks(
    content: BinaryIO, chunk: Chunk, dtype: torch.dtype, block_bytes: int, first: int, last: int, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, values) of each block that has some of the chunk's rows [first, last). Raises CorruptFile where the
    hash differs."""
    rows = block_rows(chunk.size, dtype.itemsize, block_bytes)
    row_bytes = dtype.itemsize * math.prod(chunk.size[1:])
    buffer = torch.empty(min(rows, chunk.size[0]) * row_bytes, dtype=torch.uint8)
    for start in range(first // rows * rows, last, rows):
        count = min(rows, chunk.size[0] - start)
        raw = buffer[: count * row_bytes]
        view = _memory(raw)
        _read(content, chunk.start + start * row_bytes, view)
        if _digest(view) != chunk.hashes[start // rows]:
            raise CorruptFile(
                f"{content.name}: the values of {name} from row {chunk.offset[0] + start} on are not what was written"
            )
        yield start, raw.view(dtype).view(count, *chunk.size[1:])
