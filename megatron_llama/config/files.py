"""Whether what a config names is on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from megatron_llama.config.counting import kv_heads
from megatron_llama.config.problems import Problem, nearest
from megatron_llama.config.settings import Config, ModelConfig
from megatron_llama.config.values import weights_and_paths

Exists = Callable[[str], bool]


def check_data(config: Config, exists: Exists) -> list[Problem]:
    """Datasets and tokenizer that are not there; ``data.prepare`` is what makes them."""
    if config.data.mock:
        return []
    return [*_datasets(config, exists), *_tokenizer(config, exists)]


def check_files(config: Config, exists: Exists) -> list[Problem]:
    """Everything else that a config may name: starting weights, a checkpoint, a schedule's package."""
    return [*_starting_weights(config, exists), *_checkpoint(config, exists), *_schedule_package(config)]


def _datasets(config: Config, exists: Exists) -> Iterator[Problem]:
    for path in weights_and_paths(config.data.prefixes)[1]:
        missing = [suffix for suffix in (".bin", ".idx") if not exists(path + suffix)]
        if not missing:
            continue
        rule = f"there is no {path}{' and no '.join(missing)} (seen from {os.getcwd()})"
        stem, suffix = os.path.splitext(path)
        if suffix in (".bin", ".idx"):
            instead = f"write data.prefixes=[{stem}], without {suffix}"
        elif config.data.prepare:
            instead = f"make it with: {config.data.prepare}"
        else:
            instead = "write the path of an indexed dataset without .bin and .idx, or data=mock for made-up tokens"
        yield Problem("data.prefixes", path, rule, instead)


def _tokenizer(config: Config, exists: Exists) -> Iterator[Problem]:
    path = config.data.tokenizer
    if path is not None and not exists(path):
        instead = (
            f"make it with: {config.data.prepare}" if config.data.prepare else "write data.tokenizer=null, or its path"
        )
        yield Problem("data.tokenizer", path, f"there is no such file (seen from {os.getcwd()})", instead)


def _starting_weights(config: Config, exists: Exists) -> Iterator[Problem]:
    folder = config.init_from
    if folder is None:
        return
    path = os.path.join(folder, "config.json")
    if not exists(path):
        rule = "there is no config.json in it, so it is no Hugging Face model folder"
        yield Problem("init_from", folder, rule, "write the folder that holds config.json and the .safetensors files")
        return
    different = _different_shape(config.model, _read_json(path))
    if different:
        found = ", ".join(f"{key} is {theirs}, not {ours}" for key, (ours, theirs) in different.items())
        instead = "write " + " ".join(f"model.{key}={theirs}" for key, (_, theirs) in different.items())
        yield Problem(
            "init_from",
            folder,
            f"has another shape than model={config.model.name}: {found}",
            f"{instead}, or the model= of its shape",
        )


def _different_shape(model: ModelConfig, theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where a Hugging Face config.json and our shape differ: {name: (ours, theirs)}."""
    rope = theirs.get("rope_parameters") or {}
    flat = {**theirs, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "rope_theta rms_norm_eps tie_word_embeddings"
    )
    different = {}
    for name in names.split():
        ours = kv_heads(model) if name == "num_key_value_heads" else getattr(model, name)
        if flat.get(name) is not None and flat[name] != ours:
            different[name] = (ours, flat[name])
    return different


def _read_json(path: str) -> dict[str, Any]:
    """The file's object; nothing where it can't be read, which the loader will say better."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _checkpoint(config: Config, exists: Exists) -> Iterator[Problem]:
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not exists(resume):
        guess = nearest(resume, ("auto", "never"))
        instead = (
            f"write checkpoint.resume={guess}"
            if guess
            else "write checkpoint.resume=auto, never, or the path of a checkpoint"
        )
        yield Problem(
            "checkpoint.resume", resume, "is neither auto nor never, and there is no such checkpoint", instead
        )


def _schedule_package(config: Config) -> Iterator[Problem]:
    """The package only: looking further would import it, and torch with it."""
    target = str(config.optim.schedule.get("_target_") or "megatron_llama")
    package = target.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        rule = f"the package {package} is not installed"
        yield Problem(
            "optim.schedule._target_", target, rule, "install it, or write optim=cosine, linear, constant or wsd"
        )
