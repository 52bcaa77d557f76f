"""Settings of an existing run, from its config.yaml: a command with only its ``run.dir`` resumes with them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.config.settings import Config
from megatron_llama.config.settings_table import FREE_DICT, get, sections, settings_by_name
from megatron_llama.system.files import check_yaml, copies_folder, read_json, read_whole
from megatron_llama.system.object_store import Location, RemotePath, location
from megatron_llama.system.programs import conf_folders

NAME = "config.yaml"
MANIFEST = "checkpoint.json"
"""File of a checkpoint's folder that is written last."""
PER_START = ("run.dir", "dry_run", "allow_targets", "hook.on_event", "checkpoint.resume", "checkpoint.allow")
"""Settings of one start, which a later start does not take from the file."""
REDERIVED = ("trainer.dp", "trainer.sp", "trainer.shard_group", "trainer.pipeline_layers")
"""Settings that usually follow from the layout: reset if the file does not list its derived settings."""
SCHEDULE_SOURCES = {"max_steps": "trainer.steps"}
SCHEDULE_SOURCES |= {name: f"optim.{name}" for name in ("warmup_steps", "constant_steps", "min_lr")}
"""Settings that the arguments of a schedule repeat."""
_NONE = object()
_HEADER = """\
# Settings of the run. `train.py run.dir=FOLDER` takes them from this file, and the
# command line overrides them. Settings that the next line lists are taken from there:
"""
_REQUESTED = "# requested: "
MEMORY_KEY = "memory.json"
"""File next to a run's checkpoints that names the folder of its copies in memory, while there are copies."""
_STEP = re.compile(r"step_(\d{8,})")


def to_yaml(config: Config, requested: Config | None = None) -> str:
    """Return ``config`` as YAML text, for ``<run.dir>/config.yaml``.

    ``requested``: The config before derivation; a comment stores its differences, for later starts.
    """
    text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=120)
    if requested is None:
        return text
    names = [name for name in settings_by_name() if name not in PER_START]
    derived = {name: get(requested, name) for name in names if get(requested, name) != get(config, name)}
    return f"{_HEADER}{_REQUESTED}{json.dumps(derived)}\n{text}"


def has_run(folder: Path) -> bool:
    """Return whether a folder has settings and a checkpoint, or copies in memory, to resume from."""
    if not os.path.isfile(folder / NAME):
        return False
    return bool(stored_steps(folder)) or (checkpoint_folder(folder) / MEMORY_KEY).is_file()


def checkpoint_folder(folder: Path, config: Config | None = None) -> Location:
    """Return the folder with the checkpoints of a run, by default with its stored settings."""
    url = None
    if config is not None:
        url = config.checkpoint.dir
    elif (folder / NAME).is_file() and b"://" in (folder / NAME).read_bytes():  # parsing takes time
        url = read_values(folder).get("checkpoint.dir")
    return folder / "checkpoints" if url is None else RemotePath(url)


def leaves_newest(config: Config) -> bool:
    """Return whether checkpoint.resume is ``never``, or one of the run's checkpoints. Neither applies to restarts."""
    resume, folder = config.checkpoint.resume, checkpoint_folder(Path(str(config.run.dir)), config).absolute()
    return resume == "never" or (resume != "auto" and location(resume).absolute().parent == folder)


def stored_steps(folder: Path, config: Config | None = None) -> list[int]:
    """Return the steps with a checkpoint of a run, newest first; none if they cannot be read."""
    try:
        return list_steps(checkpoint_folder(folder, config))
    except (OSError, ConfigError):
        return []


