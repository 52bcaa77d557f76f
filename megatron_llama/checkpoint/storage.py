"""Reading and writing under torch.distributed.checkpoint: raw values in safetensors files, with a hash for each block.

torch's own storage puts a pickle beside the values, and each value into an archive of its own. Here each rank writes
one plain safetensors file, and reads the bytes that it needs and no others.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron_llama.checkpoint.rectangles import Rectangles
from megatron_llama.checkpoint.stored_tensors import (
    DTYPE_NAMES,
    Chunk,
    CorruptFile,
    Shape,
    Stored,
    block_rows,
    read_safetensors_header,
    safetensors_header,
)

HASH = "sha256"
HASH_DIGITS = 32  # 128 of its bits
BLOCK_BYTES = 4 << 20
_READ_BYTES = 16 << 20  # at a time, of files without blocks

# Planning needs no other rank (see ``save_part``), which torch takes for an oversight.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save_part(state: dict[str, Rectangles], folder: Path, rank: int) -> None:
    """Write this rank's part of a checkpoint: ``rank_00003.safetensors``, and ``rank_00003.json`` that says what is
    in it.

    Takes part in no collective, so that it can run beside training: that no two ranks hold the same rectangle is
    known from the layout, and ``manifest.merge`` checks it. Raises OSError.
    """
    with _own_errors():
        dcp.save(dict(state), storage_writer=_Writer(folder, rank), planner=_PartPlanner(), no_dist=True)


def load_into(state: dict[str, Rectangles], stored: Stored) -> int:
    """Fill the rectangles from what is stored, converting to their dtype; returns the bytes that were asked for.

    Raises CorruptFile when the bytes on disk are not those that were written. Takes part in no collective.
    """
    reader = _Reader(stored)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad(), _own_errors():
        dcp.load(dict(state), storage_reader=reader, planner=planner, no_dist=True)
    return reader.bytes_asked


def verify_file(stored: Stored, file: str) -> None:
    """Check every hash of one file, and that its own head says the same as the manifest; raises CorruptFile."""
    head = read_safetensors_header(stored.folder / file)
    with _Bytes(stored.folder / file) as content:
        for name, tensor in stored.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file == file:
                    told = head.get(f"{name}@{','.join(map(str, chunk.offset))}")
                    if told is None or (told.dtype, told.chunks[0].start, told.shape) != (
                        tensor.dtype,
                        chunk.start,
                        chunk.size,
                    ):
                        raise CorruptFile(f"{content.path}: its head does not have {name} where it was written")
                    for _ in _verified_blocks(content, chunk, tensor.dtype, stored.block_bytes, 0, chunk.size[0], name):
                        pass


def rows_of(stored: Stored, name: str, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) of a stored tensor, all columns, in its stored dtype."""
    tensor = stored.tensors[name]
    rows = torch.empty((last - first, *tensor.shape[1:]), dtype=tensor.dtype)
    wanted = Rectangles(tensor.shape, [((first, *(0,) * (len(tensor.shape) - 1)), rows)])
    load_into({name: wanted}, stored)
    return rows


@contextmanager
def _own_errors() -> Iterator[None]:
    """Takes an error out of the wrapping that torch puts around it."""
    try:
        yield
    except CheckpointException as wrapped:
        raise next(iter(wrapped.failures.values()))[0] from None


class _PartPlanner(DefaultSavePlanner):
    """torch's, but knowing that the other ranks' parts are not in the plan."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are; torch's would miss the rest of each tensor."""
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


class _Writer(StorageWriter):
    """One safetensors file and its description, on disk when ``write_data`` returns."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.stem = folder, f"rank_{rank:05d}"

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest is made of all ranks' parts, later."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Only a folder that the caller gives."""
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write values first and the head last, so that a file that was cut short has no head."""
        values = {_key(item): _resolved(planner, item) for item in plan.items}
        entries = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in values.items()}
        head, starts = safetensors_header(entries, {"format": "pt"})
        path = self.folder / f"{self.stem}.safetensors"
        part: dict[str, dict[str, Any]] = {}
        with path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
            file.seek(len(head))
            for item in plan.items:
                assert item.tensor_data is not None and item.index.offset is not None
                tensor = values[_key(item)]
                described = part.setdefault(
                    item.index.fqn,
                    {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(item.tensor_data.size), "chunks": []},
                )
                chunk = Chunk(path.name, starts[_key(item)], tuple(item.index.offset), tuple(tensor.shape))
                described["chunks"].append({**asdict(chunk), "hashes": list(_write_blocks(file, tensor, hasher))})
            size = file.tell()
            file.seek(0)
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
        with (self.folder / f"{self.stem}.json").open("x", encoding="utf-8") as described_file:
            json.dump({"file": path.name, "bytes": max(size, len(head)), "tensors": part}, described_file)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


class _Reader(StorageReader):
    """Reads what a plan asks for from the files of a ``Stored``."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.bytes_asked = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's form of what is stored."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in tensor.chunks],
                )
                for name, tensor in self.stored.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Only a ``Stored`` that the caller gives."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's targets, file by file."""
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            chunk = self._chunk(item)
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for file, wanted in sorted(by_file.items()):
            with _Bytes(self.stored.folder / file) as content:
                for chunk, item in sorted(wanted, key=lambda pair: pair[0].start):
                    self._fill(content, chunk, item, planner.resolve_tensor(item).detach())
                self.bytes_asked += content.bytes_asked
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> Chunk:
        chunks = self.stored.tensors[item.storage_index.fqn].chunks
        hint = item.storage_index.index
        if hint is not None and torch.Size(chunks[hint].offset) == item.storage_index.offset:
            return chunks[hint]
        return next(c for c in chunks if torch.Size(c.offset) == item.storage_index.offset)

    def _fill(self, content: _Bytes, chunk: Chunk, item: ReadItem, target: torch.Tensor) -> None:
        """Copy a rectangle of a chunk to ``target``, block by block."""
        name = item.storage_index.fqn
        dtype = self.stored.tensors[name].dtype
        first, count = item.storage_offsets[0], item.lengths[0]
        columns = [slice(o, o + n) for o, n in zip(item.storage_offsets[1:], item.lengths[1:], strict=True)]
        if chunk.hashes:
            blocks = _verified_blocks(content, chunk, dtype, self.stored.block_bytes, first, first + count, name)
            for start, block in blocks:
                low, high = max(start, first), min(start + len(block), first + count)
                target[low - first : high - first].copy_(block[(slice(low - start, high - start), *columns)])
        else:
            for start, block in _plain_blocks(content, chunk, dtype, first, first + count, columns):
                target[start - first : start - first + len(block)].copy_(block)


