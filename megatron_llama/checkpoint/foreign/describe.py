"""Contents and missing parts of a checkpoint folder of any format, without a config of its model."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_llama.arch import recognize_format as formats
from megatron_llama.checkpoint.foreign import megatron
from megatron_llama.checkpoint.foreign.dcp_files import DcpFolder, open_dcp
from megatron_llama.checkpoint.foreign.source_settings import read_config_json
from megatron_llama.checkpoint.foreign.tensors import MOMENTS, NO_SETTINGS, Foreign, ForeignTensors, weight_names
from megatron_llama.checkpoint.foreign.torch_files import READERS
from megatron_llama.checkpoint.foreign.torch_folders import OPTIMIZER_FILE, STATE_NAMES, open_parts, read_trainer_files
from megatron_llama.checkpoint.foreign.unpickle import load_pickle
from megatron_llama.checkpoint.hf_folder import all_tensors
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.checkpoint.rank_files import STATES
from megatron_llama.checkpoint.tensor_source import CorruptFile, StoredTensor
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.hf_config import read_hf_config
from megatron_llama.config.problems import format_value

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,6})\.")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass
class Description:
    """Contents of a checkpoint folder."""

    folder: Path
    """Folder of the checkpoint: the newest one in a folder with several."""
    label: str
    """Name of the format."""
    rows: list[tuple[str, str]] = field(default_factory=list)
    """(part, value)."""
    missing: list[str] = field(default_factory=list)
    """Parts that a complete checkpoint of the format has."""


def describe(folder: Path) -> Description:
    """Return the contents of a checkpoint.

    Raises:
        ConfigError: The folder has no known format.
        CorruptFile: The checkpoint is damaged or malicious.
    """
    recognized = formats.recognize(folder)
    if recognized is None and (folder / "checkpoints").is_dir():
        recognized = formats.recognize(folder / "checkpoints")
    if recognized is None:
        rule = "there is no such folder" if not folder.exists() else "has no checkpoint of a known format"
        raise ConfigError([Problem("PATH", str(folder), rule, "name the folder of a checkpoint, or of a run")])
    result = Description(recognized.folder, formats.LABELS[recognized.format])
    source = Foreign(recognized.format, ForeignTensors(recognized.folder, {}, {}))
    readers = {
        formats.OURS: _ours,
        formats.HF: _hf,
        formats.TRAINER: _trainer,
        formats.TORCH_DIST: _torch_dist,
        formats.RANKS: _ranks,
        **dict.fromkeys((formats.FSDP, formats.DCP), _dcp),
    }
    readers.get(recognized.format, _torch_files)(result, source)
    return result


def _ours(result: Description, source: Foreign) -> None:
    manifest = read_manifest(result.folder)
    state, tensors = manifest.state, manifest.stored.tensors
    weights = {n: t for n, t in tensors.items() if not n.startswith((STATES, "random."))}
    _weights(result, weights, len(manifest.files))
    kinds = sorted({name.split(".")[1] for name in tensors if name.startswith(STATES)})
    result.rows.append(("optimizer", f"{state.optimizer}: {', '.join(kinds)}" if kinds else "no states"))
    result.rows += [("step", f"{state.step:,}"), ("samples", f"{state.consumed_samples:,}")]
    result.rows.append(("saved by", f"{state.world_size} ranks"))
    if state.val_loss is not None:
        result.rows.append(("validation loss", f"{state.val_loss:.4f}"))
    manifest.check_sizes()
    if not kinds and state.step:
        result.missing.append("optimizer states")


def _hf(result: Description, source: Foreign) -> None:
    tensors = all_tensors(result.folder)
    _weights(result, tensors, len({tensor.file for tensor in tensors.values()}))
    if not (result.folder / "config.json").is_file():
        result.missing.append("config.json: write the model's settings")
    else:
        try:
            result.rows.append(("model type", str(read_hf_config(str(result.folder)).get("model_type"))))
        except ValueError as error:
            raise CorruptFile(f"{result.folder}/config.json: {error}") from None
    if not any((result.folder / name).is_file() for name in _TOKENIZERS):
        result.missing.append("a tokenizer")


def _trainer(result: Description, source: Foreign) -> None:
    _hf(result, source)
    read_config_json(source, result.folder)
    path = result.folder / OPTIMIZER_FILE
    content = load_pickle(path, path) if path.is_file() else {}
    states = content.get("state") if isinstance(content, dict) else None
    states = states if isinstance(states, dict) else {}
    complete = sum(1 for state in states.values() if isinstance(state, dict) and set(MOMENTS) <= state.keys())
    _moments(result, complete, len(states))
    read_trainer_files(source, result.folder)
    _progress(result, source)
    result.missing += source.missing + ["the position in the data, which the format does not store"]


def _torch_dist(result: Description, source: Foreign) -> None:
    dcp = open_dcp(result.folder)
    common = megatron.read_common(dcp)
    _dcp_weights(result, dcp)
    weights, pattern = weight_names(dcp.tensors), megatron.STATE_NAMES
    if not _count_moments(dcp, weights, pattern):  # NeMo 2 may omit the prefix of the weights
        weights = [name.removeprefix("module.") for name in weights]
    _moments(result, _count_moments(dcp, weights, pattern), len(weights))
    _settings(result, source, common)
    megatron.read_train_state(source, result.folder)
    _progress(result, source)
    result.missing += source.missing


def _ranks(result: Description, source: Foreign) -> None:
    files = formats.rank_folders(result.folder)
    contents = {rank: megatron.load_dict(path) for rank, path in sorted(files.items())}
    tensor_ranks, stages = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    result.rows.append(("files", f"{len(files)} of {tensor_ranks} tensor-parallel ranks and {stages} stages"))
    values = sum(t.numel() for r, c in contents.items() for t in megatron.weights_of_rank(c, files[r]).values())
    result.rows.append(("weights", f"{values:,} values, including copies of norms"))
    _settings(result, source, contents[min(contents)])
    _progress(result, source)
    result.missing += source.missing
    if len(files) < tensor_ranks * stages:
        result.missing.append(f"files of {tensor_ranks * stages - len(files)} ranks")
    result.missing.append("Adam's moments (this format is read for its weights only)")


def _dcp(result: Description, source: Foreign) -> None:
    dcp, states = open_parts(result.folder)
    _dcp_weights(result, dcp)
    names = set(weight_names(dcp.tensors))
    if source.format == formats.FSDP:
        names = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in states.tensors if ".state." in key}
    _moments(result, _count_moments(states, names, STATE_NAMES), len(names))
    read_config_json(source, result.folder)
    source.step = megatron.integer(dcp.value("train_state.step"), dcp.value("step"))
    position = "the position in the data (torchtitan's dataloader is not read)"
    if source.format == formats.FSDP:
        read_trainer_files(source, result.folder)
        position = "the position in the data, which the format does not store"
    _progress(result, source)
    result.missing += [*source.missing, position]


def _torch_files(result: Description, source: Foreign) -> None:
    try:
        sources, source = READERS[source.format](result.folder)
    except ConfigError as error:
        result.missing.append(error.problems[0].rule)
        return
    weights = {name: tensor for name, tensor in sources.items() if not name.startswith(MOMENTS)}
    _weights(result, weights, len({chunk.file for tensor in sources.values() for chunk in tensor.chunks}))
    if source.format == formats.DEEPSPEED:
        _moments(result, sum(all(f"{kind}.{name}" in sources for kind in MOMENTS) for name in weights), len(weights))
        _progress(result, source)
    elif not source.has_settings:
        result.missing.append(NO_SETTINGS)
    result.missing += source.missing


def _settings(result: Description, source: Foreign, content: Mapping[str, Any]) -> None:
    """Read Megatron's settings. A model that is not supported is a missing part."""
    try:
        megatron.describe_source(source, content, result.folder)
    except ConfigError as error:
        result.missing.append(error.problems[0].rule)


