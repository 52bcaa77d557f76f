"""Export of a checkpoint's weights for torchtitan (a DCP folder) and Megatron (torch_dist).

torch.distributed.checkpoint writes both formats, in one process. Its planner asks for one tensor at a time, which is
read then, so the model is never in memory as a whole.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron_llama.arch.foreign_tensor_layouts import Names, TensorPart, megatron_names, torchtitan_names
from megatron_llama.arch.recognize_format import COMMON, DCP
from megatron_llama.checkpoint.tensor_source import EXPORT_DTYPES, Stored, cast_weights
from megatron_llama.config import ModelConfig

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of megatron-core's metadata.json."""
_ATTENTION, _MLP = ("core_attention", "linear_proj", "linear_qkv"), ("linear_fc1", "linear_fc2")
_EXTRA_STATES = (*(f"self_attention.{name}" for name in _ATTENTION), *(f"mlp.{name}" for name in _MLP))
"""Modules with an extra state, which is empty without FP8."""


def write_foreign(
    out: Path, kind: str, source: Stored, model: ModelConfig, dtype: str, progress: Callable[[int, int], None] | None
) -> tuple[list[str], int]:
    """Write the weights of ``model``; return the names of the files and the bytes of the weights.

    Args:
        kind: dcp: torchtitan's names; torch_dist: megatron-core's names, in ``out/release``.
        dtype: A name in EXPORT_DTYPES.
        progress: Called with the bytes of weights written and their total.
    """
    names, objects, folder = torchtitan_names(model), dict[str, io.BytesIO](), out
    if kind != DCP:
        names, objects, folder = megatron_names(model), _extra_states(model), out / "release"
    size = _write(folder, source, names, EXPORT_DTYPES[dtype], objects, progress)
    if kind != DCP:
        # Megatron's pointer to a release: weights without a step.
        torch.save({"iteration": 0, "checkpoint_version": 3.0}, folder / COMMON)
        (folder / "metadata.json").write_text(json.dumps(_BACKENDS), encoding="utf-8")
        (out / "latest_checkpointed_iteration.txt").write_text("release", encoding="ascii")
    return sorted(path.name for path in folder.glob("*.distcp")), size


def _write(
    folder: Path,
    source: Stored,
    names: Names,
    dtype: torch.dtype,
    objects: Mapping[str, io.BytesIO],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write a DCP folder; return the bytes of the weights."""
    tensors = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in names.shapes.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    planner = _Planner(source, names, dtype, size, progress)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                {**tensors, **objects},
                storage_writer=dcp.FileSystemWriter(folder, thread_count=1, sync_files=True),
                planner=planner,
                no_dist=True,
            )
        except CheckpointException as error:  # of one process; after a failed write torch.save raises another error
            failure = next(iter(error.failures.values()))[0]
            raise (failure.__context__ if isinstance(failure.__context__, OSError) else failure) from None
    return size


class _Planner(dcp.DefaultSavePlanner):
    """A planner that reads a tensor when it is written."""

    def __init__(
        self, source: Stored, names: Names, dtype: torch.dtype, size: int, progress: Callable[[int, int], None] | None
    ) -> None:
        super().__init__()
        self._source, self._names, self._dtype, self._size, self._progress = source, names, dtype, size, progress
        self._written = 0

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """Return bytes unchanged: megatron-core's objects are serialized already."""
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the values of an item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        key = write_item.index.fqn
        values = torch.empty(self._names.shapes[key], dtype=self._dtype)
        for name, runs in self._names.runs.items():
            for run in runs:
                if run.key == key:
                    part = self._source.read(name, run.offset, run.size, torch.float32)
                    _place(values, run, cast_weights(name, part, self._dtype))
        self._written += values.nbytes
        if self._progress is not None:
            self._progress(self._written, self._size)
        return values


def _place(values: torch.Tensor, run: TensorPart, part: torch.Tensor) -> None:
    """Copy ``part`` to its place in another program's tensor."""
    whole = values[run.lead] if run.lead else values
    rows = slice(run.start[0], run.start[0] + run.step * (run.size[0] - 1) + 1, run.step)
    others = tuple(slice(o, o + n) for o, n in zip(run.start[1:], run.size[1:], strict=True))
    whole[(rows, *others)] = part


def _extra_states(model: ModelConfig) -> dict[str, io.BytesIO]:
    """Return megatron-core's extra states, which it requires on load."""
    states, layers = {}, model.num_hidden_layers
    for module in _EXTRA_STATES:
        for layer in range(layers):
            content = io.BytesIO()
            torch.save([None], content)
            states[f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"] = content
    return states
