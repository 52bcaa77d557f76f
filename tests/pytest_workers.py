"""Run the collected tests in forked workers: ``pytest --workers 3``.

The tests are collected once, and the workers share the imported packages. Each worker takes a file, or 100 tests of a
long one, longest folders first. The parent, which runs no test, ends a test at its time limit with the stacks of all
its processes, replaces a worker that dies, and stops the run after ``--limit`` seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.processes import state
from tests.ranks import check_threads
from tests.warm import warm_oracles

MOST_TESTS = 100
"""Tests of one file that a worker takes at a time."""
OMITTED_FRAMES = ("/_pytest/", "/pytest/", "/pluggy/", "<frozen runpy>", "Extension modules:")
"""Parts of lines of a stack that are the same for each test."""


def time_limit(item: pytest.Item) -> float:
    """Return the seconds after which this test counts as hanging: the marker ``timeout``, or the setting."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))


@dataclass
class Worker:
    """A forked process that runs tests, as the parent views it."""

    pid: int
    connection: Connection
    stacks: Path
    """File with the stacks of its processes, once they are stopped."""
    files: deque[list[int]] = field(default_factory=deque)
    """Indices of the tests that it was given and has not finished, by file."""
    running: int | None = None
    started: float = 0.0


class Run:
    """A session whose tests run in ``count`` workers, and end after ``limit`` seconds."""

    def __init__(self, session: pytest.Session, count: int, limit: float) -> None:
        self.session, self.items, self.limit = session, session.items, limit
        self.began = monotonic()
        self.queue = deque[list[int]]()
        for _, group in groupby(range(len(self.items)), key=lambda index: self.items[index].path):
            indices = list(group)
            self.queue.extend(indices[start : start + MOST_TESTS] for start in range(0, len(indices), MOST_TESTS))
        self.base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.forked = 0
        warm_oracles()
        self.workers = [self._fork() for _ in range(min(count, len(self.queue)))]

    def loop(self) -> None:
        """Run all tests."""
        try:
            while self.workers:
                ready = wait([worker.connection for worker in self.workers], 1.0)
                for worker in [worker for worker in self.workers if worker.connection in ready]:
                    self._receive(worker)
                self._end_hanging_tests()
                if self.session.shouldfail or self.session.shouldstop:
                    break
        finally:
            for worker in self.workers:
                _kill_tree(worker.pid)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def _fork(self) -> Worker:
        folder = self.base / f"worker{self.forked}"
        self.forked += 1
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        check_threads()
        gc.freeze()  # a collection in a worker would copy the pages that it visits
        pid = os.fork()
        if pid == 0:
            ours.close()
            _work(self.session, theirs, folder)
        gc.unfreeze()
        theirs.close()
        worker = Worker(pid, ours, _stacks_of(folder))
        self._send_file(worker)
        return worker

    def _send_file(self, worker: Worker) -> None:
        indices = self.queue.popleft() if self.queue else []
        if indices:
            worker.files.append(indices)
        worker.connection.send(indices)

    def _receive(self, worker: Worker) -> None:
        message = _message(worker.connection)
        if message is None:
            self._replace(worker)
            return
        kind, value = message
        if kind == "start":
            worker.running, worker.started = value, monotonic()
        elif kind == "report":
            hook = self.session.config.hook
            report = hook.pytest_report_from_serializable(config=self.session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "finish":
            _remove(worker, value)
        elif kind == "next":
            self._send_file(worker)

    def _replace(self, worker: Worker) -> None:
        """Report the test of a worker that has ended, and give its remaining tests to a new one."""
        _, status = os.waitpid(worker.pid, 0)
        self.workers.remove(worker)
        if worker.running is not None:
            text = f"The worker ended during this test, with status {os.waitstatus_to_exitcode(status)}."
            self._fail(worker.running, text, monotonic() - worker.started)
            _remove(worker, worker.running)
        self.queue.extendleft(reversed([indices for indices in worker.files if indices]))
        if self.queue:
            self.workers.append(self._fork())

    def _fail(self, index: int, text: str, seconds: float) -> None:
        item = self.items[index]
        keywords = {name: 1 for name in item.keywords}
        report = pytest.TestReport(item.nodeid, item.location, keywords, "failed", text, "call", duration=seconds)
        self.session.config.hook.pytest_runtest_logreport(report=report)

    def _end_hanging_tests(self) -> None:
        now = monotonic()
        if now - self.began > self.limit:
            for worker in self.workers:
                if worker.running is not None:
                    text = f"The run was stopped after --limit {self.limit:g} s during this test.\n"
                    self._fail(worker.running, text + _stacks(worker), now - worker.started)
            left = sum(map(len, self.queue)) + sum(len(indices) for worker in self.workers for indices in worker.files)
            self.session.shouldstop = f"stopped after --limit {self.limit:g} s: {left} tests have not ended"
            return
        for worker in self.workers:
            if worker.running is None or now - worker.started < (limit := time_limit(self.items[worker.running])):
                continue
            text = f"no end within {limit:.0f} s\n" + _stacks(worker)
            self._fail(worker.running, text, now - worker.started)
            _remove(worker, worker.running)  # its connection ends now, and _receive replaces it


def _message(connection: Connection) -> tuple[str, Any] | None:
    """Return the next message, None if the worker has ended."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def _remove(worker: Worker, index: int) -> None:
    """Remove a finished test from the tests of a worker."""
    if worker.running == index:
        worker.running = None
    for indices in worker.files:
        if index in indices:
            indices.remove(index)
    while worker.files and not worker.files[0]:
        worker.files.popleft()


def _work(session: pytest.Session, connection: Connection, folder: Path) -> None:
    """Run files of tests until the parent has no more. Does not return."""
    status = 1
    try:
        config = session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its file is shared with the other workers
        capture.start_global_capturing()
        capture.suspend_global_capture()
        for name in ("terminalreporter", "lfplugin", "nfplugin", "stepwiseplugin", "timeout"):
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)
        folder.mkdir(exist_ok=True)
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        config.pluginmanager.register(_Reports(config, connection))
        faulthandler.enable(_stacks_of(folder).open("a"))
        _run_files(session.items, connection)
        status = 0
    finally:
        os._exit(status)


def _run_files(items: Sequence[pytest.Item], connection: Connection) -> None:
    indices = connection.recv()
    while indices:
        following: list[int] = []
        for place, index in enumerate(indices):
            last = place == len(indices) - 1
            if last:  # the fixtures that the next file shares stay
                connection.send(("next", None))
                following = connection.recv()
            after = following[:1] if last else indices[place + 1 :]
            connection.send(("start", index))
            item = items[index]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items[after[0]] if after else None)
            connection.send(("finish", index))
        indices = following


class _Reports:
    """Sends a worker's reports to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))


def _stacks(worker: Worker) -> str:
    """End the worker and its descendants, and return the Python stacks of all."""
    _send(worker.pid, signal.SIGSTOP)  # it would continue when its ranks end, and its end would kill ranks
    for pid in [*descendants(worker.pid), worker.pid]:
        command = _command(pid)
        with worker.stacks.open("a") as file:
            file.write(f"\nprocess {pid}: {command}\n")
        _send(pid, signal.SIGABRT)  # faulthandler, which forked processes inherit, writes the stacks
        _send(pid, signal.SIGCONT)
        for _ in range(20):
            if state(pid) in "ZX":
                break
            sleep(0.1)
    _kill_tree(worker.pid)
    lines = worker.stacks.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not any(part in line for part in OMITTED_FRAMES))


def descendants(pid: int) -> list[int]:
    """Return the process ids of all living descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    below, pending = list[int](), [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        below += children
        pending += children
    return below


def _stacks_of(folder: Path) -> Path:
    return folder.with_suffix(".stacks")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "ended"


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _kill_tree(pid: int) -> None:
    for number in [*descendants(pid), pid]:
        _send(number, signal.SIGKILL)