def copies_of(folder: Path, config: Config) -> str:
    """Return the name of the folder of copies in memory from which the run can resume; empty without copies."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        if config.checkpoint.memory_every_steps is not None:
            return str(read_json(checkpoint_folder(folder, config) / MEMORY_KEY)["folder"])
    return ""


def copied_steps(folder: Path, config: Config) -> set[int]:
    """Return the steps of which this host has copies in memory of all ranks; none if they cannot be read."""
    steps: dict[str, set[int]] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        for path in (copies_folder() / (copies_of(folder, config) or "none")).glob("rank_*.json"):
            steps.setdefault(path.name[:10], set()).add(int(read_json(path)["state"]["step"]))
    return set.intersection(*steps.values()) if steps else set()


def list_steps(checkpoints: Location) -> list[int]:
    """Return the steps of the folders ``step_00000100``, newest first. Raises OSError if they cannot be listed."""
    if isinstance(checkpoints, RemotePath):  # its checkpoints are the folders with a manifest
        names = [name.removesuffix(f"/{MANIFEST}") for name in checkpoints.files() if name.endswith(f"/{MANIFEST}")]
    else:
        names = os.listdir(checkpoints)
    return sorted((int(match[1]) for match in map(_STEP.fullmatch, names) if match), reverse=True)


def step_of(name: str) -> int:
    """Return the step of a checkpoint's folder name; 0 for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else 0


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the requested settings of the run in ``folder``, by full name; unknown names included.

    Raises ConfigError if the file cannot be read.
    """
    values, requested = _read_file(folder)
    if requested is None:
        requested = _guess_requested(values)
    values = {name: value for name, value in values.items() if name not in PER_START}
    return values | {name: value for name, value in requested.items() if name not in PER_START}


def read_values(folder: Path) -> dict[str, Any]:
    """Return the settings that the run in ``folder`` uses, derived ones included, by full name; without PER_START.

    Raises ConfigError if the file cannot be read.
    """
    return {name: value for name, value in _read_file(folder)[0].items() if name not in PER_START}


def _read_file(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the settings in the file, and the settings of its comment, None without it. Raises ConfigError."""
    path = folder / NAME
    try:
        check_yaml(path)
        text = read_whole(path).decode()
        line = next((line for line in text.splitlines() if line.startswith(_REQUESTED)), f"{_REQUESTED}null")
        requested = json.loads(line.removeprefix(_REQUESTED))
        return dict(_flatten(yaml.safe_load(text) or {}, "")), requested if isinstance(requested, dict) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}," if mark else str(path)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
        instead = "correct that file; or move it away, and write all settings on the command line"
        raise ConfigError([Problem("run.dir", str(folder), f"{where} cannot be read: {reason}", instead)]) from error


def _guess_requested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that follow from others in the file of an older version, which does not list them."""
    requested: dict[str, Any] = dict.fromkeys(REDERIVED)
    schedule = values.get(FREE_DICT)
    if isinstance(schedule, dict):
        sources = SCHEDULE_SOURCES.items()
        links = {key: f"${{{name}}}" for key, name in sources if schedule.get(key, _NONE) == values.get(name)}
        requested[FREE_DICT] = schedule | links
    if values.get("trainer.epochs") is not None:
        requested["trainer.steps"] = settings_by_name()["trainer.steps"].default
    return requested


def _flatten(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (full name, value) of each setting, and of each section that is null."""
    for key, value in values.items() if isinstance(values, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != FREE_DICT and name not in settings_by_name():
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def settings_of_groups(choices: Mapping[str, str], conf_dir: Path, recipes: Iterable[str]) -> set[str]:
    """Return the settings that chosen groups decide, by full name.

    These are the settings that any file of the group sets, as a choice replaces another one. For groups in ``recipes``,
    which apply to all sections, they are the settings of the chosen file and of the groups that it chooses. Chosen
    files can be in the current folder's ``conf/`` too.
    """
    names: set[str] = set()
    for group, choice in choices.items():
        is_path = choice.endswith((".yaml", ".yml"))
        files = [each / group / f"{choice}.yaml" for each in conf_folders(conf_dir)]
        chosen_file = Path(choice) if is_path else next((file for file in files if file.is_file()), None)
        if group in recipes:
            content = _load(chosen_file) if chosen_file else {}
            defaults = [entry for entry in content.pop("defaults", []) if isinstance(entry, dict)]
            chosen = {str(key).split("/")[-1]: str(value) for entry in defaults for key, value in entry.items()}
            names |= {name for name, _ in _flatten(content, "")}
            names |= settings_of_groups({g: c for g, c in chosen.items() if g not in recipes}, conf_dir, recipes)
        else:
            for path in {*(conf_dir / group).rglob("*.yaml"), *([chosen_file] if chosen_file else [])}:
                is_global = "@package _global_" in path.read_text(encoding="utf-8")
                names |= {name for name, _ in _flatten(_load(path), "" if is_global else f"{group}.")}
    return names


def _load(path: Path) -> dict[str, Any]:
    """Return a group's file, which Hydra has read before."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def is_decided(name: str, names: Iterable[str]) -> bool:
    """Return whether ``names`` has a setting, a section around it, or a setting in it."""
    return any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in names)


def is_known(name: str) -> bool:
    """Return whether a stored setting exists in this version."""
    return name in settings_by_name() or (name in sections() and sections()[name].optional)
