"""The next command, which a program of data_prep prints at its end: complete, and quoted for the shell."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.lib.output_files import read_manifest
from megatron_llama.config import ModelConfig
from megatron_llama.config.data_settings import PREFERENCE_FORMATS, UNPAIRED, NewTokens
from megatron_llama.config.hf_config import CONFIG
from megatron_llama.config.hub import resolve_hub_name
from megatron_llama.config.problems import write_override
from megatron_llama.system.programs import IN_CHECKOUT, name_commands, running_command
from megatron_llama.system.wrapping import wrap_command
from megatron_llama.text.tokenizer import vocabulary_size


def next_command(program: str, words: Sequence[str]) -> str:
    """Return ``next:`` and the command of a program, such as ``train.py``, with these arguments."""
    return f"next:\n{wrap_command([*_program_words(program), *words])}"


def next_training(
    prefixes: Sequence[str], tokenizer: str, seq_length: int | None = None, format: str = "auto"
) -> str | None:
    """Return the command that trains on datasets; None if one of them has no tokens.

    Args:
        prefixes: Paths of the datasets.
        tokenizer: The tokenizer's path or hub name. Fine-tuning begins with the model of its folder, if it has one.
        seq_length: Tokens per sequence of a fine-tuning set; None: pretraining.
        format: Format of its records.
    """
    manifests = [read_manifest(prefix) or {} for prefix in prefixes]
    if not manifests or not all(manifest.get("tokens") for manifest in manifests):
        return None
    words = [] if seq_length is None else ["data=chat"]
    if format in PREFERENCE_FORMATS.values():
        words += ["finetune=full", f"finetune.objective={'kto' if format == UNPAIRED else 'dpo'}"]
    words.append(write_override("data.prefixes", prefixes))
    new_tokens = NewTokens.of(manifests[0].get("options") or {})
    words += [write_override(f"data.{name}", tokens) for name, tokens in new_tokens.settings.items()]
    if seq_length is not None:
        words.append(f"data.seq_length={seq_length}")
        if (model := _model_of(tokenizer)) is not None:
            return next_command("train.py", [*words, "model=from_hf", write_override("init_from", model)])
        if seq_length > ModelConfig().max_position_embeddings:
            words.append(f"model.max_position_embeddings={seq_length}")
    return next_command("train.py", [*words, *new_model_words(tokenizer, manifests[0]["vocab_size"])])


def blend_words(blend: Sequence[Any], split: str) -> list[str]:
    """Return the settings of a blend: weight, path, weight, path, ..."""
    return [write_override("data.prefixes", blend), write_override("data.split", split)]


def new_model_words(tokenizer: str, tokens: int) -> list[str]:
    """Return the settings of a new model with this tokenizer, which has ``tokens`` ids."""
    readable = vocabulary_size(resolve_hub_name(tokenizer))  # None for a kind that train.py does not read
    words = [] if readable is None else [write_override("data.tokenizer", tokenizer)]
    return [*words, f"model.vocab_size={max(tokens, readable or 0)}"]


def _program_words(program: str) -> list[str]:
    """Return the words that start a program, with the interpreter and the folder of the running one."""
    started, python = Path(sys.argv[0]), sys.orig_argv[0]
    if not IN_CHECKOUT or running_command() is not None or started.parent.name != "data_prep":
        return name_commands(f"python {program}").split()
    if os.path.isabs(python) and shutil.which(os.path.basename(python)) == python:
        python = os.path.basename(python)
    return [python, str(started.parent.parent / program)]


def _model_of(tokenizer: str) -> str | None:
    """Return the folder or hub name of the model whose tokenizer this is; None if only the tokenizer is there."""
    path = Path(resolve_hub_name(tokenizer))
    name, folder = (tokenizer, path) if path.is_dir() else (str(path.parent), path.parent)
    return name if (folder / CONFIG).is_file() and any(folder.glob("*.safetensors")) else None
