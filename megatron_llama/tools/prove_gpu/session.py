"""Processes that the checks start, with limits of time, and the files of each that go into the folder."""

from __future__ import annotations

import getpass
import gzip
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.programs import IN_CHECKOUT, ROOT, program_files
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.tools.prove_gpu.checks import CheckFailed, Clock, NotRun
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
"""Beginnings of names of variables that would make a run a part of the surrounding job."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SENT_BACK = ("config.yaml", "plan.txt", "metrics.jsonl", "compile.json", "profile/*")
PROFILING = "profiling"
"""Subfolder of a run that scripts/profile.py writes."""
"""Files of a run that go into the folder; checkpoints do not."""
LOG = "log.txt"
LINES_OF_FAILURE = 3
LEAST_LIMIT_SECONDS = 90.0
COLD_COMPILE_SECONDS = 300.0  # least limit of a run that compiles
GRACE_SECONDS = 5.0


class Redactor:
    """Replaces paths, the user's name and the machine's name in texts."""

    def __init__(self, work: Path) -> None:
        folders = {"WORK": work, "CHECKOUT": ROOT, "PYTHON": Path(sys.prefix), "HOME": Path.home()}
        paths = {str(path): name for name, path in folders.items() if len(path.parts) > 1}
        paths |= {str(path.resolve()): name for name, path in folders.items() if len(path.parts) > 1}
        self._paths = sorted(paths.items(), key=lambda pair: -len(pair[0]))
        words = {}
        with suppress(OSError, KeyError, ImportError):  # a user without an entry in the list of users
            words[getpass.getuser()] = "USER"
        for host in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
            words[host] = "HOST"
        self._words = [
            (re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])"), name)
            for word, name in sorted(words.items(), key=lambda pair: -len(pair[0]))
            if len(word) > 2 and word not in ("root", "localhost")
        ]

    def __call__(self, text: str) -> str:
        """Return ``text`` without the names."""
        for path, name in self._paths:
            text = text.replace(path, name)
        for word, name in self._words:
            text = word.sub(name, text)
        return text

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file; texts, also compressed ones, are redacted."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".gz":
            with gzip.open(source, "rt", encoding="utf-8", errors="replace") as file:
                text = self(file.read())
            with gzip.open(target, "wt", encoding="utf-8") as file:
                file.write(text)
        elif source.suffix in (".txt", ".json", ".jsonl", ".yaml", ".md", ".log", ""):
            target.write_text(self(source.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
        else:
            shutil.copyfile(source, target)


@dataclass(frozen=True)
class Process:
    """A finished process: exit status and output."""

    status: int
    output: str

    def last_lines(self, count: int = LINES_OF_FAILURE) -> str:
        """Return the last lines of the output in one line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return " / ".join(lines[-count:]) or "no output"


@dataclass(frozen=True)
class TrainingRun:
    """A finished run of train.py."""

    folder: Path
    output: str
    records: list[dict[str, Any]]
    """Metrics of each step."""

    def column(self, name: str) -> list[float]:
        """Return a metric of all steps."""
        return [float(record[name]) for record in self.records]

    @property
    def losses(self) -> list[float]:
        return self.column("reduced_train_loss")

    @property
    def tokens_per_second(self) -> float:
        """Speed of the fastest step after the first two, which compile and allocate."""
        return max(self.column("tokens_per_second")[2:] or self.column("tokens_per_second"))


Start = Callable[[Sequence[str], float], Process]
"""Runs a command within a limit in seconds; raises TimeoutError."""


