"""SIGTERM and SIGUSR1: finish the step, save, leave with status 75. A second one stops at once, but for under Slurm."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A signal to a whole job reaches a rank directly and again through its starter: that is one wish, not two.
_ECHO_SECONDS = 1.0
# Slurm itself says the same thing twice, with seconds between (SIGUSR1 before the limit, SIGTERM at it), and has
# SIGKILL for those who take too long: there a second one only repeats the first.
_PATIENT = "SLURM_JOB_ID"


class StopSignals:
    """Remembers, for the time of a ``with`` block, whether this rank was asked to stop."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked_at is not None

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _ECHO_SECONDS and _PATIENT not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
