"""The first signal requests a stop; the second one ends the process at once, except under Slurm."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_llama.train import stop
from tests.processes import plan_of


@pytest.mark.parametrize(
    ("job", "second", "end"),
    [
        (None, signal.SIGTERM, -signal.SIGTERM),
        ("7", signal.SIGTERM, 0),
        (None, signal.SIGHUP, 0),
        (None, signal.SIGINT, -signal.SIGINT),
        ("7", signal.SIGINT, -signal.SIGINT),
    ],
    ids=["by hand", "under Slurm", "a terminal", "Ctrl-C", "Ctrl-C under Slurm"],
)
def test_a_second_signal(monkeypatch: pytest.MonkeyPatch, job: str | None, second: int, end: int) -> None:
    """Slurm only repeats the first, and so does a terminal that closes."""
    monkeypatch.setattr(stop, "_ECHO_SECONDS", -1.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    plan = plan_of(1)
    child = os.fork()
    if child == 0:
        with stop.StopSignals(plan, reports=False) as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            received = signals.received
            os.kill(os.getpid(), second)
            os._exit(0 if received else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == end
