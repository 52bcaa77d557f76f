"""Processes of tests: command lines, launchers, and ranks that report their pids."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.config import load_config
from megatron_llama.launch import watchdog
from megatron_llama.plan import Plan, resolve
from megatron_llama.train.metrics_file import read_metrics
from tests.paths import TRAIN_PY
from tests.ranks import check_threads

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "TORCHELASTIC_", "MASTER_", "OMPI_", "PMI", "MPI_")


def host_store() -> tuple[int, int]:
    """Fork a process that hosts a store of torch; return its process id and port. The caller ends the process."""
    from torch.distributed import TCPStore

    check_threads()
    reader, writer = os.pipe()
    if host := os.fork():
        return host, int(os.read(reader, 20))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    time.sleep(600)
    os._exit(0)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without launcher variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)} | more


def run_command(
    *words: str | Path, cwd: Path = TRAIN_PY.parent, timeout: float = 200, typed: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with ``typed`` on stdin, without a terminal and launcher variables."""
    env = environment(**variables)
    return subprocess.run(words, cwd=cwd, env=env, input=typed, capture_output=True, text=True, timeout=timeout)


DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
    signal.SIGXCPU: signal.SIG_DFL,
}
"""Default signal handlers."""


@contextmanager
def default_signals() -> Iterator[None]:
    """Give each ignored or blocked signal of ``DEFAULTS`` its default reaction, here and in processes started here."""
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, DEFAULTS)
    ignored = [number for number in DEFAULTS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, DEFAULTS[number])
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


# Longer than delays of a busy machine, shorter than the sleeps of the ranks.
PATIENCE_SECONDS = 100.0


def wait_until(condition: Callable[[], object], missing: object = "", limit: float = PATIENCE_SECONDS) -> None:
    """Return when the condition is true; fail with ``missing``, or its result, after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, missing() if callable(missing) else missing
        time.sleep(0.02)


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def announce(folder: Path) -> None:
    """Write this rank's pid to a file for the test."""
    part = folder / f"part{rank()}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"pid{rank()}")


def pids(folder: Path, count: int, limit: float = PATIENCE_SECONDS) -> list[int]:
    """Wait for the pid files of ``count`` ranks and return the pids."""
    files = [folder / f"pid{number}" for number in range(count)]
    wait_until(lambda: all(file.exists() for file in files), lambda: [*folder.iterdir()], limit)
    return [int(file.read_text()) for file in files]


def gone(pid: int, limit: float = PATIENCE_SECONDS) -> bool:
    """Return whether the process ends within the limit. A zombie counts as ended."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if state(pid) in "ZX":
            return True
        time.sleep(0.02)
    return False


def state(pid: int | str) -> str:
    """Return the kernel's letter for the state of a process, X if it is gone."""
    return _stat(pid)[0]


def parent(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    return int(_stat(pid)[1])


def _stat(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def save_and_leave(folder: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Wait for a signal and exit with status 75, like a rank that has saved. ``ready`` is called under the handlers."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, lambda number, frame: received.append(number))
    announce(folder)
    ready()
    while not received:
        time.sleep(0.01)
    (folder / f"told{rank()}").write_text(signal.Signals(received[0]).name)
    sys.exit(75)


# Generous: a busy machine may need a minute to import torch in three spawned ranks.
LIMIT_SECONDS = 250.0


class Launcher:
    """A forked process that runs ``function`` and exits with its result.

    It appends to stdout.txt and stderr.txt in ``folder``, or to ``output`` alone.
    """

    def __init__(self, function: Callable[[], int], folder: Path, output: str = "") -> None:
        check_threads()
        self.out, self.err = folder / (output or "stdout.txt"), folder / (output or "stderr.txt")
        self.pid = os.fork()
        if self.pid == 0:
            for path, number in ((self.out, 1), (self.err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
            status = 99
            try:
                status = function()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def wait(self, limit: float = LIMIT_SECONDS) -> int:
        """Return the exit status, or the negative signal number. Kills, and fails the test, after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"the process still ran after {limit} s; stderr:\n{self.errors}")

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            self.pid = 0

    @property
    def errors(self) -> str:
        return self.err.read_text()

    @property
    def last_line(self) -> str:
        return self.errors.rstrip().splitlines()[-1]


def hasten(monkeypatch: pytest.MonkeyPatch, marker: Path) -> None:
    """Replace the watchdog's clock in later forks: each poll advances it by a day, once ``marker`` exists."""
    days = [0.0]

    def monotonic() -> float:
        days[0] += 86400.0 * marker.exists()
        return days[0]

    monkeypatch.setattr(watchdog, "monotonic", monotonic)
    monkeypatch.setattr(watchdog, "_MAX_POLL_SECONDS", float("inf"))


MakeLauncher = Callable[..., Launcher]
"""The fixture ``launcher``: a process that runs a function."""


def children(pid: int) -> list[int]:
    """Return the child processes of ``pid``."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def plan_of(ranks: int) -> Plan:
    """Return a plan of data-parallel CPU ranks, for ranks that do not train."""
    words = ["data=mock", "device=cpu", f"trainer.dp={ranks}", f"trainer.global_batch_size={ranks}"]
    return resolve(load_config(words, TRAIN_PY.parent / "conf"), ranks)


def without_plan(work: Callable[[], None], plan: Plan) -> None:
    """Run an entry that ignores the plan."""
    work()


def steps(folder: Path) -> list[int]:
    """Return the steps in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return [record["step"] for record in read_metrics(path)] if path.exists() else []


def losses(folder: Path) -> list[float]:
    """Return the training losses of a run."""
    return [record["reduced_train_loss"] for record in read_metrics(folder / "metrics.jsonl")]


def run_train_py(folder: Path, *overrides: str, timeout: float = 200) -> tuple[int, str]:
    """Run ``python train.py ...`` in a fork of this process; return exit status and output."""
    output = folder.with_suffix(".txt")
    status = run_forked(partial(_train_py, [*overrides, f"run.dir={folder}"]), output, output, timeout)
    return status, output.read_text()


def _train_py(arguments: list[str]) -> None:
    sys.argv = [str(TRAIN_PY), *arguments]
    runpy.run_path(str(TRAIN_PY), run_name="__main__")


def status_of_fork(function: Callable[[], None]) -> int:
    """Run ``function`` in a fork of this process; return its exit status, negative for a signal."""
    check_threads()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_forked(function: Callable[[], None], stdout: Path, stderr: Path, timeout: float | None) -> int:
    """Run ``function`` in a fork of this process, which writes to these files; return the exit status."""
    check_threads()
    worker = multiprocessing.get_context("fork").Process(target=_with_output, args=(function, stdout, stderr))
    worker.start()
    worker.join(timeout)
    if worker.is_alive():
        worker.kill()
        worker.join()
        raise AssertionError(f"no end within {timeout} s:\n{stdout.read_text()}\n{stderr.read_text()}")
    assert worker.exitcode is not None
    return worker.exitcode


def _with_output(function: Callable[[], None], stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if number == 1 else 0), 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    function()
