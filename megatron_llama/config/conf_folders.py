"""Folders with config groups: the project's ``conf/`` and a ``conf/`` in the current folder, which adds files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from megatron_llama.config.data_settings import suggest_for_data
from megatron_llama.config.optimizers import OPTIMIZERS
from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.config.settings_table import closest_choice
from megatron_llama.system.files import check_yaml
from megatron_llama.system.programs import conf_folders, option_name

EXPERIMENT = "experiment"
"""The group of whole recipes, applied over all other groups. Its files are in conf/experiment/, or a path is given."""


def check_current_folder() -> None:
    """Raise ConfigError if the current folder has been removed. Relative paths, and ``conf/``, start there."""
    try:
        os.getcwd()
    except OSError as error:
        rule, instead = f"cannot be read: {error.strerror}", "cd to a folder that exists"
        raise ConfigError([Problem("current folder", None, rule, instead)]) from error


def groups_in(conf_dir: Path) -> set[str]:
    """Return the names of all groups."""
    return {path.name for each in conf_folders(conf_dir) for path in each.glob("*") if path.is_dir()}


def options_of(group: str, conf_dir: Path) -> list[str]:
    """Return the names of a group's files, sorted; ``qwen3/8b`` for a file in a subfolder."""
    folders = [each / group for each in conf_folders(conf_dir)]
    return sorted({option_name(path, folder) for folder in folders for path in folder.rglob("*.yaml")})


class LocalFolder(FileConfigSource):
    """Hydra's source for a ``conf/`` in the current folder. Its files may come from other people, as recipes do."""

    @staticmethod
    def scheme() -> str:
        return "local"

    def load_config(self, config_path: str) -> ConfigResult:
        """Raises ValueError, with the file's name, for files beyond the limits of ``check_yaml``."""
        check_yaml(Path(self.path, self._normalize_file_name(config_path)))
        return super().load_config(config_path)


def search_path(conf_dir: Path) -> list[str]:
    """Return Hydra's override for the folders after ``conf_dir``, which has precedence."""
    Plugins.instance().register(LocalFolder)
    paths = [str(each).replace("\\", "\\\\").replace('"', '\\"') for each in conf_folders(conf_dir)[1:]]
    urls = ",".join(f'"{LocalFolder.scheme()}://{path}"' for path in paths)
    return [f"hydra.searchpath=[{urls}]"] if paths else []


def hidden_file(group: str, option: str, conf_dir: Path) -> Problem | None:
    """Return the problem of a user's file that has the name of a different file in ``conf_dir``."""
    first, *others = [each / group / f"{option}.yaml" for each in conf_folders(conf_dir)]
    for other in others:
        local = Path("conf") / group / other.name
        if first.is_file() and other.is_file() and first.read_bytes() != other.read_bytes():
            rule = f"is the name of two different files, {local} and {first}"
            return Problem(group, option, rule, f"rename {local}")
    return None


def suggest_option(group: str, choice: str, options: Sequence[str]) -> str:
    """Return the text to write instead of a choice that the group does not have."""
    if group == "optim" and choice.lower() in OPTIMIZERS:
        return f"write optim.name={choice.lower()}; optim= chooses the schedule: {', '.join(options)}"
    if group == "data" and (advice := suggest_for_data(choice)):
        return advice
    listed = (", ".join(options) or "no file yet") + (", or the path of a .yaml file" * (group == EXPERIMENT))
    start = re.sub(r"[\W_]", "", choice.lower())
    letters = {option: re.sub(r"[\W_]", "", option) for option in options}
    alike = [option for option in options if start and letters[option].startswith(start)]
    if same := [option for option in alike if letters[option] == start]:  # qwen3-8b
        return f"write {group}={same[0]}"
    guess = closest_choice(group, choice, options)
    if alike and guess not in alike:  # llama3: its sizes are closer than llama13b, which differs by fewer letters
        return f"write {group}= one of {', '.join(alike)}"
    return f"write {group}={guess}, or one of {listed}" if guess else f"write {group}= one of {listed}"


def option_of_path(group: str, choice: str, conf_dir: Path) -> str:
    """Return the option that the path of a file of the group names, with or without .yaml; else ``choice`` itself."""
    folders = [(each / group).resolve() for each in conf_folders(conf_dir)]
    paths = [Path(choice), conf_dir.parent / choice]
    if not is_file(group, choice):  # a user's recipe.yaml has precedence over conf/experiment/recipe.yaml
        paths += [folder / choice for folder in folders]
    for path in paths:
        file = _yaml_file(path)
        folder = next((each for each in folders if file is not None and file.is_relative_to(each)), None)
        if file is not None and folder is not None:
            return option_name(file, folder)
    return choice


def problem_of_path(group: str, choice: str, conf_dir: Path) -> Problem | None:
    """Return the problem of an existing file that is not a file of the group; None for other choices."""
    file = _yaml_file(Path(choice)) or _yaml_file(conf_dir.parent / choice)
    if file is None:
        return None
    folder = file.parent
    for here in (each.resolve() for each in conf_folders(conf_dir)):
        if folder != here and folder.is_relative_to(here):
            other = folder.relative_to(here).parts[0]
            option = option_name(file, here / other)
            return Problem(group, choice, f"is a file of the group {other}", f"write {other}={option}")
    instead = f"copy it to {conf_dir.name}/{group}/ and write {group}={file.stem}"
    if group != EXPERIMENT:
        instead += f", or put its settings under {group}: in a file for {EXPERIMENT}=FILE.yaml"
    return Problem(group, choice, f"is a file outside {conf_dir.name}/{group}/", instead)


def _yaml_file(path: Path) -> Path | None:
    """Return the absolute path of an existing YAML file, whose suffix may be missing; None if there is none."""
    file = path if path.suffix in (".yaml", ".yml") else Path(f"{path}.yaml")
    try:
        return file.resolve() if file.is_file() else None
    except (OSError, ValueError):  # too long, or a null byte
        return None


def is_file(group: str, choice: str) -> bool:
    """Return whether the choice is the path of a user's file."""
    return group == EXPERIMENT and choice.endswith((".yaml", ".yml")) and Path(choice).is_file()
