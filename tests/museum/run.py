"""Run a test of the suite in a forked process, under a mutation."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

import tests.warm  # noqa: F401  before the fork
from tests.museum.mutations import Mutation
from tests.paths import ROOT

SECONDS = 240


def run_test(node: str, mutation: Mutation | None, folder: Path) -> tuple[int, str]:
    """Return pytest's exit status (1: the test failed) and the output of the test ``node`` under ``mutation``."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            _run(node, mutation, folder, output.fileno())
        status = _wait(pid)
        output.seek(0)
        return status, output.read()


def _run(node: str, mutation: Mutation | None, folder: Path, output: int) -> None:
    status = -1
    try:
        os.chdir(ROOT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        for variable in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[variable]
        with pytest.MonkeyPatch.context() as patch:
            _clear_caches()
            if mutation is not None:
                mutation(patch)
            options = ["-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
            status = int(pytest.main([node, *options, f"--basetemp={folder / 'inner'}"]))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def _clear_caches() -> None:
    """Forget what tests of this process have computed without the mutation."""
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _wait(pid: int) -> int:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"no end within {SECONDS} s")
