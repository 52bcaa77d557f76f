"""The suite gives the same results from any shell, in the background and under ``nohup`` too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.processes import DEFAULTS, default_signals
from tests.ranks import run_ranks


def masks(status: str) -> tuple[int, int]:
    """Blocked and ignored signals of a text like /proc/self/status, as bits."""
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["SigBlk"], 16), int(fields["SigIgn"], 16)


def of_a_command() -> tuple[int, int]:
    """Masks of a command that this process starts."""
    return masks(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout)


def of_a_rank(rank: int) -> tuple[int, int]:
    """Masks of a forked rank."""
    with open("/proc/self/status") as file:
        return masks(file.read())


@pytest.fixture
def from_a_shell_that_ignores(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that this process ignores and blocks during the test."""
    number: signal.Signals = request.param
    handler = signal.signal(number, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    yield number
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    signal.signal(number, handler)


@pytest.mark.parametrize("from_a_shell_that_ignores", DEFAULTS, ids=lambda number: number.name, indirect=True)
def test_commands_and_ranks_get_default_signals(from_a_shell_that_ignores: signal.Signals) -> None:
    number = from_a_shell_that_ignores
    bit, inherited = 1 << number - 1, of_a_command()
    assert [mask & bit for mask in inherited] == [bit, bit], "the signal is blocked and ignored"
    with default_signals():
        assert signal.getsignal(number) == DEFAULTS[number]
        for masks_there in (of_a_command(), run_ranks(of_a_rank, 1)[0]):
            assert [mask & bit for mask in masks_there] == [0, 0]
    assert of_a_command() == inherited, "the shell's choice is restored"


def test_every_test_runs_with_default_signals() -> None:
    """Fails without the fixture of conftest.py when the suite starts in the background."""
    assert {number: signal.getsignal(number) for number in DEFAULTS} == DEFAULTS
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
