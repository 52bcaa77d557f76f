"""Contents and missing parts of a checkpoint folder of any format, without a config of its model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_llama.arch import recognize_format as formats
from megatron_llama.checkpoint.foreign.detect import read_foreign
from megatron_llama.checkpoint.foreign.tensors import Foreign
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

    rows: list[tuple[str, str]]
    """(part, value): the folder, of the newest checkpoint in a folder with several, the format, and the contents."""
    missing: list[str] = field(default_factory=list)
    """Parts that a complete checkpoint of the format has."""


def describe(folder: Path) -> Description:
    """Return the contents of a checkpoint.

    Raises:
        ConfigError: The folder has no known format.
        CorruptFile: The checkpoint is damaged or malicious.
    """
    recognized = formats.recognize(folder) or formats.recognize(folder / "checkpoints")
    if recognized is None:
        rule = "there is no such folder" if not folder.exists() else "has no checkpoint of a known format"
        raise ConfigError([Problem("PATH", str(folder), rule, "name the folder of a checkpoint, or of a run")])
    result = Description([("folder", str(recognized.folder)), ("format", formats.LABELS[recognized.format])])
    if recognized.format == formats.OURS:
        _ours(result, recognized.folder)
    if recognized.format == formats.HF:
        tensors = all_tensors(recognized.folder)
        _weights(result, tensors, len({tensor.file for tensor in tensors.values()}))
    if recognized.format in (formats.HF, formats.TRAINER):
        _hf_files(result, recognized.folder)
    if recognized.is_foreign:
        _foreign(result, read_foreign(recognized))
    return result


def _ours(result: Description, folder: Path) -> None:
    manifest = read_manifest(folder)
    state, tensors = manifest.state, manifest.stored.tensors
    _weights(result, {n: t for n, t in tensors.items() if not n.startswith((STATES, "random."))}, len(manifest.files))
    kinds = sorted({name.split(".")[1] for name in tensors if name.startswith(STATES)})
    result.rows.append(("optimizer", f"{state.optimizer}: {', '.join(kinds)}" if kinds else "no states"))
    result.rows += [("step", f"{state.step:,}"), ("samples", f"{state.consumed_samples:,}")]
    result.rows.append(("saved by", f"{state.world_size} ranks"))
    if state.val_loss is not None:
        result.rows.append(("validation loss", f"{state.val_loss:.4f}"))
    manifest.check_sizes()
    if not kinds and state.step:
        result.missing.append("optimizer states")


def _hf_files(result: Description, folder: Path) -> None:
    """Describe the files of a Hugging Face folder in addition to its weights."""
    if not (folder / "config.json").is_file():
        result.missing.append("config.json: write the model's settings")
    else:
        try:
            result.rows.append(("model type", str(read_hf_config(str(folder)).get("model_type"))))
        except ValueError as error:
            raise CorruptFile(f"{folder}/config.json: {error}") from None
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        result.missing.append("a tokenizer")


def _foreign(result: Description, source: Foreign) -> None:
    """Describe another program's checkpoint. A model that is not supported is a missing part."""
    weights = source.weights
    _weights(result, weights, len({chunk.file for tensor in weights.values() for chunk in tensor.chunks}))
    if source.states:
        result.rows.append(("optimizer", f"Adam's moments of {source.moments} of {len(weights)} tensors"))
    for label, value in (("step", source.step), ("samples", source.samples), ("learning rate", source.lr)):
        if value is not None:
            result.rows.append((label, f"{value:,}" if isinstance(value, int) else f"{value:g}"))
    if source.facts:
        facts = [f"{name}={format_value(value).replace(', ', ',')}" for name, value in source.facts.items()]
        result.rows.append(("settings", " ".join(facts)))
    result.missing += [*source.missing, *(problem.rule for problem in source.problems)]
    if not weights or source.moments < len(weights):
        result.missing.append(f"{source.without_moments}: the checkpoint serves init_from, not checkpoint.resume")


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