class _Bytes:
    """A file that is read by position, and counts the bytes it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_asked = path, 0

    def __enter__(self) -> _Bytes:
        try:
            self._file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CorruptFile(f"{self.path}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start`` on; raises CorruptFile where the file ends before that."""
        self.bytes_asked += len(into)
        while len(into):
            try:
                count = os.preadv(self._file, [into], start)
            except OSError as error:
                raise CorruptFile(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise CorruptFile(f"{self.path}: ends at byte {start}, before its values do")
            start, into = start + count, into[count:]


def _key(item: WriteItem) -> str:
    """The rectangle's name in its file: the tensor's, and where it starts."""
    assert item.index.offset is not None
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().contiguous()


def _write_blocks(file: Any, tensor: torch.Tensor, hasher: Executor) -> Iterator[str]:
    """Append the values and give each block's hash, which is made while the block is written."""
    rows = block_rows(tuple(tensor.shape), tensor.dtype.itemsize, BLOCK_BYTES)
    for start in range(0, tensor.shape[0], rows):
        block = _memory(tensor[start : start + rows].reshape(-1).view(torch.uint8))
        digest = hasher.submit(_digest, block)
        file.write(block)
        yield digest.result()


def _memory(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor, not a copy."""
    return memoryview(values.numpy())  # type: ignore[arg-type]


def _digest(block: memoryview) -> str:
    return hashlib.new(HASH, block, usedforsecurity=False).hexdigest()[:HASH_DIGITS]


def _verified_blocks(
    content: _Bytes, chunk: Chunk, dtype: torch.dtype, block_bytes: int, first: int, last: int, name: str
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, values) of each block that has some of the chunk's rows [first, last); raises CorruptFile for other
    bytes."""
    rows = block_rows(chunk.size, dtype.itemsize, block_bytes)
    row_bytes = dtype.itemsize * _width(chunk.size)
    buffer = torch.empty(min(rows, chunk.size[0]) * row_bytes, dtype=torch.uint8)
    for start in range(first // rows * rows, last, rows):
        count = min(rows, chunk.size[0] - start)
        raw = buffer[: count * row_bytes]
        view = _memory(raw)
        content.read(chunk.start + start * row_bytes, view)
        if _digest(view) != chunk.hashes[start // rows]:
            raise CorruptFile(
                f"{content.path}: the values of {name} from row {chunk.offset[0] + start} on are not what was written"
            )
        yield start, raw.view(dtype).view(count, *chunk.size[1:])


def _plain_blocks(
    content: _Bytes, chunk: Chunk, dtype: torch.dtype, first: int, last: int, columns: list[slice]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, values) of rows [first, last) and ``columns`` of a chunk without hashes, reading these bytes only."""
    size: Shape = tuple(c.stop - c.start for c in columns)
    row_bytes, wanted_bytes = dtype.itemsize * _width(chunk.size), dtype.itemsize * _width((1, *size))
    skipped = columns[0].start * dtype.itemsize if columns else 0
    rows = max(1, _READ_BYTES // max(1, wanted_bytes))
    buffer = torch.empty(min(rows, last - first) * wanted_bytes, dtype=torch.uint8)
    for start in range(first, last, rows):
        count = min(rows, last - start)
        raw = buffer[: count * wanted_bytes]
        view = _memory(raw)
        if wanted_bytes == row_bytes:
            content.read(chunk.start + start * row_bytes, view)
        else:
            for row in range(count):
                place = chunk.start + (start + row) * row_bytes + skipped
                content.read(place, view[row * wanted_bytes : (row + 1) * wanted_bytes])
        yield start, raw.view(dtype).view(count, *size)


def _width(size: Shape) -> int:
    """Values in a row. Llama's tensors have one or two dimensions, so a row's wanted part is one run of bytes."""
    assert 1 <= len(size) <= 2, f"tensors of {len(size)} dimensions are not stored"
    return size[1] if len(size) == 2 else 1
