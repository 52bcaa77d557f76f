"""starts.jsonl: a line at each start of a run, when rank 0 has loaded its checkpoint, and at the end.

Process 0 writes the starts and ends; reports read the file. A killed process writes no end. The file is replaced, never
opened for writing, so that a link or a pipe in its place cannot block or redirect a run; a failure is a warning.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama import event_hook
from megatron_llama.config.problems import shorten
from megatron_llama.config.stored_settings import copied_steps, leaves_newest, stored_steps
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_RESTART, EXIT_USER
from megatron_llama.train.metrics_file import (
    LOADED,
    METRICS_FILE,
    START,
    STARTS_FILE,
    Broken,
    append_start_line,
    read_last_step,
    stream_records,
)

STARTED = "MEGATRON_LLAMA_STARTED"
"""Variable with the user's command, for the processes that launch.hosts starts."""
RESTARTS = "MEGATRON_LLAMA_RESTARTS"
"""Variable with the number of this run's restarts by trainer.max_restarts and their limit, such as "1 2"."""
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables with the restarts of other launchers."""
MOST_REASON = 300
"""Characters of a reason."""
REASONS = {0: "done", EXIT_USER: "rejected", EXIT_RESTART: "stopped after saving"}


@dataclass
class Start:
    """One start of a run."""

    time: float
    """Seconds since the epoch."""
    step: int | None = None
    """Step from which the run resumed, 0 without a checkpoint. Before the load it is the newest step; None
    if another folder's checkpoint is resumed."""
    command: str = ""
    host: str = ""
    pid: int = 0
    ended: float | None = None
    """Time of the end; None if no end is recorded."""
    last_step: int | None = None
    """Last step in metrics.jsonl at the end."""
    status: int | None = None
    reason: str = ""
    loaded: bool = False
    """Whether rank 0 has loaded the state from which the run resumes."""

    @property
    def is_here(self) -> bool:
        """Whether the run started on this host."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether no end is recorded and the process exists on this host."""
        if self.ended is not None or self.pid <= 0 or not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True


def note_restarts(count: int, limit: int) -> None:
    """Store the restarts of this run for the processes that log its starts: this one, or the first host's."""
    os.environ[RESTARTS] = f"{count} {limit}"


def _read_restarts() -> tuple[int, int]:
    """Return the number of restarts so far, by any launcher, and of the restarts that ``with_restarts`` has left."""
    count, limit = map(int, os.environ.get(RESTARTS, "0 0").split())
    return count or max(int(os.environ.get(name) or 0) for name in RESTART_COUNTS), limit - count


def log_start(plan: Plan) -> None:
    """Add the line of a start, and send the event; a failure is a warning on stderr."""
    restarts, _ = _read_restarts()
    cause: dict[str, Any] = {}
    with suppress(OSError, IndexError):
        last = read_starts(plan.run_dir)[0][-1]
        cause = {"status": last.status, "reason": last.reason}
    resume = plan.config.checkpoint.resume
    saved = [] if resume == "never" else stored_steps(plan.run_dir, plan.config)
    saved += [] if leaves_newest(plan.config) else sorted(copied_steps(plan.run_dir, plan.config))
    step = max(saved) if saved else 0 if resume in ("auto", "never") else None
    command = os.environ.get(STARTED) or command_of_process()
    line = {"event": START, "time": round(time.time(), 3), "step": step, "command": shorten(command)}
    try:
        append_start_line(plan.run_dir, {**line, "host": socket.gethostname(), "pid": os.getpid()})
    except OSError as error:
        sys.stderr.write(f"WARNING: {plan.run_dir / STARTS_FILE} was not written: {error.strerror or error}.\n")
    if restarts:
        event_hook.send("restart", step=step, restarts=restarts, **cause)
    else:
        event_hook.send("start", step=step)


def command_of_process() -> str:
    """Return the command of this process, as typed."""
    return shlex.join([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]])


def has_loaded(folder: Path, since: float | None = None) -> bool:
    """Return whether the last start, or any from the time ``since`` on, has loaded its state; True if unknown."""
    with suppress(OSError, IndexError):
        starts = read_starts(folder)[0]
        return starts[-1].loaded if since is None else any(each.loaded for each in starts if each.time >= since)
    return True


def log_end(folder: Path, status: int, reason: str = "", *, is_last: bool = False) -> None:
    """Add the line of the end of the last start, and send the event.

    A failure is not reported: ``log_start`` has done it. The event of a failure that ``with_restarts`` restarts is the
    next start's. ``is_last``: it does not restart.
    """
    step = None
    with suppress(OSError):
        step = read_last_step(folder / METRICS_FILE)
    line = {"event": "end", "time": round(time.time(), 3), "step": step, "status": status}
    reason = shorten(" ".join((reason or REASONS.get(status, f"failed with status {status}")).split()), MOST_REASON)
    with suppress(OSError):
        append_start_line(folder.resolve(strict=True), {**line, "reason": reason})  # a renamed folder is not created
    if is_last or status != EXIT_FAILED or _read_restarts()[1] == 0:
        event_hook.send("stop" if status == EXIT_RESTART else "end", step=step, status=status, reason=reason)


def read_starts(folder: Path) -> tuple[list[Start], int]:
    """Return the starts of a run, oldest first, and the number of invalid lines. Raises OSError."""
    if not (folder / STARTS_FILE).exists():
        return [], 0
    starts: list[Start] = []
    broken: Broken = []
    invalid = 0
    for record, _ in stream_records(folder / STARTS_FILE, broken, ("time",)):
        seconds, step = record["time"], record.get("step")
        step = step if type(step) is int else None
        event, is_open = record.get("event"), bool(starts) and starts[-1].ended is None
        if not math.isfinite(seconds) or not (event == START or (event in (LOADED, "end") and is_open)):
            invalid += 1
        elif event == LOADED:
            starts[-1].step, starts[-1].loaded = step, True
        elif event == START:
            pid = record.get("pid")
            words = (record.get("command"), record.get("host"))
            command, host = (word if isinstance(word, str) else "" for word in words)
            starts.append(Start(seconds, step, command, host, pid if type(pid) is int else 0))
        else:
            status, reason = record.get("status"), record.get("reason")
            starts[-1].ended, starts[-1].last_step = seconds, step
            starts[-1].status = status if type(status) is int else None
            starts[-1].reason = reason if isinstance(reason, str) else ""
    return starts, invalid + len(broken)
