"""Watching over children: one ends badly and all end; signals are passed on to them.

start.py's children are the ranks of this machine, ssh.py's the commands on other machines.
"""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.signals import STOP_SIGNALS, handle_signals

FORWARDED = (signal.SIGUSR1, *STOP_SIGNALS)
WATCHED = (signal.SIGINT, *FORWARDED)
POLL_SECONDS = 0.05


class Child(ABC):
    """A process that this one has started."""

    ended: bool = False

    @abstractmethod
    def poll(self) -> bool:
        """True once: on the first call after the child has ended. Sets ``ended``."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Sends it a signal, if it still runs."""

    @property
    @abstractmethod
    def succeeded(self) -> bool:
        """Ended with its work done."""

    @property
    @abstractmethod
    def wants_restart(self) -> bool:
        """Ended with the status that asks to be started again."""


@dataclass(frozen=True)
class Grace:
    """How long the remaining children may go on after the first one has ended, in seconds."""

    fault: float
    """After a failure: time for the others to report theirs, since the cause may be among them."""
    restart: float
    """After a child that asks for a restart: all have saved by then, the others have only to leave."""
    interrupt: float
    """After Ctrl-C."""


class Signals:
    """This process's reaction to signals while its children run: they are passed on, and SIGINT ends the job."""

    def __init__(self, *, hold: bool = False) -> None:
        """``hold`` holds signals back until ``release``: one that arrives between two forks would find half a job."""
        self.children: list[Child] = []
        self.interrupted_at: float | None = None
        self.received: set[int] = set()
        self._handlers = ExitStack()
        self._hold = hold
        self._mask: Iterable[int] | None = None

    def __enter__(self) -> Signals:
        if self._hold:  # before the handlers: they would drop a signal that comes before the first child
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        self._handlers.enter_context(handle_signals(WATCHED, self._receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        self.release()

    def release(self) -> None:
        """Delivers what was held back."""
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._mask = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        if number == signal.SIGINT and self.interrupted_at is None:
            self.interrupted_at = time.monotonic()
        for child in self.children:
            child.send(number)


def supervise(
    children: Sequence[Child], signals: Signals, grace: Grace, wait: Callable[[float], None] = time.sleep
) -> None:
    """Returns when all children have ended, or when the rest has to be killed. ``wait`` is called with the seconds
    between two looks at them."""
    deadline = float("inf")
    while not all(child.ended for child in children) and time.monotonic() < deadline:
        for child in children:
            if child.poll() and not child.succeeded:
                seconds = grace.restart if child.wants_restart else grace.fault
                deadline = min(deadline, time.monotonic() + seconds)
        if signals.interrupted_at is not None:
            deadline = min(deadline, signals.interrupted_at + grace.interrupt)
        wait(POLL_SECONDS)


def with_restarts(plan: Plan, start: Callable[[], int]) -> int:
    """Starts a run that fails again, as often as trainer.max_restarts allows; returns the last exit status."""
    allowed = plan.config.trainer.max_restarts
    for restart in range(1, allowed + 1):
        status = start()
        if status != EXIT_FAILED:
            return status
        report(f"\nStarting again, {restart} of {allowed} times, from the newest checkpoint.\n")
        if plan.config.checkpoint.resume == "never":  # that was about the first start
            plan.config.checkpoint.resume = "auto"
    return start()


def report(text: str) -> None:
    """The last words on stderr, below whatever a progress bar left there."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a bar that was killed may have left the cursor hidden
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
