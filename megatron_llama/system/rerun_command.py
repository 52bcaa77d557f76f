"""The command that started this run, as a user types it again to resume the run; the parser of other commands."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_llama.system.object_store import hide_credentials, is_url

COMMAND = "MEGATRON_LLAMA_COMMAND"
"""Variable with the command's words before the settings; ranks and other hosts inherit it."""
LAUNCHER = "MEGATRON_LLAMA_LAUNCHER"
"""Variable with the name of the launcher whose command is unknown."""


def note_command(arguments: Sequence[str], launcher: tuple[str, int] | None) -> None:
    """Store the command of this process, which has ``arguments``, in its environment.

    Args:
        launcher: Name of the launcher of this process and its number of machines; None: the user started it.
    """
    if launcher is not None and launcher[0] == "hosts":  # the process that uses ssh has noted its command
        return
    words: list[str] | None = list(sys.orig_argv)
    if launcher is not None:
        # On several machines each one has a different command, or only one of them has the launcher.
        words = _read_parent() if launcher[1] == 1 else None
    for name in (COMMAND, LAUNCHER):
        os.environ.pop(name, None)
    words = _without(words, [word for word in arguments if word != "dry_run=true"])
    if words:
        os.environ[COMMAND] = shlex.join(_shorten(words))
    elif launcher is not None:
        os.environ[LAUNCHER] = launcher[0]


def noted_command() -> tuple[str | None, str]:
    """Return the noted command, None if it is unknown, and the name of its launcher, which may be empty."""
    return os.environ.get(COMMAND), os.environ.get(LAUNCHER, "")


def _without(words: Sequence[str] | None, arguments: Sequence[str]) -> list[str] | None:
    """Return ``words`` without ``arguments`` at their end; None if they do not end so, or run no file or module."""
    if words is None or len(words) < len(arguments) + 2 or list(words[len(words) - len(arguments) :]) != arguments:
        return None
    return list(words[: len(words) - len(arguments)])


def _shorten(words: list[str]) -> list[str]:
    """Omit the interpreter of a program that the shell finds by its name, such as torchrun."""
    for number, word in enumerate(words[1:3], start=1):
        name = os.path.basename(word)
        if os.path.isabs(word) and shutil.which(name) == word:
            return [name, *words[number + 1 :]]
        if not word.startswith("-"):
            break
    return words


def _read_parent() -> list[str] | None:
    """Return the command line of the parent process; None if the system does not show it."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return None


class ArgumentParser(argparse.ArgumentParser):
    """A parser that reports an option which is given twice, and the URL of an object store in place of a local path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _Store)
        self.register("type", Path, _local_path)


def _local_path(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{hide_credentials(text)} must be a local path")
    return Path(text)


class _Store(argparse.Action):
    """Store a value, as argparse does, and report an earlier one."""

    _namespace: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None and self._namespace is namespace:
            sys.stderr.write(f"{parser.prog}: {option_string} is given more than once; the last value is used\n")
        self._namespace = namespace
        setattr(namespace, self.dest, values)