@dataclass
class Session:
    """The device, folders and processes of one start of the command."""

    folder: Path
    """Folder of the results."""
    work: Path
    """Folder of runs and checkpoints, deleted at the end."""
    clock: Clock
    device: str = "auto"
    environment: dict[str, Any] = field(default_factory=dict)
    """Facts of environment.py."""
    small: bool = False
    """Whether the shapes are small, for a test of the command itself or a CPU."""
    shared: dict[str, TrainingRun] = field(default_factory=dict)
    """Runs that several checks compare with."""
    start: Start | None = None
    """Replaces the start of processes, for tests."""

    def __post_init__(self) -> None:
        self.redact = Redactor(self.work)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return int(self.environment.get("count", 1))

    @property
    def is_accelerator(self) -> bool:
        return bool(self.environment.get("is_accelerator", False))

    def limit(self) -> float:
        """Return the seconds after which a process counts as hanging."""
        return max(LEAST_LIMIT_SECONDS, (self.clock.end - self.clock.start) / 4)

    def run(self, name: str, words: Sequence[str], *, hangs_after: float | None = None) -> Process:
        """Run a command of Python; its output goes to ``name/log.txt`` in the folder.

        Raises:
            NotRun: the time of the whole command ended first.
            CheckFailed: the process did not end within its limit.
        """
        limit = self.limit() if hangs_after is None else hangs_after
        try:
            process = (self.start or start)([sys.executable, *words], min(limit, self.clock.left))
        except TimeoutError as error:
            self._write_log(name, words, str(error))
            if self.clock.left <= 1:
                raise NotRun("stopped at the end of the time: use a larger --minutes") from None
            raise CheckFailed(f"no end within {limit:.0f} s, see {name}/{LOG}") from None
        self._write_log(name, words, process.output)
        return process

    def _write_log(self, name: str, words: Sequence[str], output: str) -> None:
        path = self.folder / name / LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(self.redact(f"$ python {' '.join(words)}\n{output}\n"))

    def train(self, name: str, *overrides: str, ranks: int = 1, program: str = "train", run: str = "") -> TrainingRun:
        """Run train.py or another program with its settings on ``ranks`` devices; return the metrics.

        Args:
            run: Name of the run folder, to continue an earlier run; default: ``name``.

        Raises:
            CheckFailed: the program failed.
            NotRun: the program refused the settings, or has no time.
        """
        folder = self.work / (run or name)
        words = [str(program_files()[program]), f"device={self.device}", *overrides, f"run.dir={folder}"]
        if not any(word.startswith("trainer.dp=") for word in words):
            words.append(f"trainer.dp={max(1, ranks // _block(words))}")
        compiled = "trainer.compile=true" in words
        if compiled and not any(word.startswith("trainer.compile_cache=") for word in words):
            words.append(f"trainer.compile_cache={self.work / 'compiled'}")  # equal graphs are compiled once
        process = self.run(name, words, hangs_after=max(self.limit(), COLD_COMPILE_SECONDS) if compiled else None)
        self._copy_files(folder, name)
        if process.status == EXIT_USER:
            raise NotRun(f"refused: {_reason(process.output)}")
        if process.status:
            raise CheckFailed(f"exit status {process.status}: {process.last_lines()}, see {name}/{LOG}")
        files = [path for path in (folder / METRICS_FILE, folder / PROFILING / METRICS_FILE) if path.exists()]
        if not files:
            raise CheckFailed(f"{program}.py ended well but wrote no metrics, see {name}/{LOG}")
        records = [record for record in read_metrics(files[0]) if "reduced_train_loss" in record]
        return TrainingRun(folder, process.output, records)

    def _copy_files(self, folder: Path, name: str) -> None:
        """Copy the files of a run that are sent back."""
        for base in (folder, folder / PROFILING):
            for path in sorted(path for pattern in SENT_BACK for path in base.glob(pattern)):
                self.redact.copy(path, self.folder / name / path.relative_to(base))

    def module(self, name: str, module: str, *arguments: str) -> Any:
        """Run a module of this package that prints a JSON value in its last line; return the value.

        Raises:
            CheckFailed: the module failed.
        """
        process = self.run(name, ["-m", f"{__package__}.{module}", *arguments])
        if process.status:
            raise CheckFailed(f"exit status {process.status}: {process.last_lines()}, see {name}/{LOG}")
        for line in reversed(process.output.splitlines()):  # libraries may print at exit
            if line.startswith(("{", "[")):
                with suppress(ValueError):
                    return json.loads(line)
        raise CheckFailed(f"no result in the output: {process.last_lines(1)}, see {name}/{LOG}")


def _block(words: Sequence[str]) -> int:
    """Return tp x pp of overrides."""
    sizes = [int(word.partition("=")[2]) for word in words if word.startswith(("trainer.tp=", "trainer.pp="))]
    return math.prod(sizes)


def _reason(output: str) -> str:
    """Return the rules that a refusal names, in one line."""
    rules = re.findall(r"^ +rule +(.+(?:\n {13,}.+)*)$", output, re.MULTILINE)
    return "; ".join(" ".join(rule.split()) for rule in rules[:2]) or Process(EXIT_USER, output).last_lines(1)


def variables() -> dict[str, str]:
    """Return the environment of processes: without launchers, offline, with this package."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])] if IN_CHECKOUT else []
    return inherited | OFFLINE | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}) | {"COLUMNS": "100"}


def start(words: Sequence[str], limit: float) -> Process:
    """Run a command and end its children with it, such as compiler processes, which would use the card's host.

    After ``limit`` seconds the command is killed. Raises TimeoutError with the output.
    """
    with tempfile.TemporaryFile() as output:  # not a pipe, which the children would hold open
        process = subprocess.Popen(
            list(words),
            env=variables(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(exit_with_parent, os.getpid()),  # noqa: PLW1509  no thread of this process holds locks
        )
        is_late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # also after an interrupt
            _kill(process)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if is_late:
        raise TimeoutError(text)
    return Process(process.returncode, text)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; a process that runs has some seconds to clean up first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
