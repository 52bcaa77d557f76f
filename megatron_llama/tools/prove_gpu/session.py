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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_llama.devices import device_named
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.programs import IN_CHECKOUT, ROOT, program_files
from megatron_llama.system.signals import exit_with_parent
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
"""Beginnings of names of variables that would make a run a part of the surrounding job."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SENT_BACK = ("config.yaml", "plan.txt", "metrics.jsonl", "compile.json", "profile/*")
"""Files of a run that go into the folder; checkpoints do not."""
PROFILING = "profiling"
"""Subfolder of a run that scripts/profile.py writes."""
TEXTS = (".gz", ".txt", ".json", ".jsonl", ".yaml", ".md", ".log", "")
LOG = "log.txt"
LINES_OF_FAILURE = 3
POLL_SECONDS = 0.1
LEAST_LIMIT_SECONDS = 90.0
COLD_COMPILE_SECONDS = 300.0  # least limit of a process that compiles
GRACE_SECONDS = 5.0


class CheckFailed(Exception):
    """A check detected a fault. ``values`` are as in ``Outcome``."""

    def __init__(self, detail: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.values = values or {}


class NotRun(Exception):
    """A check does not apply to this machine, or has no time; the message is the reason."""


class Clock:
    """Time of the whole command, ``seconds``. ``now`` returns monotonic seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.end, self.seconds = now, now() + seconds, seconds

    @property
    def left(self) -> float:
        """Seconds until the end of the command, at least 0."""
        return max(0.0, self.end - self.now())


class Redactor:
    """Replaces paths, the user's name and the machine's name in texts."""

    def __init__(self, work: Path) -> None:
        folders = {"WORK": work, "CHECKOUT": ROOT, "PYTHON": Path(sys.prefix), "HOME": Path.home()}
        paths = {str(path): name for name, path in folders.items() if len(path.parts) > 1}
        paths |= {str(path.resolve()): name for name, path in folders.items() if len(path.parts) > 1}
        words = {socket.gethostname(): "HOST", socket.gethostname().partition(".")[0]: "HOST"}
        with suppress(OSError, KeyError, ImportError):  # a user without an entry in the list of users
            words[getpass.getuser()] = "USER"
        words = {word: name for word, name in words.items() if len(word) > 2 and word not in ("root", "localhost")}
        self._names = paths | words
        patterns = [re.escape(path) for path in sorted(paths, key=len, reverse=True)]
        patterns += [rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in sorted(words, key=len, reverse=True)]
        self._pattern = re.compile("|".join(patterns))

    def __call__(self, text: str) -> str:
        """Return ``text`` without the names."""
        return self._pattern.sub(lambda match: self._names[match[0]], text)

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file; texts, also compressed ones, are redacted."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix not in TEXTS:
            shutil.copyfile(source, target)
            return
        read = gzip.open if source.suffix == ".gz" else open
        with (
            read(source, "rt", encoding="utf-8", errors="replace") as file,
            read(target, "wt", encoding="utf-8") as out,
        ):
            out.write(self(file.read()))


