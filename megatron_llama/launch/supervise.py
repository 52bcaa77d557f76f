"""Supervision of child processes: a failed child ends all, and signals are forwarded.

Children are the ranks of this machine (start.py) or the ssh processes of other machines (ssh.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from megatron_llama.config.stored_settings import leaves_newest
from megatron_llama.launch.start_log import has_loaded, note_restarts
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_RESTART
from megatron_llama.system.signals import JOB_SIGNALS, announce_interrupt, handle_signals

WATCHED = (signal.SIGINT, *JOB_SIGNALS)
POLL_SECONDS = 0.05
_ECHO_SECONDS = 0.25
"""A wrapper may forward the terminal's SIGINT; both count as one."""


class Child(ABC):
    """A child process."""

    status: int | None = None
    """Exit status; None while the child runs. EXIT_FAILED if a signal ended it, or if its work was not done."""

    @property
    def ended(self) -> bool:
        """Whether the child has ended."""
        return self.status is not None

    @abstractmethod
    def poll(self) -> bool:
        """Set ``status``; return True only in the first call after the end."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal if the child runs."""

    @property
    def is_finishing(self) -> bool:
        """Whether the child failed and finishes the save of an earlier step."""
        return False


@dataclass(frozen=True)
class Grace:
    """Time for the remaining children after the first has ended, in seconds."""

    fault: float
    """After a failure: other children may report the cause."""
    restart: float
    """After EXIT_RESTART: all have saved and end soon."""
    interrupt: float
    """After Ctrl-C, if a child ended without saving."""


class Signals:
    """Signal handlers while children run: signals are forwarded, and a second SIGINT ends the job."""

    def __init__(self, received: set[int] | None = None, *, hold: bool = False) -> None:
        """``received`` collects the signals. ``hold``: block them until ``release``, so not between forks."""
        self.children: list[Child] = []
        self.interrupted_at: float | None = None
        """Time of the first SIGINT."""
        self.ends_at_once = False
        """Whether a second SIGINT was received."""
        self.received = set[int]() if received is None else received
        self._handlers = ExitStack()
        self._hold = hold
        self._mask: Iterable[int] | None = None

    def __enter__(self) -> Signals:
        if self._hold:  # before the handlers, which would drop signals before the first child
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        self._handlers.enter_context(handle_signals(WATCHED, self._receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        self.release()

    def add(self, child: Child) -> None:
        """Forward signals to a child, received ones too."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        for number in self.received:
            child.send(number)
        self.children.append(child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def release(self) -> None:
        """Unblock held signals."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted_at is not None:
                self.ends_at_once |= now - self.interrupted_at > _ECHO_SECONDS
                return
            self.interrupted_at = now
            if os.isatty(2):
                announce_interrupt()
        for child in self.children:
            child.send(number)


def supervise(
    children: Sequence[Child], signals: Signals, grace: Grace, wait: Callable[[float], None] = time.sleep
) -> None:
    """Wait until all children have ended, or until the grace period is over. ``wait`` sleeps between polls.

    A second SIGINT ends the wait. After a failure, children that finish a save have no limit but the watchdog's.
    """
    deadline = float("inf")
    while running := [child for child in children if not child.ended]:
        if time.monotonic() > deadline and not any(child.is_finishing for child in running):
            return
        for child in children:
            if child.poll() and child.status != 0:
                seconds = grace.fault if signals.interrupted_at is None else grace.interrupt
                seconds = grace.restart if child.status == EXIT_RESTART else seconds
                deadline = min(deadline, time.monotonic() + seconds)
        if signals.ends_at_once:
            return
        wait(POLL_SECONDS)


def with_restarts(plan: Plan, start: Callable[[], int], received: Collection[int]) -> int:
    """Call ``start``; restart after failures up to trainer.max_restarts times. Return the last exit status.

    Args:
        received: Signals that ``start`` received. They ask the run to stop, so it does not restart, even if it failed.
    """
    allowed = plan.config.trainer.max_restarts
    for restart in range(1, allowed + 1):
        note_restarts(restart - 1, allowed)
        status = start()
        if status != EXIT_FAILED or received:
            return status
        report(f"\nRestart {restart} of {allowed}.\n")
        if leaves_newest(plan.config) and has_loaded(plan.run_dir):
            plan.config.checkpoint.resume = "auto"
    note_restarts(allowed, allowed)
    return start()


def report(text: str) -> None:
    """Write a final message to stderr, below the progress bar."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a killed progress bar leaves the cursor hidden
    sys.stderr.write(f"{text}\n" if text else "")
    sys.stderr.flush()
