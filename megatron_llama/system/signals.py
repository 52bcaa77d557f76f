"""Signal handlers for the duration of a ``with`` block, processes that end with their parent, and threads."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from megatron_llama.system.exit_status import EXIT_FAILED
from megatron_llama.system.interrupts import leave

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that request a stop: SIGTERM from a user or a scheduler, SIGHUP from a closed terminal."""

JOB_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, *STOP_SIGNALS)
"""Also signals that announce the end of a job: of Slurm (SIGUSR1), submitit (SIGUSR2), a limit on CPU time."""

REPEATED_SIGNALS = (signal.SIGHUP, signal.SIGXCPU)
"""Signals that are sent repeatedly: by a closing terminal, and by the kernel each second above a soft limit."""

_ENDING = (signal.SIGINT, *JOB_SIGNALS)


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``handler`` for these signals inside the block; restore the previous handlers after it.

    An ignored SIGHUP (nohup) stays ignored. Only the main thread may enter the block.
    """
    numbers = [number for number in numbers if not is_ignored_by_user(number)]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def exit_on_signal() -> None:
    """Until a run installs its handlers, end this process at a signal: one line, status 128 + the signal's number.

    The handler exits instead of raising, because an import in progress may print or swallow an exception. Files that
    are written before the ranks start are written atomically.
    """
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def ignore_signals() -> None:
    """Ignore the signals of ``exit_on_signal``: the work is done, and its exit status must not change."""
    for number in _ENDING:
        if signal.getsignal(number) is leave:
            signal.signal(number, signal.SIG_IGN)


def announce_interrupt() -> None:
    """Write the effect of the first Ctrl-C to the terminal. Callable in a signal handler."""
    with suppress(OSError):
        os.write(2, b"\nCtrl-C: the run stops after this step and saves it. Ctrl-C again ends it at\nonce.\n")


def is_ignored_by_user(number: int) -> bool:
    """Return whether the user made this process ignore a signal, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def exit_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ``parent_pid`` ends, also by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_FAILED)


def _watch_parent(parent_pid: int) -> None:
    """Check each second whether the parent is alive, on systems without PR_SET_PDEATHSIG."""
    while os.getppid() == parent_pid:
        time.sleep(1)
    os._exit(EXIT_FAILED)


def run_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Call ``work`` in a daemon thread, for which the end of the process does not wait as for an executor's threads."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP or a debugger; False if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
