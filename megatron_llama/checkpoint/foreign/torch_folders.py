"""Checkpoints of torchtitan, accelerate's FSDP and Hugging Face's Trainer: torch's own formats, other names.

Readers of folders raise CorruptFile for damaged, malicious and missing files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch import recognize_format as formats
from megatron_llama.arch.foreign_tensor_layouts import Names, plain_names, torchtitan_names
from megatron_llama.checkpoint.foreign.dcp_files import DcpFolder, open_dcp
from megatron_llama.checkpoint.foreign.megatron import integer, joined
from megatron_llama.checkpoint.foreign.source_settings import read_config_json, read_group
from megatron_llama.checkpoint.foreign.tensors import MOMENTS, Foreign, SourceChunk, SourceTensor, weight_names
from megatron_llama.checkpoint.foreign.unpickle import check_stored, load_pickle
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, all_tensors
from megatron_llama.checkpoint.tensor_source import CorruptFile, read_json
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.hf_config import MODEL_TYPES

_TITAN, _PLAIN = "tok_embeddings.weight", "model.embed_tokens.weight"
_OPTIMIZER = "optimizer."
OPTIMIZER_FILE, SCHEDULER_FILES = "optimizer.pt", ("scheduler.pt", "scheduler.bin")
_NO_POSITION = "the position in the data, which the format does not store"


def read_dcp(folder: Path) -> Foreign:
    """Read a DCP folder with torchtitan's or Hugging Face's names."""
    dcp = open_dcp(folder)
    result = Foreign(formats.DCP, folder)
    _read_parts(result, dcp, dcp)
    result.missing.append("the position in the data (torchtitan's dataloader is not read)")
    return result


def read_fsdp(folder: Path) -> Foreign:
    """Read a folder of accelerate's FSDP, with or without the Trainer's files, which may have no optimizer."""
    states = folder / formats.FSDP_OPTIMIZER
    has_states = (states / formats.METADATA).is_file()
    result = Foreign(formats.FSDP, folder)
    model = open_dcp(folder / formats.FSDP_MODEL)
    _read_parts(result, model, open_dcp(states) if has_states else DcpFolder(states, {}, {}))
    _read_trainer_files(result)
    result.step = result.updates if result.step is None else result.step
    result.missing.append(_NO_POSITION)
    return result


def _read_parts(result: Foreign, model: DcpFolder, optimizer: DcpFolder) -> None:
    """Set tensors, step and settings from the model's and the optimizer's DCP folders."""
    result.sources = {**optimizer.tensors, **model.tensors}
    result.states = f"{_OPTIMIZER}state.{{name}}.{{kind}}"
    result.names, result.prefix, embedding = naming(result.folder, model.tensors)
    read_config_json(result, result.folder)
    result.step = integer(model.value("train_state.step"), model.value("step"))
    both = [embedding, embedding.removeprefix(result.prefix)]
    result.updates = integer(*(optimizer.value(f"{_OPTIMIZER}state.{name}.step") for name in both))
    groups = optimizer.value(f"{_OPTIMIZER}param_groups")
    listed = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    for group in listed or [_flat_group(optimizer, {*both, "0"})]:
        read_group(result, group)
    norm = next((name for name in weight_names(model.tensors) if len(model.tensors[name].shape) == 1), "")
    if norm and (decay := _flat_group(optimizer, {norm, norm.removeprefix(result.prefix)}).get("weight_decay")):
        result.changes.append(("weight_decay of norms", decay, 0))


def read_trainer(folder: Path) -> Foreign:
    """Read a folder ``checkpoint-100`` of Hugging Face's Trainer. Raises ConfigError without weights in floats."""
    files = SafetensorsFiles(folder, all_tensors(folder))
    result = Foreign(formats.TRAINER, folder, states="{kind}.{name}")
    result.without_moments = f"Adam's moments ({OPTIMIZER_FILE})"
    for name, tensor in files.tensors.items():
        offset = (0,) * len(tensor.shape)
        load = partial(files.read, name, offset, tensor.shape)
        chunk = SourceChunk(offset, tensor.shape, folder / tensor.file, load)
        result.sources[name] = SourceTensor(tensor.dtype, tensor.shape, [chunk])
    _read_optimizer(result)
    read_config_json(result, folder)
    _read_trainer_files(result)
    result.missing.append(_NO_POSITION)
    return result


