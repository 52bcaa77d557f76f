"""Programs of this project: their files in a checkout or a wheel, and the commands that start them.

A wheel has the files of a checkout that programs read by path in ``megatron_llama/share``: train.py, the batch scripts,
``conf/``, ``scripts/`` and ``data_prep/`` (setup.py). Imports the standard library and wrapping.py only.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from megatron_llama.system.wrapping import WIDTH, wrap_lines

PACKAGE = Path(__file__).resolve().parents[1]
_SHARE = PACKAGE / "share"
IN_CHECKOUT = not _SHARE.is_dir()
ROOT = PACKAGE.parent if IN_CHECKOUT else _SHARE
"""Folder with train.py, ``conf/``, ``scripts/`` and ``data_prep/``."""
CONF_DIR = ROOT / "conf"
OWN_CONF = CONF_DIR if IN_CHECKOUT else Path("conf")
"""Folder for config files that programs write. A wheel's own folder is not the user's."""
COMMAND = "megatron-llama"
BATCH_FOLDER = ROOT if IN_CHECKOUT else Path()
"""Folder from which programs submit batch scripts. Jobs write ``logs/`` there."""
BATCH_SCRIPT = "run.slurm" if IN_CHECKOUT else str(ROOT / "run.slurm")
"""Batch script of a run, from BATCH_FOLDER."""
_ROOT_VARIABLE = "MEGATRON_LLAMA_ROOT"
"""Variable with ROOT for batch scripts that are submitted from another folder."""

_TORCHRUN = re.compile(r"(\btorchrun (?:[^\n]|\\\n)*?)(?<![\w./-])((?:scripts/|data_prep/)?\w+\.py)\b")
_PROGRAM = re.compile(r"(?<![\w./-])(?:python )?((?:scripts/|data_prep/)\w+|train)\.py\b(?!:\d)")


def conf_folders(conf_dir: Path) -> list[Path]:
    """Return ``conf_dir`` and, if it is another folder, ``conf`` in the current folder."""
    local = Path("conf").absolute()
    return [conf_dir, local] if local.is_dir() and local.resolve() != conf_dir.resolve() else [conf_dir]


def option_name(file: Path, group_folder: Path) -> str:
    """Return the name of a file of a config group: ``qwen3/8b`` for a file in a subfolder."""
    return file.relative_to(group_folder).with_suffix("").as_posix()


def program_files() -> dict[str, Path]:
    """Return the file of each command, by name."""
    paths = [ROOT / "train.py"]
    for folder in ("data_prep", "scripts"):
        paths += sorted(path for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")
    return {command_of(path.name): path for path in paths}


def command_of(file: str) -> str:
    """Return the command of a program's file: ``export-hf`` for ``scripts/export_hf.py``."""
    return Path(file).stem.replace("_", "-")


def batch_variables() -> dict[str, str]:
    """Return the variables that a batch script needs outside a checkout."""
    return {} if IN_CHECKOUT else {_ROOT_VARIABLE: str(ROOT), "PYTHON": os.environ.get("PYTHON", sys.executable)}


def running_command() -> str | None:
    """Return the command that started this process; None if a file was started."""
    name, _, command = sys.argv[0].partition(" ") if sys.argv else ("", "", "")
    return command if name == COMMAND and command else None


def name_commands(text: str) -> str:
    """Return ``text`` with the console script's commands in place of files, if a user has started that script.

    ``python scripts/plan.py`` becomes ``megatron-llama plan``. A wheel has no files that users start. Continuation
    lines of a usage keep their alignment, and lines that become too long are wrapped.
    """
    if IN_CHECKOUT and running_command() is None:
        return text
    text = _TORCHRUN.sub(lambda found: f"{found[1]}-m megatron_llama {command_of(found[2])}", text)
    waiting = text.split("\n")[::-1]
    lines: list[str] = []
    old_column, new_column, is_rest = 0, 0, False
    while waiting:
        line = waiting.pop()
        if old_column and line.startswith(" " * old_column) and line[old_column : old_column + 1] not in ("", " "):
            lines.append(" " * new_column + line[old_column:])
            continue
        named = _PROGRAM.sub(lambda found: f"{COMMAND} {command_of(found[1])}", line)
        usage = re.match(r"(?:usage: )?python [\w/]+\.py ", line)
        old_column = usage.end() if usage else 0
        new_column = old_column + len(named) - len(line)
        is_rest = (is_rest or len(line) <= WIDTH) and len(named) > WIDTH
        if is_rest:
            named = _wrap_into_next(named, waiting)
        lines.append(named)
    return "\n".join(lines)


def _wrap_into_next(line: str, following: list[str]) -> str:
    """Cut a line to the width; its last words begin the next line of the paragraph (the last of ``following``)."""
    indent = " " * (len(line) - len(line.lstrip()))
    first, *others = wrap_lines(line.lstrip(), indent)
    if not others:
        return line
    if first.endswith("\\"):  # in a command, whose lines are complete
        following.extend(reversed(others))
        return first
    rest = line[len(first) :].lstrip()
    same_paragraph = following and following[-1].strip() and following[-1].startswith(indent)
    if same_paragraph and following[-1][len(indent)] != " ":
        rest += " " + following.pop()[len(indent) :]
    following.append(indent + rest)
    return first


def commit() -> str:
    """Return the first 9 digits of the checked-out commit; "?" outside of git."""
    import subprocess  # most programs start without it

    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return done.stdout.strip() or "?"