def _count_moments(dcp: DcpFolder, names: Collection[str], pattern: str) -> int:
    """Return how many of the weights ``names`` have all moments, whose names have this pattern."""
    keys = [[pattern.format(kind=kind, name=name) for kind in MOMENTS] for name in names]
    return sum(dcp.tensors.keys() >= set(both) for both in keys)


def _dcp_weights(result: Description, dcp: DcpFolder) -> None:
    names = weight_names(dcp.tensors)
    files = {chunk.file for name in names for chunk in dcp.tensors[name].chunks}
    _weights(result, {name: dcp.tensors[name] for name in names}, len(files))


def _weights(result: Description, tensors: Mapping[str, StoredTensor], files: int) -> None:
    values = sum(math.prod(tensor.shape) for tensor in tensors.values())
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    text = f"{len(tensors)} tensors, {values:,} values of {' and '.join(dtypes)}, {size / 1e6:,.1f} MB"
    result.rows.append(("weights", f"{text}, in {files} file{'s' * (files != 1)}"))
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    stacked = [t.shape[0] for name, t in tensors.items() if name.endswith("layers.mlp.linear_fc2.weight")]
    layers = stacked[0] if stacked else len(numbers)
    result.rows.append(("layers", str(layers)))
    if numbers and max(numbers) + 1 != layers:
        absent = [number for number in range(max(numbers)) if number not in numbers]
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        result.missing.append(f"layers {', '.join(map(str, absent[:8]))}{more}")


def _moments(result: Description, complete: int, expected: int) -> None:
    result.rows.append(("optimizer", f"Adam's moments of {complete} of {expected} tensors"))
    if not expected or complete < expected:
        result.missing.append("Adam's moments of all tensors: the checkpoint serves init_from, not checkpoint.resume")


def _progress(result: Description, source: Foreign) -> None:
    for label, value in (("step", source.step), ("samples", source.samples), ("learning rate", source.lr)):
        if value is not None:
            result.rows.append((label, f"{value:,}" if isinstance(value, int) else f"{value:g}"))
    if source.step is None:
        result.missing.append("the step")
    if not source.has_settings:
        result.missing.append(NO_SETTINGS)
    if source.facts:
        facts = [f"{name}={format_value(value).replace(', ', ',')}" for name, value in source.facts.items()]
        result.rows.append(("settings", " ".join(facts)))
