"""A starter in a process of its own: its ranks' ends, its last words and its exit status are looked at from outside."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  once, before any fork

# Generous: a busy machine may need a minute to import torch in three spawned ranks.
LIMIT_SECONDS = 250.0


class Starter:
    """A forked process that runs ``function``; its exit status is what the function returns."""

    def __init__(self, function: Callable[[], int], folder: Path) -> None:
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        self.pid = os.fork()
        if self.pid == 0:
            for path, number in ((self.out, 1), (self.err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
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
        """The exit status, or minus the signal's number; fails the test where the starter takes too long."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise AssertionError(f"the starter still runs after {limit} s; it said:\n{self.errors}")

    def kill(self) -> None:
        """For tests that failed."""
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)

    @property
    def errors(self) -> str:
        """What stood on stderr."""
        return self.err.read_text()

    @property
    def last_line(self) -> str:
        """The last thing printed."""
        return self.errors.rstrip().splitlines()[-1]


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Callable[[Callable[[], int]], Starter]]:
    """Makes starters, and ends those that a failed test leaves."""
    made: list[Starter] = []

    def make(function: Callable[[], int]) -> Starter:
        made.append(Starter(function, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.kill()
