"""Checks of the files, folders and packages that a config names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from megatron_llama.arch.shapes import head_dim, kv_heads
from megatron_llama.config.data_prefixes import MASK_SUFFIX, named_paths, record_files
from megatron_llama.config.hf_config import NAME_A_FOLDER, different_shape, other_than_llama, read_hf_config
from megatron_llama.config.hub import DATASET, or_fetch_it
from megatron_llama.config.precision import QUANTIZED_BITS
from megatron_llama.config.problems import Problem, nearest, shown
from megatron_llama.config.settings import Config, DataConfig

Exists = Callable[[str], bool]
TORCHAO = "0.18."
"""The version series in pyproject.toml; quantizers' names change between series."""


def check_paths(config: Config, exists: Exists) -> list[Problem]:
    """Everything that the config names and that is not there, or is not what it should be."""
    return [
        *check_data(config, exists),
        *_schedule_package(config),
        *_quantizer(config),
        *_wandb(config),
        *_checkpoint(config, exists),
        *_starting_weights(config, exists),
    ]


def check_data(config: Config, exists: Exists) -> list[Problem]:
    """Datasets and tokenizer that are not there; ``data.prepare`` is what makes them."""
    if config.data.mock:
        return []
    made_here = config.data.prepare is not None
    return [replace(problem, only_here=made_here) for problem in _data(config, exists)]


def _data(config: Config, exists: Exists) -> Iterator[Problem]:
    """The problems of files of records, datasets and the tokenizer."""
    data, records = config.data, record_files(config.data)
    no_file = f"there is no such file (seen from {os.getcwd()})"
    for name, path in records:
        if not exists(path):
            yield Problem(name, path, no_file, "write the path of a file of records, or of a dataset")
    for name, path in named_paths(data):
        if (name, path) not in records:
            yield from _dataset(data, name, path, exists)
            if data.kind == "sft" and exists(path + ".idx"):  # without the set itself, one message is enough
                yield from _dataset(data, name, path + MASK_SUFFIX, exists)
    if data.tokenizer is not None and not exists(data.tokenizer):
        instead = f"make it with: {data.prepare}" if data.prepare else "write data.tokenizer=null, or its path"
        yield Problem("data.tokenizer", data.tokenizer, no_file, instead + or_fetch_it(data.tokenizer))


def _dataset(data: DataConfig, name: str, path: str, exists: Exists) -> Iterator[Problem]:
    """The problem of an indexed dataset that lacks one of its two files."""
    missing = [suffix for suffix in (".bin", ".idx") if not exists(path + suffix)]
    if not missing:
        return
    rule = f"there is no {path}{' and no '.join(missing)} (seen from {os.getcwd()})"
    stem, suffix = os.path.splitext(path)
    if suffix in (".bin", ".idx"):
        instead = f"write {name}=[{stem}], without {suffix}"
    elif data.prepare:
        instead = f"make it with: {data.prepare}"
    elif data.kind == "sft":
        instead = "make it with python data_prep/sft.py, which writes a dataset and its loss masks (docs/sft_data.md)"
        instead += "" if path.endswith(MASK_SUFFIX) else or_fetch_it(path, DATASET)
    else:
        instead = "write the path of an indexed dataset without .bin and .idx, or data=mock for made-up tokens"
    yield Problem(name, path, rule, instead)


def _starting_weights(config: Config, exists: Exists) -> Iterator[Problem]:
    folder = config.init_from
    if folder is None:
        return
    if not exists(folder):
        rule = f"there is no such folder (seen from {os.getcwd()})"
        instead = (
            f"download the model into it (hf download OWNER/NAME --local-dir {shlex.quote(folder)}), or write the "
            f"folder that holds config.json and the .safetensors files{or_fetch_it(folder)}"
        )
        yield Problem("init_from", folder, rule, instead, only_here=True)
        return
    if not exists(os.path.join(folder, "config.json")):
        rule = "there is no config.json in it, so it is no Hugging Face model folder"
        yield Problem("init_from", folder, rule, NAME_A_FOLDER)
        return
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return  # this plan is for another machine
    ours = {**asdict(config.model), "num_key_value_heads": kv_heads(config.model), "head_dim": head_dim(config.model)}
    try:
        content = read_hf_config(folder)
    except ValueError as error:
        yield Problem("init_from", folder, str(error), NAME_A_FOLDER)
        return
    for clause in other_than_llama(content):
        yield Problem("init_from", folder, f"is no Llama of this kind: {clause}", "name another folder")
    if different := different_shape(ours, content):
        found = ", ".join(f"{key} is {shown(theirs)}, not {shown(ours)}" for key, (ours, theirs) in different.items())
        rule = f"has another shape than model={config.model.name}: {found}"
        instead = " ".join(shlex.quote(f"model.{key}={shown(theirs)}") for key, (_, theirs) in different.items())
        yield Problem("init_from", folder, rule, f"write {instead}, or the model= of its shape")


def _checkpoint(config: Config, exists: Exists) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not exists(resume):
        advice = nearest(resume, ("auto", "never")) or "auto, never, or the path of a checkpoint"
        rule = "is neither auto nor never, and there is no such checkpoint"
        yield Problem("checkpoint.resume", resume, rule, f"write checkpoint.resume={advice}")


def _quantizer(config: Config) -> Iterator[Problem]:
    """torchao, which quantizes frozen weights; found without importing it, which takes seconds."""
    kind = config.finetune.frozen_dtype
    if config.finetune.method != "lora" or kind not in QUANTIZED_BITS:
        return
    try:
        found = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if not found.startswith(TORCHAO):
        rule = f"needs torchao {TORCHAO}x, and {f'torchao {found}' if found else 'no torchao'} is installed"
        advice = "pip install 'megatron_llama[quantize]', or write finetune.frozen_dtype=bf16"
        yield Problem("finetune.frozen_dtype", kind, rule, advice, only_here=True)


def _wandb(config: Config) -> Iterator[Problem]:
    """The package wandb; found without importing it, which takes a second."""
    mode = config.logging.wandb
    if mode != "off" and importlib.util.find_spec("wandb") is None:
        advice = "pip install 'megatron_llama[wandb]', or write logging.wandb=off"
        yield Problem("logging.wandb", mode, "the package wandb is not installed", advice, only_here=True)


def _schedule_package(config: Config) -> Iterator[Problem]:
    """Looks for the package only: looking for the class would import it, and torch with it."""
    target = str(config.optim.schedule.get("_target_") or "megatron_llama")
    package = target.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        advice = "install it, or write optim=cosine, linear, constant or wsd"
        yield Problem("optim.schedule._target_", target, f"the package {package} is not installed", advice)
