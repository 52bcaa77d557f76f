"""Signal handlers that are in place for the time of a ``with`` block; processes that end with their parent, or are
stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from megatron_llama.system.exit_status import EXIT_FAILED

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""By a person or a scheduler (SIGTERM), or because the terminal has gone (SIGHUP)."""

_ENDING = (signal.SIGINT, signal.SIGUSR1, *STOP_SIGNALS)


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls ``handler`` for these signals inside the block, and restores the previous handlers after it.

    SIGHUP stays ignored where it is: that is what nohup is for. Only the main thread may enter the block.
    """
    numbers = [number for number in numbers if not is_ignored_by_user(number)]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def exit_on_signal() -> None:
    """Until a run has handlers of its own, a signal ends this process at once: one line, status 128 + its number.

    No exception does that: it would come up inside whatever is being imported, which may print or swallow it. What
    is written before the ranks start is written whole or not at all.
    """
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def ignore_signals() -> None:
    """The end of what ``exit_on_signal`` began: all is done, and no signal can change the exit status any more."""
    for number in _ENDING:
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        name = "Ctrl-C" if number == signal.SIGINT and os.isatty(2) else signal.Signals(number).name
        with suppress(OSError):
            os.write(2, f"Stopped by {name}.\n".encode())
    with suppress(Exception):  # it may be what was interrupted
        sys.stdout.flush()
    os._exit(128 + number)


def is_ignored_by_user(number: int) -> bool:
    """Whether the user has this process ignore a signal, as by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def exit_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent ``parent_pid`` ends for whatever reason, kill -9 included."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_FAILED)


def _watch_parent(parent_pid: int) -> None:
    """Where the system can't tell a child that its parent died: look every second."""
    while os.getppid() == parent_pid:
        time.sleep(1)
    os._exit(EXIT_FAILED)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger; False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
