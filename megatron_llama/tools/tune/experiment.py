"""Writes settings as an experiment: a file that ``train.py`` takes as experiment=<name>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.cli import CONF_DIR
from megatron_llama.config import Problem, load_config
from megatron_llama.config.fields import FREE_DICT, get, settings_by_name
from megatron_llama.config.load_config import EXPERIMENT

GROUPS = tuple(sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name != EXPERIMENT))
NEVER = ("allow_targets", "dry_run", "run.dir")
"""Of a command line, not of a recipe."""


def experiment_path(name: str) -> Path:
    """Where the experiment of this name lies."""
    return CONF_DIR / EXPERIMENT / f"{name}.yaml"


def check_name(name: str, overwrite: bool) -> list[Problem]:
    """What is wrong with the name of an experiment that is to be written."""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        return [Problem("tune.name", name, "must be letters, digits, _, - and .", "write tune.name=my_run")]
    if experiment_path(name).exists() and not overwrite:
        rule = f"{experiment_path(name)} is there already"
        return [Problem("tune.name", name, rule, "write another tune.name, or tune.overwrite=true to replace it")]
    return []


def experiment_text(words: Sequence[str], settings: Mapping[str, Any], comment: Sequence[str]) -> str:
    """The file: the groups that the command line ``words`` picks, and every setting that is not what they say."""
    picked: dict[str, str] = {}
    for word in words:
        group, equals, choice = word.lstrip("+").partition("=")
        if equals and group in GROUPS and (CONF_DIR / group / f"{choice}.yaml").exists():
            picked[group] = choice
    plain = load_config([f"{group}={choice}" for group, choice in picked.items()], CONF_DIR)
    config = load_config(words, CONF_DIR)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        setattr(get(config, section), key, value)
    different: dict[str, Any] = {}
    for name in [*settings_by_name(), FREE_DICT]:
        parent = get(config, name.rpartition(".")[0])
        if parent is None or name in NEVER or get(plain, name) == get(config, name):
            continue
        _put(different, name.split("."), get(config, name))
    lines = ["# @package _global_", *(f"# {line}".rstrip() for line in comment)]
    lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in picked.items())] if picked else []
    body = yaml.safe_dump(different, sort_keys=False, allow_unicode=True, width=120) if different else ""
    return "\n".join([*lines, "", body])


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets a value in nested mappings."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
