"""Threads of a process that forks: the child has only the thread that called fork, and locks that others held."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress
from pathlib import Path

_OF_TORCH = ("pt_", "gloo")
"""Starts of the names of native threads: stores, process groups, autograd. Pools of math libraries have the name of the
process, and survive a fork."""
_OF_RUNNER = "pytest_timeout"
_END_SECONDS = 10.0


def foreign_threads() -> list[str]:
    """Return the names of the threads of this process that could disturb a fork."""
    current = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not current]
    of_python = {thread.native_id for thread in (*others, current)}
    names = [thread.name for thread in others if not _is_of_runner(thread)]
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            name = (task / "comm").read_text().strip()
            if int(task.name) not in of_python and name.startswith(_OF_TORCH):
                names.append(name)
    return sorted(names)


def _is_of_runner(thread: threading.Thread) -> bool:
    """Return whether the thread belongs to pytest-timeout."""
    target = getattr(thread, "function", None) or getattr(thread, "_target", None)
    names = (thread.name, type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(name.startswith(_OF_RUNNER) for name in names)


def check_threads(seconds: float = _END_SECONDS) -> None:
    """Raise AssertionError if foreign threads are alive; they have ``seconds`` to end. Called before a test forks."""
    if not foreign_threads():
        return
    gc.collect()  # tracebacks of expected errors keep stores alive
    deadline = time.monotonic() + seconds
    while names := foreign_threads():
        assert time.monotonic() < deadline, f"a test forks while other threads are alive: {', '.join(names)}"
        time.sleep(0.02)