def naming(folder: Path, keys: Collection[str]) -> tuple[Callable[[ModelConfig], Names], str, str]:
    """Return the names by which the folder stores a model, as a function, their prefix, and the embedding's name."""
    for prefix in ("", "model.", "model.module.", "module."):
        if prefix + _PLAIN in keys:
            return partial(plain_names, prefix=prefix), prefix, prefix + _PLAIN
    for prefix in ("", "model."):
        if prefix + _TITAN in keys:
            return partial(_titan_names, folder, keys, prefix), prefix, prefix + _TITAN

    def refuse(model: ModelConfig) -> Names:
        some = ", ".join(sorted(keys)[:3]) or "no tensors"
        rule = f"has neither {_PLAIN} (Hugging Face's name) nor {_TITAN} (torchtitan's), but {some}"
        raise ConfigError([Problem("model", str(folder), rule, "name a checkpoint of a Llama")])

    return refuse, "", ""


def _titan_names(folder: Path, keys: Collection[str], prefix: str, model: ModelConfig) -> Names:
    if model.model_type != MODEL_TYPES[0]:
        rule = f"has torchtitan's names of a Llama, and model.model_type is {model.model_type}"
        raise ConfigError([Problem("model", str(folder), rule, f"write model.model_type={MODEL_TYPES[0]}")])
    return torchtitan_names(model, keys, prefix)


def _flat_group(states: DcpFolder, names: Collection[str]) -> dict[str, Any]:
    """Return the parameter group of a tensor, whose values torch stores under separate names."""
    group = {}
    for whole in (*states.objects, *states.tensors):
        name, _, value = whole.removeprefix(f"{_OPTIMIZER}param_groups.").rpartition(".")
        if name in names and whole.startswith(f"{_OPTIMIZER}param_groups."):
            stored = states.value(whole)
            group[value] = stored.item() if isinstance(stored, torch.Tensor) and stored.numel() == 1 else stored
    return group


def _read_trainer_files(result: Foreign) -> None:
    """Set the step from trainer_state.json or the scheduler's file."""
    folder = result.folder
    if (folder / formats.TRAINER_STATE).is_file():
        content = read_json(folder / formats.TRAINER_STATE)
        result.step = integer(content.get("global_step")) if isinstance(content, dict) else None
        if result.step is None:
            raise CorruptFile(f"{folder / formats.TRAINER_STATE}: has no global_step")
    for name in SCHEDULER_FILES:
        if (folder / name).is_file():
            content = load_pickle(folder / name, folder / name)
            content = content if isinstance(content, dict) else {}
            result.step = integer(result.step, content.get("last_epoch"))
            if isinstance(rates := content.get("_last_lr"), list):
                read_group(result, {"lr": next(iter(rates), None)})
            return
    result.missing.append("the scheduler (scheduler.pt)")


def _read_optimizer(result: Foreign) -> None:
    """Set the moments by parameter number, the hyperparameters of the first group, and the updates.

    The Trainer has two groups, with and without weight decay. Their parameters have consecutive numbers, in the order
    of the model: first all matrices, then norms and biases. ``name_states`` raises CorruptFile if shapes contradict it.
    """
    path = result.folder / OPTIMIZER_FILE
    if not path.is_file():
        return
    content = load_pickle(path, path)
    groups = content.get("param_groups") if isinstance(content, dict) else None
    states = content.get("state") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not isinstance(states, dict) or not all(isinstance(g, dict) for g in groups):
        raise CorruptFile(f"{path}: is no state of a torch optimizer")
    listed = [group.get("params") for group in groups]
    numbers = [number for group in listed if isinstance(group, list) for number in group]
    by_number = {number: states.get(number, {}) for number in numbers if isinstance(number, int)}
    if not all(isinstance(state, dict) for state in by_number.values()):
        raise CorruptFile(f"{path}: is no state of a torch optimizer")
    moments = {f"{kind}.{number}": state.get(kind) for number, state in by_number.items() for kind in MOMENTS}
    tensors = {name: values for name, values in moments.items() if isinstance(values, torch.Tensor)}
    check_stored(path, tensors)
    result.sources |= {name: joined(name, [values], [path], None) for name, values in tensors.items()}
    result.updates = max(filter(None, (integer(state.get("step")) for state in by_number.values())), default=None)
    read_group(result, next(iter(groups), {}))

    def name_states(names: Names) -> None:
        order = sorted(names.shapes, key=lambda name: len(names.shapes[name]) != 2)  # stable
        if len(numbers) != len(order):
            raise CorruptFile(f"{path}: has {len(numbers)} parameters; the model has {len(order)}")
        for (number, name), kind in product(zip(numbers, order, strict=True), MOMENTS):
            if moments.get(f"{kind}.{number}") is None:
                continue
            moment = result.sources.pop(f"{kind}.{number}", None)
            if moment is None or moment.shape != names.shapes[name]:
                rule = f"{kind} of parameter {number} has not the shape of {name}"
                raise CorruptFile(f"{path}: {rule}; the order of its parameters is not the Trainer's")
            result.sources[f"{kind}.{name}"] = moment

    result.name_states = name_states
