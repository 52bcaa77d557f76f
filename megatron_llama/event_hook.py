"""The user's command at events of a run (hook.on_event), which gets an event as a JSON object on stdin.

The launcher of rank 0 sends starts and ends, rank 0 the other events: docs/guides/training/faults.md
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_llama.system.signals import JOB_SIGNALS, handle_signals

END_SECONDS = 10.0
"""Longest wait for running commands at the end of a run, which then kills them."""
MOST_RUNNING = 16
"""Commands that run at the same time. Without a limit, a command that hangs would fill the host."""
MOST_RANKS = 64
"""Ranks listed in an event, which must fit in the buffer of a pipe."""
_SHELL = '/bin/sh -c "$1" || echo "hook.on_event: the command failed with status $? at the event $2" >&2'
"""Shell script that runs a command and reports its failure, because the process that started it does not wait."""


@dataclass
class _Hook:
    """The command of the process ``pid``. Its forks inherit the object, but do not use it."""

    command: str
    run_dir: Path
    pid: int = field(default_factory=os.getpid)
    started: list[tuple[subprocess.Popen[bytes], str]] = field(default_factory=list)
    """Commands that may run, with their events."""

    def running(self) -> list[tuple[subprocess.Popen[bytes], str]]:
        """Return the commands that run; forget the others."""
        self.started = [each for each in self.started if each[0].poll() is None]
        return self.started


_hook: _Hook | None = None


def _own_hook() -> _Hook | None:
    return _hook if _hook is not None and _hook.pid == os.getpid() else None


def listen(command: str | None, run_dir: Path) -> bool:
    """Run ``command`` at each later event of this process. Returns False without a command, or if it has one."""
    global _hook
    if command is None or _own_hook() is not None:
        return False
    _hook = _Hook(command, run_dir.absolute())
    return True


@contextmanager
def listening(command: str | None, run_dir: Path) -> Iterator[None]:
    """``listen`` in a rank, and wait at the end; not after an error, whose report must not wait."""
    is_first = listen(command, run_dir)
    yield
    if is_first:
        finish()


def send(event: str, **fields: Any) -> None:
    """Start the command for an event with ``fields``, if this process has one. Never blocks; a failure is one line."""
    if (hook := _own_hook()) is None:
        return
    place = {"run_dir": str(hook.run_dir), "host": socket.gethostname()}
    text = json.dumps({"event": event, "time": round(time.time(), 3), **place, **fields}) + "\n"
    if len(hook.running()) >= MOST_RUNNING:
        sys.stderr.write(f"hook.on_event: {MOST_RUNNING} commands still run; none was started for {event}\n")
        return
    words, pipe = ["/bin/sh", "-c", _SHELL, "hook", hook.command, event], subprocess.PIPE
    try:  # in a new session: Ctrl-C and a closed terminal must not end the command that reports them
        process = subprocess.Popen(words, stdin=pipe, stdout=2, stderr=2, bufsize=0, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"hook.on_event: cannot start the command for {event}: {error.strerror}\n")
        return
    hook.started.append((process, event))
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # it may have ended
        process.stdin.write(text.encode())


def finish() -> None:
    """Wait for running commands, at most END_SECONDS and until a signal; then kill them, with a line for each."""
    if (hook := _own_hook()) is None or not hook.running():
        return
    start, signals = time.monotonic(), list[int]()
    with handle_signals((signal.SIGINT, *JOB_SIGNALS), lambda number, frame: signals.append(number)):
        while hook.running() and not signals and time.monotonic() < start + END_SECONDS:
            time.sleep(0.02)
    for process, event in hook.running():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        seconds = time.monotonic() - start
        sys.stderr.write(f"hook.on_event: killed the command of the event {event} {seconds:.0f} s after the end\n")
