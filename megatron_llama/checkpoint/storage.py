"""The files of a checkpoint, read and written by torch.distributed.checkpoint: safetensors, with a hash of each block.

torch's own storage adds a pickle, and makes an archive of each tensor. Here each rank writes one plain safetensors file
without a collective, and reads only the blocks that it needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
    CorruptFile,
    Stored,
    StoredTensor,
    safetensors_header,
)
from megatron_llama.model.names import Shape

HASH = "sha256"
HASH_DIGITS = 32  # 128 of its bits
BLOCK_BYTES = 4 << 20

# Saving and loading use no process group on purpose (see ``save_part``); torch warns about that.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save_part(state: dict[str, Rectangles], folder: Path, rank: int) -> None:
    """Writes this rank's part of a checkpoint: ``rank_00003.safetensors``, and ``rank_00003.json`` that describes it.

    Takes part in no collective, so that it can run in a thread beside training. The layout guarantees that no two ranks
    write the same rectangle, and ``manifest.merge`` checks it. Raises OSError.
    """
    with _unwrapped_errors():
        dcp.save(dict(state), storage_writer=_Writer(folder, rank), planner=_PartPlanner(), no_dist=True)


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

    def load_into(self, wanted: Mapping[str, Rectangles]) -> int:
        """Fills the rectangles, and checks the hash of every block that it reads."""
        reader = _Reader(self, wanted.keys())
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with torch.no_grad(), _unwrapped_errors():
            dcp.load(dict(wanted), storage_reader=reader, planner=planner, no_dist=True)
        return reader.bytes_read

    def verify_file(self, file: str) -> None:
        """Checks every hash of one file, and that its header agrees with the manifest. Raises CorruptFile."""
        tensors = {_key(n, c.offset): (t.dtype, c) for n, t in self.tensors.items() for c in t.chunks if c.file == file}
        in_order = dict(sorted(tensors.items(), key=lambda item: item[1][1].start))
        header, starts = safetensors_header({key: (dtype, c.size) for key, (dtype, c) in in_order.items()})
        with _Bytes(self.folder / file) as content:
            found = bytearray(len(header))
            content.read(0, memoryview(found))
            if found != header or any(starts[key] != chunk.start for key, (_, chunk) in tensors.items()):
                raise CorruptFile(f"{content.path}: its header is not that of the tensors in the manifest")
            for key, (dtype, chunk) in in_order.items():
                for _ in _verified_blocks(content, chunk, dtype, self.block_bytes, 0, chunk.size[0], key):
                    pass


def block_rows(size: Shape, itemsize: int, block_bytes: int) -> int:
    """Rows of a chunk that are hashed together."""
    return max(1, block_bytes // max(1, math.prod(size[1:]) * itemsize))


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raises the error itself instead of the CheckpointException, a BaseException, that torch makes of it."""
    try:
        yield
    except CheckpointException as wrapped:
        raise next(iter(wrapped.failures.values()))[0] from None


class _PartPlanner(DefaultSavePlanner):
    """torch's planner, for a plan without the other ranks' parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans, without torch's check that they cover each tensor."""
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
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged."""
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """``manifest.merge`` combines all ranks' parts later."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders are given to the constructor, never by an id."""
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes values first and the header last, so that a truncated file has no header."""
        values = {_key(item.index.fqn, item.index.offset or ()): _resolved(planner, item) for item in plan.items}
        entries = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in values.items()}
        header, starts = safetensors_header(entries)
        path = self.folder / f"{self.stem}.safetensors"
        part: dict[str, dict[str, Any]] = {}
        with path.open("xb") as file, ThreadPoolExecutor(1) as hasher:
            file.seek(len(header))
            for item, (key, tensor) in zip(plan.items, values.items(), strict=True):
                assert item.tensor_data is not None and item.index.offset is not None
                described = part.setdefault(
                    item.index.fqn,
                    {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(item.tensor_data.size), "chunks": []},
                )
                hashes = tuple(_write_blocks(file, tensor, hasher))
                chunk = Chunk(path.name, starts[key], tuple(item.index.offset), tuple(tensor.shape), hashes)
                described["chunks"].append(asdict(chunk))
            size = file.tell()
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        with (self.folder / f"{self.stem}.json").open("x", encoding="utf-8") as described_file:
            json.dump({"file": path.name, "bytes": max(size, len(header)), "tensors": part}, described_file)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


class _Reader(StorageReader):
    """Reads the rectangles of a plan from a checkpoint's files."""

    def __init__(self, stored: CheckpointTensors, names: Iterable[str]) -> None:
        self.stored, self.names = stored, names
        self.bytes_read = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The chunks of the wanted tensors alone: torch plans over all that it is given."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in tensor.chunks],
                )
                for name, tensor in ((name, self.stored.tensors[name]) for name in self.names)
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Checkpoints are given as CheckpointTensors, never by an id."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the plan's targets, file by file."""
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            chunk = self._chunk(item)
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for file, wanted in sorted(by_file.items()):
            with _Bytes(self.stored.folder / file) as content:
                for chunk, item in sorted(wanted, key=lambda pair: pair[0].start):
                    self._fill(content, chunk, item, planner.resolve_tensor(item).detach())
                self.bytes_read += content.bytes_read
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
        """Copies a rectangle of a chunk to ``target``, block by block."""
        name = item.storage_index.fqn
        dtype = self.stored.tensors[name].dtype
        first, count = item.storage_offsets[0], item.lengths[0]
        columns = [slice(o, o + n) for o, n in zip(item.storage_offsets[1:], item.lengths[1:], strict=True)]
        blocks = _verified_blocks(content, chunk, dtype, self.stored.block_bytes, first, first + count, name)
        for start, block in blocks:
            low, high = max(start, first), min(start + len(block), first + count)
            target[low - first : high - first].copy_(block[(slice(low - start, high - start), *columns)])


class _Bytes:
    """A file that is read by position, and counts the bytes that were read."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0

    def __enter__(self) -> _Bytes:
        try:
            self._file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CorruptFile(f"{self.path}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, start: int, into: memoryview) -> None:
        """Fills ``into`` from byte ``start`` on. Raises CorruptFile where the file is too short."""
        self.bytes_read += len(into)
        while len(into):
            try:
                count = os.preadv(self._file, [into], start)
            except OSError as error:
                raise CorruptFile(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise CorruptFile(f"{self.path}: ends at byte {start}, before its values do")
            start, into = start + count, into[count:]


def _key(name: str, offset: Iterable[int]) -> str:
    """A chunk's name in its file: the tensor's name, and where the chunk starts in it."""
    return f"{name}@{','.join(map(str, offset))}"


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().contiguous()


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
    content: _Bytes, chunk: Chunk, dtype: torch.dtype, block_bytes: int, first: int, last: int, name: str
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
        content.read(chunk.start + start * row_bytes, view)
        if _digest(view) != chunk.hashes[start // rows]:
            raise CorruptFile(
                f"{content.path}: the values of {name} from row {chunk.offset[0] + start} on are not what was written"
            )
        yield start, raw.view(dtype).view(count, *chunk.size[1:])
