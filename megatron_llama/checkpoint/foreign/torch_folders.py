"""Checkpoints of torchtitan, accelerate's FSDP and Hugging Face's Trainer: torch's own formats, other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.arch import recognize_format as formats
from megatron_llama.arch.foreign_tensor_layouts import Names, plain_names, torchtitan_names
from megatron_llama.checkpoint.foreign.dcp_files import DcpFolder, open_dcp
from megatron_llama.checkpoint.foreign.megatron import integer, joined
from megatron_llama.checkpoint.foreign.source_settings import read_config_json, read_group
from megatron_llama.checkpoint.foreign.tensors import (
    MOMENTS,
    Foreign,
    SourceChunk,
    SourceTensor,
    map_tensors,
    moment_names,
)
from megatron_llama.checkpoint.foreign.unpickle import check_stored, load_pickle
from megatron_llama.checkpoint.hf_folder import SafetensorsFiles, open_hf_folder
from megatron_llama.checkpoint.tensor_source import CorruptFile, read_json
from megatron_llama.config import ConfigError, ModelConfig, Problem
from megatron_llama.config.hf_config import MODEL_TYPES

_TITAN, _PLAIN = "tok_embeddings.weight", "model.embed_tokens.weight"
_OPTIMIZER, STATE_NAMES = "optimizer.", "optimizer.state.{name}.{kind}"
OPTIMIZER_FILE, SCHEDULER_FILES = "optimizer.pt", ("scheduler.pt", "scheduler.bin")


def open_dcp_folder(folder: Path, model: ModelConfig) -> Foreign:
    """Open a DCP folder with torchtitan's or Hugging Face's names, or a folder of accelerate's FSDP.

    Raises:
        ConfigError: The folder has other tensors.
        CorruptFile: The folder is damaged or malicious.
    """
    dcp, states = open_parts(folder)
    is_fsdp = dcp is not states
    names = names_in(folder, model, dcp.tensors)
    moments = moment_names(STATE_NAMES, states.tensors, model_prefix(names))
    tensors = map_tensors(folder, {**states.tensors, **dcp.tensors}, names, moments)
    result = Foreign(formats.FSDP if is_fsdp else formats.DCP, tensors)
    read_config_json(result, folder)
    result.step = integer(dcp.value("train_state.step"), dcp.value("step"))
    _describe_optimizer(result, states, names)
    if is_fsdp:  # with or without the Trainer's files
        read_trainer_files(result, folder)
        result.step = result.updates if result.step is None else result.step
    if result.step is None:
        result.missing.append("the step" if is_fsdp else "the step (train_state.step)")
    result.missing.append("the position in the data")
    return result


def open_parts(folder: Path) -> tuple[DcpFolder, DcpFolder]:
    """Return the model and the optimizer: of accelerate's FSDP, which may have no optimizer, or twice a DCP folder."""
    if not (folder / formats.FSDP_MODEL / formats.METADATA).is_file():
        dcp = open_dcp(folder)
        return dcp, dcp
    states = folder / formats.FSDP_OPTIMIZER
    has_states = (states / formats.METADATA).is_file()
    return open_dcp(folder / formats.FSDP_MODEL), open_dcp(states) if has_states else DcpFolder(states, {}, {})


def open_trainer(folder: Path, model: ModelConfig) -> Foreign:
    """Open a folder ``checkpoint-100`` of Hugging Face's Trainer.

    Raises:
        ConfigError: The folder has other tensors.
        CorruptFile: The folder is damaged or malicious.
    """
    files = open_hf_folder(folder, model)
    names = plain_names(model)
    sources = {}
    for name, tensor in files.tensors.items():
        offset = (0,) * len(tensor.shape)
        load = partial(files.read, name, offset, tensor.shape)
        chunk = SourceChunk(offset, tensor.shape, folder / tensor.file, load)
        sources[name] = SourceTensor(tensor.dtype, tensor.shape, [chunk])
    states, group, step = _read_optimizer(folder, files)
    moments = moment_names("{kind}.{name}")
    result = Foreign(formats.TRAINER, map_tensors(folder, {**sources, **states}, names, moments))
    result.updates = step
    read_group(result, group)
    read_config_json(result, folder)
    read_trainer_files(result, folder)
    if not result.has_moments:
        result.missing.append(f"Adam's moments ({OPTIMIZER_FILE})")
    result.missing.append("the position in the data")
    return result


