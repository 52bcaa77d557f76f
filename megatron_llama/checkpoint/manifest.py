"""The manifest ``checkpoint.json``: run state and location of each tensor, as JSON with a checksum."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_llama.arch.hf_tp_mapping import Shape
from megatron_llama.checkpoint.rank_files import (
    BLOCK_BYTES,
    HASH,
    HASH_DIGITS,
    CheckpointTensors,
    Chunk,
    ChunkedTensor,
    block_rows,
    part_name,
)
from megatron_llama.checkpoint.tensor_source import (
    DTYPES,
    CorruptFile,
    Stored,
    check_cover,
    check_file_name,
    parse_shape,
    read_json,
)
from megatron_llama.config.stored_settings import MANIFEST
from megatron_llama.plan.data_schedules import RunPosition
from megatron_llama.system.files import file_size
from megatron_llama.system.object_store import Location, RemotePath

NAME = MANIFEST
FORMAT, VERSION = "megatron_llama checkpoint", 1


@dataclass
class State:
    """State of a run without its tensors. The fields are stored in checkpoint.json."""

    step: int
    """Completed steps."""
    consumed_samples: int
    """Samples consumed, also the number of the next sample."""
    optimizer: str
    """Name of the optimizer."""
    updates: int
    """Optimizer steps: less than ``step`` if steps were skipped."""
    world_size: int
    """Ranks of the run that saved the checkpoint."""
    settings: dict[str, Any]
    """Config of the run that saved the checkpoint."""
    hf_folder: str | None = None
    """``init_from`` of the run, which has the tokenizer."""
    dtype: str = "float32"
    """dtype of the weights in ``hf_folder``: the default of exports."""
    val_loss: float | None = None
    """Validation loss after this step; None if the run did not validate."""
    base: str | None = None
    """LoRA: fingerprint of the frozen weights, which are not in the checkpoint."""
    lr: float | None = None
    """Learning rate of the next step in the run that saved the checkpoint."""
    consumed_tokens: int | None = None
    """Tokens of the samples so far. None: data.seq_length per sample."""
    data: dict[str, Any] | None = None
    """Record of the data (data/resume_record.py); None in checkpoints of old versions, which cannot be resumed."""
    working_dir: str | None = None
    """Current folder of the run, where its relative paths start; None in checkpoints of older versions."""
    replaceable: bool = False
    """Whether later checkpoints replace this one: saved under the default of checkpoint.every_minutes."""
    spikes: dict[str, Any] | None = None
    """State of trainer.spike_guard; None without it."""

    @property
    def position(self) -> RunPosition:
        """Step, samples and tokens of the checkpoint."""
        tokens = self.consumed_tokens
        if tokens is None:
            tokens = self.consumed_samples * self.settings.get("data", {}).get("seq_length", 0)
        return RunPosition(self.step, self.consumed_samples, tokens)


@dataclass
class Manifest:
    """Parsed checkpoint.json."""

    state: State
    stored: CheckpointTensors
    files: dict[str, int]
    """File name to bytes."""
    text: str = ""
    """Content of checkpoint.json; only of ``merge``."""
    start: int = 0
    """Number of the run's start that wrote it; only of copies in memory (memory_copies.py)."""

    def locate(self, path: str | None) -> str | None:
        """Return the absolute path of an existing file for a relative path in the settings (init_from is absolute).

        The path starts in the current folder of the run, in a parent of the checkpoint (the project was moved), or in
        the current folder of this process. Returns ``path`` if the file exists in none of them.
        """
        if path is None or os.path.isabs(path):
            return path
        named, folder = self.state.working_dir, self.stored.folder
        parents = () if isinstance(folder, RemotePath) else folder.absolute().parents
        starts = [*([Path(named)] if named else []), *parents, Path()]
        return next((str((start / path).absolute()) for start in starts if (start / path).exists()), path)

    def check_sizes(self) -> None:
        """Raise CorruptFile if a file is missing or has another size."""
        folder = self.stored.folder
        objects = folder.files() if isinstance(folder, RemotePath) else {}
        for name, size in self.files.items():
            path = folder / name
            try:
                size_on_disk = objects[name].size if name in objects else file_size(path)
            except OSError as error:
                raise CorruptFile(f"{path}: {error.strerror}") from error
            if size_on_disk != size:
                raise CorruptFile(f"{path}: has {size_on_disk} of {size} bytes")

    def check_tensors(self, shapes: Mapping[str, Shape]) -> None:
        """Raise CorruptFile if a tensor is missing or has another shape."""
        for name, shape in shapes.items():
            if name not in self.stored.tensors or self.stored.tensors[name].shape != shape:
                raise CorruptFile(f"{self.stored.folder / NAME}: has no {name} of shape {list(shape)}")


