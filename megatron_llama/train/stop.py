"""SIGTERM, SIGUSR1, SIGHUP: finish the step, save, exit with 75. A second one stops at once, except under Slurm.

SIGHUP is what a terminal that closes sends, as often as it likes: it never stops at once. nohup keeps it out.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from types import FrameType

from megatron_llama.system.signals import ASKED_TO_STOP, handling

# A signal to a whole job reaches a rank twice, directly and through its starter. Within this time it is one request.
_ECHO_SECONDS = 1.0
# Slurm sends both signals, seconds apart (SIGUSR1 before the time limit, SIGTERM at it), and SIGKILL to whoever takes
# too long: under Slurm the second signal only repeats the first.
_SLURM_JOB = "SLURM_JOB_ID"


class StopSignals(ExitStack):
    """Inside its ``with`` block, records whether this rank was asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self._first_at: float | None = None

    @property
    def received(self) -> bool:
        """Whether a signal has come."""
        return self._first_at is not None

    def __enter__(self) -> StopSignals:
        self.enter_context(handling((signal.SIGUSR1, *ASKED_TO_STOP), self._receive))
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        elif number != signal.SIGHUP and now - self._first_at > _ECHO_SECONDS and _SLURM_JOB not in os.environ:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