def names_in(folder: Path, model: ModelConfig, keys: Collection[str]) -> Names:
    """Return the names by which the folder stores the model. Raises ConfigError for unknown names."""
    for prefix in ("", "model.", "model.module.", "module."):
        if prefix + _PLAIN in keys:
            return plain_names(model, prefix)
    for prefix in ("", "model."):
        if prefix + _TITAN in keys:
            if model.model_type != MODEL_TYPES[0]:
                rule = f"has torchtitan's names of a Llama, and model.model_type is {model.model_type}"
                raise ConfigError([Problem("model", str(folder), rule, f"write model.model_type={MODEL_TYPES[0]}")])
            return torchtitan_names(model, keys, prefix)
    some = ", ".join(sorted(keys)[:3]) or "no tensors"
    rule = f"has neither {_PLAIN} (Hugging Face's name) nor {_TITAN} (torchtitan's), but {some}"
    raise ConfigError([Problem("model", str(folder), rule, "name a checkpoint of a Llama")])


def model_prefix(names: Names) -> str:
    prefixes = ("model.module.", "module.", "model.")
    return next((p for p in prefixes if all(key.startswith(p) for key in names.shapes)), "")


def _describe_optimizer(result: Foreign, states: DcpFolder, names: Names) -> None:
    """Set updates, learning rate and facts from the optimizer's values."""
    prefix = model_prefix(names)
    key = next(iter(names.shapes))  # the embedding
    result.updates = integer(*(states.value(f"{_OPTIMIZER}state.{n}.step") for n in (key, key.removeprefix(prefix))))
    groups = states.value(f"{_OPTIMIZER}param_groups")
    listed = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    for group in listed or [_flat_group(states, {key, key.removeprefix(prefix), "0"})]:
        read_group(result, group)
    norm = next((name for name, shape in names.shapes.items() if len(shape) == 1), key)
    decay = _flat_group(states, {norm, norm.removeprefix(prefix)}).get("weight_decay")
    if decay and norm != key:
        result.changes.append(("weight_decay of norms", decay, 0))
    if not result.has_moments:
        result.missing.append("Adam's moments")


def _flat_group(states: DcpFolder, names: Collection[str]) -> dict[str, Any]:
    """Return the parameter group of a tensor, whose values torch stores under separate names."""
    group = {}
    for whole in (*states.objects, *states.tensors):
        name, _, value = whole.removeprefix(f"{_OPTIMIZER}param_groups.").rpartition(".")
        if name in names and whole.startswith(f"{_OPTIMIZER}param_groups."):
            stored = states.value(whole)
            is_number = isinstance(stored, torch.Tensor) and stored.numel() == 1
            group[value] = stored.item() if is_number else stored
    return group


def read_trainer_files(result: Foreign, folder: Path) -> None:
    """Set the step from trainer_state.json or the scheduler's file."""
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


def _read_optimizer(
    folder: Path, files: SafetensorsFiles
) -> tuple[dict[str, SourceTensor], Mapping[str, Any], int | None]:
    """Return the moments by ``exp_avg.NAME``, the first parameter group, and the updates.

    The Trainer has two groups, with and without weight decay. Their parameters have consecutive numbers, in the order
    of the model: first all matrices, then norms and biases. Raises CorruptFile if shapes contradict this order.
    """
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        return {}, {}, None
    content = load_pickle(path, path)
    groups = content.get("param_groups") if isinstance(content, dict) else None
    states = content.get("state") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not isinstance(states, dict) or not all(isinstance(g, dict) for g in groups):
        raise CorruptFile(f"{path}: is no state of a torch optimizer")
    listed = [group.get("params") for group in groups]
    numbers = [number for group in listed if isinstance(group, list) for number in group]
    if not all(isinstance(states.get(number, {}), dict) for number in numbers if isinstance(number, int)):
        raise CorruptFile(f"{path}: is no state of a torch optimizer")
    names = sorted(files.tensors, key=lambda name: len(files.tensors[name].shape) != 2)  # stable
    if len(numbers) != len(names):
        raise CorruptFile(f"{path}: has {len(numbers)} parameters; the model has {len(names)}")
    sources, stored, steps = dict[str, SourceTensor](), dict[str, torch.Tensor](), set[int]()
    for number, name in zip(numbers, names, strict=True):
        state = states.get(number, {}) if isinstance(number, int) else {}
        for kind in MOMENTS:
            values = state.get(kind)
            if values is None:
                continue
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != files.tensors[name].shape:
                rule = f"{kind} of parameter {number} has not the shape of {name}"
                raise CorruptFile(f"{path}: {rule}; the order of its parameters is not the Trainer's")
            stored[f"{kind}.{name}"] = values
            sources[f"{kind}.{name}"] = joined(name, [values], [path], None)
        if (step := integer(state.get("step"))) is not None:
            steps.add(step)
    check_stored(path, stored)
    return sources, next(iter(groups), {}), max(steps, default=None)
