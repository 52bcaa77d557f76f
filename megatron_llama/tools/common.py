"""Command lines of tools, SLURM jobs of run.slurm, and overrides that several tools add to a run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.system.errors import reason_of
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.files import FolderTaken, locked_folder
from megatron_llama.system.programs import BATCH_FOLDER, BATCH_SCRIPT, batch_variables, name_commands
from megatron_llama.system.rerun_command import ArgumentParser

HELP = Path(__file__).with_name("help")
"""Folder with the help text of each tool that accepts overrides of train.py."""


def read_help(tool: str) -> str:
    """Return the help text of a tool, with the commands of this installation."""
    return name_commands((HELP / f"{tool}.txt").read_text(encoding="utf-8"))


def run_tool(tool: str, argv: Sequence[str], work: Callable[[Any, list[str]], int], options: Mapping[str, Any]) -> int:
    """Print the help of ``tool`` if ``argv`` asks for it, else call ``work`` and report problems; return exit status.

    Args:
        work: called with the parsed options, by attribute, and the other arguments.
        options: type of each option's value; bool for a flag.
    """
    usage = read_help(tool)
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(usage)
        return 0
    parser = ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    for name, kind in options.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(name, **how)
    try:
        return work(*parser.parse_known_args(argv))
    except ConfigError as error:
        sys.stderr.write(format_problems(error) + "\n")
        return EXIT_USER


def check_recipe(option: str, path: Path, mark: str) -> None:
    """Create the folder of a recipe that a tool will write. Raises ConfigError if the file is not YAML, cannot be
    written, or exists without ``mark``, the text that identifies the tool's own files."""
    rule, instead = "exists and was not made by this script", "write another path"
    try:
        if path.suffix not in (".yaml", ".yml"):  # experiment= takes no other file
            rule, instead = "must be the path of a .yaml file", f"write {option} my_run.yaml"
        elif not path.exists() or mark in path.read_text(encoding="utf-8", errors="replace"):
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()
            return
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
    raise ConfigError([Problem(option, str(path), rule, instead)])


@contextmanager
def locked_setting(name: str, folder: Path) -> Iterator[None]:
    """Lock the folder of a setting, created if it is missing and removed if it stays empty. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(Path(os.path.realpath(folder))))
        except OSError as error:
            taken = isinstance(error, FolderTaken)
            rule = "is in use by another process" if taken else f"cannot be written: {error.strerror}"
            advice = "wait for its end, or " * taken + f"write another {name}=PATH"
            raise ConfigError([Problem(name, str(folder), rule, advice)]) from None
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()


def show_line(text: str) -> None:
    """Show a text on stderr: a line that the next one replaces on a terminal, else a separate line; "" removes it."""
    sys.stderr.write(f"\r\x1b[K{text[:79]}" if sys.stderr.isatty() else f"{text}\n" if text else "")
    sys.stderr.flush()


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"section.setting": value} as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return tree


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def submit_job(options: str, words: Sequence[str], problem: Problem, **variables: str) -> str:
    """Submit ``run.slurm`` and return the job's id. Raises ConfigError if sbatch is missing or rejects the job.

    ``options`` are quoted as in a shell, ``words`` are overrides of train.py, and ``problem`` lacks only its rule.
    """
    try:
        done = call_slurm(["sbatch", "--parsable", *shlex.split(options), BATCH_SCRIPT, *words], **variables)
    except (OSError, ValueError) as error:  # no sbatch; an unclosed quote
        raise ConfigError([replace(problem, rule=f"cannot start sbatch: {reason_of(error)}")]) from error
    if done.returncode:
        raise ConfigError([replace(problem, rule=f"sbatch failed: {(done.stderr or done.stdout).strip()}")])
    return done.stdout.strip().partition(";")[0]


def call_slurm(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM in the folder of the batch scripts."""
    env = {**os.environ, **batch_variables(), **variables}
    return subprocess.run(command, cwd=BATCH_FOLDER, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


NO_FILES = ("data.mock=true", "data.prefixes=[]", "data.tokenizer=null", "data.prepare=null")
"""Overrides of a config that reads no dataset and no tokenizer."""
MOCK_RUN = (
    *(*NO_FILES, "trainer.epochs=null", "trainer.max_restarts=0"),
    *("logging.tensorboard=false", "logging.csv=false", "logging.wandb=off", "logging.sample_prompts=[]"),
)
"""Overrides of a run that trains on mock data and writes no logs. They do not change the graphs or collectives of a
step. Tools append them to the command line, because the last override of a setting counts."""
ONLY_STEPS = (
    *("trainer.val_every_steps=0", "optim.warmup_steps=0", "optim.warmup_ratio=null", "optim.constant_steps=0"),
    *("checkpoint.resume=never", "checkpoint.every_steps=null", "checkpoint.every_minutes=0"),
    *("checkpoint.save_last=false", "checkpoint.dir=null", "checkpoint.memory_every_steps=null"),
    *("checkpoint.keep_best=false", "checkpoint.export_hf=false"),
)
"""Overrides of a run of some steps: no warm-up, validation or checkpoint."""
