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
from contextlib import contextmanager
from types import FrameType

from megatron_llama.system.exit_status import EXIT_FAILED

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls ``handler`` for these signals inside the block, and restores the previous handlers after it.

    Only the main thread may enter the block.
    """
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def die_with(parent_pid: int) -> None:
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