def merge(folder: Location, state: State, writer: str = "") -> Manifest:
    """Merge the ``rank_*.json`` files of all ranks of a ``writer``; return the manifest.

    Raises CorruptFile unless the ranks have each value of each tensor exactly once.
    """
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for rank in range(state.world_size):
        part = read_json(folder / part_name(rank, writer))
        files |= part["files"]
        for name, described in part["tensors"].items():
            whole = tensors.setdefault(name, {**described, "chunks": []})
            if (whole["dtype"], whole["shape"]) != (described["dtype"], described["shape"]):
                raise CorruptFile(f"{folder}: ranks wrote {name} with different shapes")
            whole["chunks"] += described["chunks"]
    body = manifest_body(state, files, tensors)
    manifest = parse_manifest(folder, body)  # publish only manifests that can be read
    manifest.text = with_checksum(body)
    return manifest


def manifest_body(state: State, files: Mapping[str, int], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest without its checksum.

    Args:
        files: File name to bytes.
        tensors: Tensor name to dtype, shape and chunks, as JSON.
    """
    head = {"format": FORMAT, "version": VERSION, "state": asdict(state), "hash": HASH, "block_bytes": BLOCK_BYTES}
    return {**head, "files": files, "tensors": tensors}


def with_checksum(body: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1)


def read_manifest(folder: Location, name: str = NAME) -> Manifest:
    """Read the manifest of a checkpoint, or of the copy of a rank's tensors (memory_copies.py). Raises CorruptFile."""
    path = folder / name
    body = read_json(path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptFile(f"{path}: is not a checkpoint manifest")
    if body.get("version") != VERSION:
        raise CorruptFile(f"{path}: has version {body.get('version')}; this program reads version {VERSION}")
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise CorruptFile(f"{path}: wrong checksum")
    return parse_manifest(folder, body, name)


def parse_manifest(folder: Location, body: dict[str, Any], file: str = NAME) -> Manifest:
    """Validate the parsed JSON of ``file`` and return the manifest. Raises CorruptFile."""
    try:
        state = State(**body["state"])
        files = {check_file_name(name): parse_shape([size])[0] for name, size in body["files"].items()}
        block_bytes = parse_shape([body["block_bytes"]])[0]
        tensors = {name: _tensor(name, entry, files, block_bytes) for name, entry in body["tensors"].items()}
        for name, tensor in tensors.items() if file == NAME else ():  # another file has the rectangles of one rank
            check_cover(name, tensor.shape, [(chunk.offset, chunk.size) for chunk in tensor.chunks])
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
        raise CorruptFile(f"{folder / file}: a value is missing or has the wrong type ({error!r})") from error
    except CorruptFile as error:
        raise CorruptFile(f"{folder / file}: {error}") from error
    return Manifest(state, CheckpointTensors(folder, tensors, block_bytes), files, start=int(body.get("start", 0)))


def _tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, int], block_bytes: int) -> ChunkedTensor:
    dtype = DTYPES[entry["dtype"]]
    chunks = [_chunk(name, chunk, dtype.itemsize, files, block_bytes) for chunk in entry["chunks"]]
    return ChunkedTensor(dtype, parse_shape(entry["shape"]), chunks)


def _chunk(name: str, entry: Mapping[str, Any], itemsize: int, files: Mapping[str, int], block_bytes: int) -> Chunk:
    offset, size = parse_shape(entry["offset"]), parse_shape(entry["size"])
    start, file = parse_shape([entry["start"]])[0], check_file_name(entry["file"])
    hashes = tuple(entry["hashes"])
    if start + math.prod(size) * itemsize > files[file]:
        raise CorruptFile(f"a chunk of {name} at {list(offset)} exceeds the file")
    blocks = -(-size[0] // block_rows(size, itemsize, block_bytes))
    if len(hashes) != blocks or not all(isinstance(text, str) and len(text) == HASH_DIGITS for text in hashes):
        raise CorruptFile(f"a chunk of {name} has {len(hashes)} hashes for {blocks} blocks")
    return Chunk(file, start, offset, size, hashes)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.new(HASH, text.encode(), usedforsecurity=False).hexdigest()


def dtype_of(stored: Stored) -> str:
    """Return the name of the most frequent dtype by values, such as bfloat16."""
    counts: dict[str, int] = {}
    for tensor in stored.tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda name: counts[name])
