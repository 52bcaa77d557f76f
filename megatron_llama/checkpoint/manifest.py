"""``checkpoint.json``: the state of the run and the position of each tensor's values. JSON with a checksum of itself;
never a pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_llama.arch.names import Shape
from megatron_llama.checkpoint.storage import (
    BLOCK_BYTES,
    HASH,
    HASH_DIGITS,
    CheckpointTensors,
    Chunk,
    ChunkedTensor,
    block_rows,
)
from megatron_llama.checkpoint.stored_tensors import (
    DTYPES,
    CorruptFile,
    Stored,
    check_file_name,
    parse_shape,
    read_json,
)
from megatron_llama.plan.schedules import RunPosition

NAME = "checkpoint.json"
FORMAT, VERSION = "megatron_llama checkpoint", 1


@dataclass
class State:
    """The state of a run besides its tensors."""

    step: int
    """Steps taken."""
    consumed_samples: int
    """The position in the data."""
    optimizer: str
    """The optimizer's name."""
    updates: int
    """Steps of the optimizer: fewer than ``step`` where steps were skipped."""
    world_size: int
    """Ranks of the run that saved it."""
    settings: dict[str, Any]
    """The config of the run that saved it; the model's shape is under ``model``."""
    hf_folder: str | None = None
    """The Hugging Face folder that the run started from, for its tokenizer."""
    dtype: str = "float32"
    """The dtype of that folder's weights, and the default of exports."""
    val_loss: float | None = None
    """Validation loss after this step; None where the run did not validate then."""
    base: str | None = None
    """For LoRA the fingerprint of the frozen weights, which the checkpoint does not hold."""
    lr: float | None = None
    """The learning rate of the next step, by the schedule of the run that saved it."""
    consumed_tokens: int | None = None
    """The tokens of the samples so far. None: every sample had the sequence length of ``settings``."""
    data: dict[str, Any] | None = None
    """The record of the data (data/record.py); None in checkpoints of older versions, which no run resumes."""

    @property
    def position(self) -> RunPosition:
        """Where the run stood."""
        tokens = self.consumed_tokens
        if tokens is None:
            tokens = self.consumed_samples * self.settings.get("data", {}).get("seq_length", 0)
        return RunPosition(self.step, self.consumed_samples, tokens)


@dataclass
class Manifest:
    """A checkpoint's description."""

    state: State
    stored: CheckpointTensors
    files: dict[str, int]
    """Bytes of each file."""

    def check_sizes(self) -> None:
        """Raises CorruptFile unless every file is there at its full size."""
        for name, size in self.files.items():
            path = self.stored.folder / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CorruptFile(f"{path}: {error.strerror}") from error
            if found != size:
                raise CorruptFile(f"{path}: has {found} bytes of {size}")

    def check_tensors(self, shapes: Mapping[str, Shape]) -> None:
        """Raises CorruptFile unless each of these tensors is there in its shape."""
        for name, shape in shapes.items():
            if name not in self.stored.tensors or self.stored.tensors[name].shape != shape:
                raise CorruptFile(f"{self.stored.folder / NAME}: {name} is not there in the shape {list(shape)}")


def merge(folder: Path, state: State) -> str:
    """The manifest's text, from the descriptions that all ranks have written in ``folder``.

    Raises CorruptFile unless they hold every value of every tensor exactly once.
    """
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for rank in range(state.world_size):
        part = read_json(folder / f"rank_{rank:05d}.json")
        files[part["file"]] = part["bytes"]
        for name, described in part["tensors"].items():
            whole = tensors.setdefault(name, {**described, "chunks": []})
            if (whole["dtype"], whole["shape"]) != (described["dtype"], described["shape"]):
                raise CorruptFile(f"{folder}: ranks disagree about the shape of {name}")
            whole["chunks"] += described["chunks"]
    body = {
        "format": FORMAT,
        "version": VERSION,
        "state": asdict(state),
        "hash": HASH,
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "tensors": tensors,
    }
    parse_manifest(folder, body)  # what a reader would refuse must not be published
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CorruptFile."""
    path = folder / NAME
    body = read_json(path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptFile(f"{path}: is not the manifest of a checkpoint")
    if body.get("version") != VERSION:
        raise CorruptFile(f"{path}: has version {body.get('version')}, and this program reads version {VERSION}")
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise CorruptFile(f"{path}: its checksum is wrong, so it is not what was written")
    return parse_manifest(folder, body)


def parse_manifest(folder: Path, body: dict[str, Any]) -> Manifest:
    """The manifest that JSON describes, every value checked. Raises CorruptFile."""
    try:
        state = State(**body["state"])
        files = {check_file_name(name): parse_shape([size])[0] for name, size in body["files"].items()}
        block_bytes = parse_shape([body["block_bytes"]])[0]
        tensors = {name: _tensor(name, entry, files, block_bytes) for name, entry in body["tensors"].items()}
        if body["hash"] != HASH or not all(type(n) is int for n in (state.step, state.consumed_samples, state.updates)):
            raise ValueError(f"hash {body['hash']!r}")
        for name in ("model", "data", "finetune"):
            if not isinstance(state.settings.get(name, {}), dict):
                raise ValueError(f"settings of {name} are {state.settings[name]!r}"[:200])
        data = state.settings.get("data", {})
        parse_shape([data.get("seq_length", 0)])
        if not isinstance(data.get("tokenizer"), str | None):
            raise ValueError(f"data.tokenizer is {data['tokenizer']!r}"[:200])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{folder / NAME}: a value is missing or of another type ({error!r})") from error
    except CorruptFile as error:
        raise CorruptFile(f"{folder / NAME}: {error}") from error
    return Manifest(state, CheckpointTensors(folder, tensors, block_bytes), files)


def _tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, int], block_bytes: int) -> ChunkedTensor:
    shape, dtype = parse_shape(entry["shape"]), DTYPES[entry["dtype"]]
    chunks = [_chunk(name, chunk, dtype.itemsize, shape, files, block_bytes) for chunk in entry["chunks"]]
    held = sum(math.prod(chunk.size) for chunk in chunks)
    if held != math.prod(shape) or len({chunk.offset for chunk in chunks}) != len(chunks):
        raise CorruptFile(f"holds {held} of the {math.prod(shape)} values of {name}")
    return ChunkedTensor(dtype, shape, chunks)


def _chunk(
    name: str, entry: Mapping[str, Any], itemsize: int, shape: Shape, files: Mapping[str, int], block_bytes: int
) -> Chunk:
    offset, size = parse_shape(entry["offset"]), parse_shape(entry["size"])
    start, file = parse_shape([entry["start"]])[0], check_file_name(entry["file"])
    hashes = tuple(entry["hashes"])
    inside = len(offset) == len(size) == len(shape) and all(
        o + n <= m for o, n, m in zip(offset, size, shape, strict=True)
    )
    if not inside or start + math.prod(size) * itemsize > files[file]:
        raise CorruptFile(f"a chunk of {name} is outside of it or of its file")
    blocks = -(-size[0] // block_rows(size, itemsize, block_bytes))
    if len(hashes) != blocks or not all(isinstance(text, str) and len(text) == HASH_DIGITS for text in hashes):
        raise CorruptFile(f"a chunk of {name} has {len(hashes)} hashes for {blocks} blocks")
    return Chunk(file, start, offset, size, hashes)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.new(HASH, text.encode(), usedforsecurity=False).hexdigest()


def dtype_of(stored: Stored) -> str:
    """torch's name of the dtype that most of the values have."""
    counts: dict[str, int] = {}
    for tensor in stored.tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda name: counts[name])