@dataclass(frozen=True)
class Process:
    """A finished process."""

    status: int
    output: str
    """Standard output, then standard error."""
    stdout: str = ""

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
Shared = TypeVar("Shared")


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
    jobs: int = 1
    """Checks that run side by side, if their part permits it."""
    prefix: str = ""
    """Folder of a variant's runs."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a variant."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set to end all processes."""
    start: Start | None = None
    """Replaces the start of processes, for tests."""

    def __post_init__(self) -> None:
        self.redact = Redactor(self.work)
        self._shared: dict[str, Any] = {}
        self._lock = threading.Lock()

    def variants(self) -> dict[str, Session]:
        """Return sessions whose processes run without a feature, by the device's names of them."""
        variants = device_named(self.device).variants if self.is_accelerator else {}
        folders = {name: f"variants/{name.replace(' ', '_')}/" for name in variants}
        return {name: replace(self, prefix=folders[name], variables=variants[name]) for name in variants}

    def share(self, name: str, create: Callable[[], Shared]) -> Shared:
        """Return the result of ``create``, which runs once, for all checks that compare with it."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = create()
            return self._shared[name]  # type: ignore[no-any-return]

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return int(self.environment.get("count", 1))

    @property
    def is_accelerator(self) -> bool:
        return bool(self.environment.get("is_accelerator", False))

    def require_compiler(self) -> None:
        """Raise NotRun if torch.compile cannot run here."""
        if reason := self.environment["compiler_missing"]:
            raise NotRun(f"torch.compile is unavailable: {reason}")

    def limit(self, compiles: bool) -> float:
        """Return the seconds after which a process counts as hanging."""
        return max(COLD_COMPILE_SECONDS if compiles else LEAST_LIMIT_SECONDS, self.clock.seconds / 4)

    def run(self, name: str, words: Sequence[str], *, compiles: bool = False) -> Process:
        """Run a command of Python; its output goes to ``name/log.txt`` in the folder.

        Raises:
            NotRun: the time of the whole command ended first.
            CheckFailed: the process did not end within its limit.
        """
        limit = self.limit(compiles)
        try:
            process = (self.start or self._start)([sys.executable, *words], min(limit, self.clock.left))
        except TimeoutError as error:
            self._write_log(name, words, str(error))
            if self.stopping.is_set():
                raise NotRun("stopped by a signal") from None
            if self.clock.left <= 1:
                raise NotRun("stopped at the end of the time: use a larger --minutes") from None
            raise CheckFailed(f"timed out after {limit:.0f} s, see {self.prefix}{name}/{LOG}") from None
        self._write_log(name, words, process.output)
        return process

    def _start(self, words: Sequence[str], limit: float) -> Process:
        """Run a command and end its children with it, such as compiler processes, which would use the card's host.

        After ``limit`` seconds, or when the checks are to stop, it is killed. Raises TimeoutError with the output.
        """
        end = time.monotonic() + limit
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:  # children would hold a pipe open
            process = subprocess.Popen(
                list(words),
                env=variables() | dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=partial(exit_with_parent, os.getpid()),  # noqa: PLW1509  it takes no lock of another thread
            )
            try:
                while process.poll() is None and time.monotonic() < end and not self.stopping.wait(POLL_SECONDS):
                    pass
                status = process.returncode
            finally:  # also after an interrupt
                _kill(process)
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        if status is None:
            raise TimeoutError("".join(texts))
        return Process(status, "".join(texts), texts[0])

    def _write_log(self, name: str, words: Sequence[str], output: str) -> None:
        path = self.folder / self.prefix / name / LOG
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
        folder = self.work / self.prefix / (run or name)
        words = [str(program_files()[program]), f"device={self.device}", *overrides, f"run.dir={folder}"]
        block = [int(word.partition("=")[2]) for word in words if word.startswith(("trainer.tp=", "trainer.pp="))]
        words.append(f"trainer.dp={max(1, ranks // math.prod(block))}")
        compiled = "trainer.compile=true" in words
        if compiled:  # equal graphs are compiled once
            words.append(f"trainer.compile_cache={self.work / 'compiled'}")
        try:
            process = self.run(name, words, compiles=compiled)
        finally:
            for base in (folder, folder / PROFILING):
                for path in sorted(path for pattern in SENT_BACK for path in base.glob(pattern)):
                    self.redact.copy(path, self.folder / self.prefix / name / path.relative_to(base))
        if process.status == EXIT_USER:
            raise NotRun(f"refused: {_reason(process.output)}")
        if process.status:
            raise CheckFailed(f"exit status {process.status}: {process.last_lines()}, see {name}/{LOG}")
        files = [path for path in (folder / METRICS_FILE, folder / PROFILING / METRICS_FILE) if path.exists()]
        if not files:
            raise CheckFailed(f"{program}.py ended well but wrote no metrics, see {name}/{LOG}")
        records = [record for record in read_metrics(files[0]) if "reduced_train_loss" in record]
        return TrainingRun(folder, process.output, records)

    def module(self, name: str, module: str, *arguments: str, compiles: bool = False) -> Any:
        """Run a module of this package that prints a JSON value in its last line; return the value.

        Raises CheckFailed if the module failed.
        """
        process = self.succeed(name, "-m", f"{__package__}.{module}", *arguments, compiles=compiles)
        for line in reversed(process.output.splitlines()):  # libraries may print at exit
            if line.startswith(("{", "[")):
                with suppress(ValueError):
                    return json.loads(line)
        raise CheckFailed(f"no result in the output: {process.last_lines(1)}, see {name}/{LOG}")

    def succeed(self, name: str, *words: str, compiles: bool = False) -> Process:
        """Run a command as ``run``. Raises CheckFailed also if it failed."""
        process = self.run(name, words, compiles=compiles)
        if process.status:
            raise CheckFailed(f"exit status {process.status}: {process.last_lines()}, see {name}/{LOG}")
        return process


def _reason(output: str) -> str:
    """Return the rules that a refusal names, in one line."""
    rules = re.findall(r"^ +rule +(.+(?:\n {13,}.+)*)$", output, re.MULTILINE)
    return "; ".join(" ".join(rule.split()) for rule in rules[:2]) or Process(EXIT_USER, output).last_lines(1)


def variables() -> dict[str, str]:
    """Return the environment of processes: without launchers, offline, with this package."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])] if IN_CHECKOUT else []
    return inherited | OFFLINE | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}) | {"COLUMNS": "100"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; a process that runs has some seconds to clean up first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
