"""``megatron-llama COMMAND ...`` or ``python -m megatron_llama COMMAND ...``: list and start the programs."""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.missing_packages import report_missing_packages
from megatron_llama.system.programs import COMMAND, IN_CHECKOUT, ROOT, name_commands, program_files
from megatron_llama.system.wrapping import fill

USAGE = f"""\
usage: {COMMAND} COMMAND [ARGUMENT ...]
       {COMMAND} [--help] [--version] [--root]

Each command has --help. Also: python -m megatron_llama COMMAND ...
--version prints versions, --root the folder with conf/ and batch scripts.
"""
TITLES = {"": "Training", "data_prep": "Data preparation", "scripts": "Tools"}


def main() -> int:
    """Run the command line; return the exit status. A program that is started exits by itself."""
    words = sys.argv[1:]
    if not words or words[0] in ("--help", "-h", "help"):
        sys.stdout.write(list_of_commands())
    elif words[0] in ("--version", "-V"):
        sys.stdout.write(versions())
    elif words[0] == "--root":
        sys.stdout.write(f"{ROOT}\n")
    elif (name := find_command(words[0])) is None:
        sys.stderr.write(f"{COMMAND}: error: {_unknown(words)}\n")
        return EXIT_USER
    else:
        start(name, words[1:])
    return 0


def start(name: str, words: list[str]) -> None:
    """Run the file of a command as Python runs a script."""
    path = program_files()[name]
    sys.argv[:] = [f"{COMMAND} {name}", *words]
    sys.path.insert(0, str(ROOT))
    script = ModuleType("__main__")
    script.__file__ = str(path)
    global _starter
    _starter = sys.modules["__main__"]  # keeps its names
    sys.modules["__main__"] = script
    report_missing_packages()
    exec(compile(path.read_bytes(), str(path), "exec"), script.__dict__)


_starter: ModuleType | None = None


def find_command(word: str) -> str | None:
    """Return the command of this name, or with this as the unique beginning of its name."""
    commands = list(program_files())
    name = word.replace("_", "-").removesuffix(".py")
    if name in commands:
        return name
    named = [command for command in commands if name and command.startswith(name)]
    return named[0] if len(named) == 1 else None


def list_of_commands() -> str:
    """Return the text of ``--help``."""
    files = program_files()
    width = max(map(len, files))
    text = USAGE
    for folder, title in TITLES.items():
        text += f"\n{title}\n"
        for name, path in files.items():
            if path.parent == ROOT / folder:
                text += fill(f"  {name:{width}}  ", description(path)) + "\n"
    return text


def description(path: Path) -> str:
    """Return the first sentence of a program's docstring, without its command."""
    lines = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return name_commands(lines.partition("\n")[0].partition(": ``python")[0].partition(": python ")[0].rstrip("."))


def versions() -> str:
    """Return the versions of this program, the main packages and Python, a line each."""
    names = {"megatron_llama": own_version(), "torch": _version("torch"), "megatron-core": _version("megatron-core")}
    names["python"] = ".".join(map(str, sys.version_info[:3]))
    return "".join(f"{name:14}  {number}\n" for name, number in names.items())


def own_version() -> str:
    """Return the version of this project: of the checkout, else of the installed wheel."""
    if IN_CHECKOUT:
        with open(ROOT / "pyproject.toml", "rb") as file:
            return str(tomllib.load(file)["project"]["version"])
    return _version("megatron_llama")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _unknown(words: list[str]) -> str:
    """Return the message for an unknown command."""
    commands = program_files()
    name = words[0].replace("_", "-")
    if "=" in name or name in ("--dry-run", "--no-plan"):
        return f"a setting needs a command before it: type {COMMAND} train {words[0]} ..."
    guesses = [command for command in commands if command.startswith(name)] or get_close_matches(name, commands, 1)
    guess = f"; type {' or '.join(guesses)}" if guesses else ""
    return f"there is no command {words[0]!r}{guess}; {COMMAND} --help lists all"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
