"""Folders with config groups: the project's ``conf/`` and a ``conf/`` in the current folder, which adds files."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.config.problems import Problem
from megatron_llama.system.programs import conf_folders


def groups_in(conf_dir: Path) -> set[str]:
    """Return the names of all groups."""
    folders = conf_folders(conf_dir)
    return {path.relative_to(each).as_posix() for each in folders for path in each.rglob("*") if path.is_dir()}


def options_of(group: str, conf_dir: Path) -> list[str]:
    """Return the names of a group's files, sorted."""
    return sorted({path.stem for each in conf_folders(conf_dir) for path in (each / group).glob("*.yaml")})


def search_path(conf_dir: Path) -> list[str]:
    """Return Hydra's override for the folders after ``conf_dir``, which has precedence."""
    paths = [str(each).replace("\\", "\\\\").replace('"', '\\"') for each in conf_folders(conf_dir)[1:]]
    return ["hydra.searchpath=[" + ",".join(f'"file://{path}"' for path in paths) + "]"] if paths else []


def hidden_file(group: str, option: str, conf_dir: Path) -> Problem | None:
    """Return the problem of a user's file that has the name of a different file in ``conf_dir``."""
    first, *others = [each / group / f"{option}.yaml" for each in conf_folders(conf_dir)]
    for other in others:
        local = Path("conf") / group / other.name
        if first.is_file() and other.is_file() and first.read_bytes() != other.read_bytes():
            rule = f"is the name of two different files, {local} and {first}"
            return Problem(group, option, rule, f"rename {local}")
    return None
