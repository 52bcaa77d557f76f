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

from megatron_llama.arch.checkpoint_formats import COMMON, DCP
from megatron_llama.arch.foreign_names import Names, TensorPart, megatron_names, torchtitan_names
from megatron_llama.checkpoint import export
from megatron_llama.checkpoint.adapter import finetune_of
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.stored_tensors import Stored
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.settings import MODEL_TYPES

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of megatron-core's metadata.json."""
_EXTRA_STATES = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules with an extra state, which is empty without FP8."""


def export_foreign(
    checkpoint: Path,
    out: Path,
    kind: str,
    dtype: str = "auto",
    *,
    merge: bool = False,
    base: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> export.Exported:
    """Write the folder ``out``, which appears when it is complete.

    Args:
        out: A folder that does not exist or is empty.
        kind: dcp: torchtitan's names; torch_dist: megatron-core's names, in ``out/release``.
        dtype: auto: dtype of the run's ``init_from`` folder, otherwise float32.
        merge: Merge the LoRA adapter into its base model.
        base: Folder of the base model; default: ``init_from`` of the run.
        progress: Called with the bytes of weights written and their total.

    Raises:
        ConfigError: The options do not match the checkpoint, or ``out`` exists.
        CorruptFile: The checkpoint is damaged.
    """
    export.check_output(out)
    manifest = read_manifest(checkpoint)
    model, finetune = export.model_of(manifest), finetune_of(manifest)
    export.check_options(checkpoint, model, finetune, merge, base)
    if finetune.method == "lora" and not merge:
        rule = "is a LoRA checkpoint, and this format has no adapters"
        raise ConfigError([Problem("--format", kind, rule, "add --merge, or write --format hf")])
    if kind == DCP and model.model_type != MODEL_TYPES[0]:
        rule = f"writes torchtitan's Llama, and this model is a {model.model_type}"
        raise ConfigError([Problem("--format", kind, rule, "write --format hf or torch_dist")])
    source, _ = export.open_source(manifest, False, merge, base)
    name = manifest.state.dtype if dtype == "auto" else dtype
    name = name if name in export.DTYPES else "float32"
    with export.writing(out) as partial:
        names = torchtitan_names(model) if kind == DCP else megatron_names(model)
        folder = partial if kind == DCP else partial / "release"
        size = _write(folder, source, names, export.DTYPES[name], {} if kind == DCP else _extra_states(model), progress)
        if kind != DCP:
            # Megatron's pointer to a release: weights without a step.
            torch.save({"iteration": 0, "checkpoint_version": 3.0}, folder / COMMON)
            (folder / "metadata.json").write_text(json.dumps(_BACKENDS), encoding="utf-8")
            (partial / "latest_checkpointed_iteration.txt").write_text("release", encoding="ascii")
        files = sorted(path.name for path in folder.glob("*.distcp"))
    return export.Exported(out, name, files, size, tokenizer=False)


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
        except CheckpointException as error:  # of one process: its own error is the reason
            raise next(iter(error.failures.values()))[0] from None
    return size


class _Planner(dcp.DefaultSavePlanner):
    """A planner that reads a tensor when it is written."""

    def __init__(
        self,
        source: Stored,
        names: Names,
        dtype: torch.dtype,
        size: int,
        progress: Callable[[int, int], None] | None,
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
                    _place(values, run, export.cast_weights(name, part, self._dtype))
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
