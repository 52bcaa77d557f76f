"""Starts ranks on this machine and watches over them: one ends badly, all end, and its own words come last."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from megatron_llama.launch.rank_process import (
    CONSEQUENCE_DELAY_SECONDS,
    WATCHED,
    Assignment,
    Report,
    run_assignment,
)
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER

if TYPE_CHECKING:
    from megatron_llama.plan import Plan

POLL_SECONDS = 0.05
# After the first bad end: time for the other ranks to report theirs, since the cause may be among them.
FAULT_GRACE_SECONDS = 1.0
INTERRUPT_GRACE_SECONDS = 3.0
# After the first rank that asks for a restart: all have saved by then, the others have only to leave.
RESTART_GRACE_SECONDS = 30.0


def _own_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


@dataclass
class Share:
    """The ranks that this process starts, and where they and all others meet."""

    ranks: int
    world_size: int
    first_rank: int = 0
    listener: socket.socket | None = field(default_factory=_own_port)
    """The port of the store, where that is hosted here."""
    master: tuple[str, int] | None = None
    """Address and port of the store for ranks of several machines; None: the listener's, on this one."""

    @property
    def whole(self) -> bool:
        """Whether these are all ranks there are."""
        return self.ranks == self.world_size


@dataclass
class Rank:
    """One started rank, as its starter sees it."""

    number: int
    pid: int
    report_file: IO[bytes]
    crash_file: IO[bytes]
    output: Path | None
    exit_code: int | None = None
    """None while it runs; minus the signal's number where a signal ended it."""
    killed: bool = False
    """It was us who killed it."""
    report: Report | None = None

    @property
    def good(self) -> bool:
        """Ended, with its work done."""
        return self.report is not None and self.report.kind == "done"

    @property
    def wants_restart(self) -> bool:
        """Ended with the status that asks to be started again."""
        return self.report is not None and self.report.code == EXIT_RESTART

    def look(self) -> bool:
        """Notices the rank's end; True where it ended since the last look."""
        if self.exit_code is not None:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.report_file.seek(0)
        written = self.report_file.read()
        if self.exit_code >= 0 and written:
            self.report = pickle.loads(written)
        else:
            self.report = self._report_of_sudden_end()
        return True

    def _report_of_sudden_end(self) -> Report:
        """The report of a rank that had no chance to write one."""
        assert self.exit_code is not None
        self.crash_file.seek(0)
        stack = self.crash_file.read().decode(errors="replace").strip()
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = " (nobody here did that; often the system was out of memory)" if name == "SIGKILL" else ""
            text = f"rank {self.number} was killed{hint} by {name}"
        else:
            text = f"rank {self.number} left in the middle of its work with exit status {self.exit_code}"
        return Report("error", f"{stack}\n\n{text}".strip(), EXIT_FAILED)


def start_ranks(
    work: Callable[[], None],
    share: Share | int,
    *,
    fork: bool,
    environment: Mapping[str, str] | None = None,
    output_dir: Path | None = None,
    while_running: Callable[[], None] | None = None,
) -> int:
    """Runs ``work`` in the processes of ``share`` on this machine; returns the exit status of them all. A number means
    that many ranks, and no others elsewhere.

    ``fork`` starts them in a moment from this process, with all it has imported; otherwise each is a Python of its own,
    and ``work`` must be picklable. With ``output_dir``, ranks above 0 print to files there instead of the terminal.
    ``while_running`` is called once all ranks are started; it must return at once.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    share = Share(share, share) if isinstance(share, int) else share
    with share.listener or contextlib.nullcontext(), _Signals() as signals:
        common = {**(environment or {}), **_environment(share)}
        ranks = signals.ranks
        for local in range(share.ranks):
            number = share.first_rank + local
            variables = {**common, "RANK": str(number), "LOCAL_RANK": str(local)}
            output = output_dir / f"rank_{number:05d}.txt" if output_dir and number else None
            ranks.append((_fork if fork else _spawn)(number, work, variables, output, share.listener))
        store = host_store(share.listener, share.world_size) if share.listener else None
        try:
            signals.open()
            if while_running is not None:
                while_running()
            _watch(ranks, signals)
        finally:
            _kill(ranks)
            del store
        return _verdict(ranks, signals, share)


def run_on_this_machine(
    work: Callable[[], None],
    plan: Plan,
    *,
    ranks: int | None = None,
    imports: Sequence[str] = (),
    output_dir: Path | None = None,
) -> int:
    """Runs ``work`` in all ranks of ``plan`` on this machine, with its device's environment; returns the exit status.

    ``ranks`` is for tools that start another number of processes than the plan has ranks. ``imports`` are modules that
    a forked rank then finds imported: here, once, after the environment is complete. Raises ConfigError as
    ``variables`` does.
    """
    from megatron_llama.devices import get_device
    from megatron_llama.launch.variables import variables

    device = get_device(plan.config.device.name)
    environment = variables(device, plan)
    if device.forkable:
        os.environ.update(environment)
        for module in imports:
            importlib.import_module(module)
    count = plan.world_size if ranks is None else ranks
    return start_ranks(work, count, fork=device.forkable, environment=environment, output_dir=output_dir)


def _environment(share: Share) -> dict[str, str]:
    """What all ranks are told. The store is hosted by a starter: it outlives every rank and its port is ours
    already."""
    variables = {
        "WORLD_SIZE": str(share.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for: rank 0 must not host the store
    }
    if share.master is not None:
        return variables | {"MASTER_ADDR": share.master[0], "MASTER_PORT": str(share.master[1])}
    assert share.listener is not None, "ranks on one machine meet here"
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine; gloo would look up the host's name, which fails or is slow on many laptops.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(share.listener.getsockname()[1])}


def host_store(listener: socket.socket, world_size: int) -> Any:
    """The store at which the ranks meet, on a port that is already ours. Made after the ranks: it starts a thread."""
    from torch.distributed import TCPStore

    port, file = listener.getsockname()[1], os.dup(listener.fileno())
    return TCPStore("127.0.0.1", port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=file)


def _files() -> tuple[IO[bytes], IO[bytes]]:
    """Nameless files for a rank's report and the stack of a crash; they outlive the rank and leave nothing behind."""
    return tempfile.TemporaryFile(), tempfile.TemporaryFile()


def _fork(
    number: int,
    work: Callable[[], None],
    variables: dict[str, str],
    output: Path | None,
    listener: socket.socket | None,
) -> Rank:
    """A rank that starts as a copy of this process."""
    report_file, crash_file = _files()
    starter = os.getpid()
    pid = os.fork()
    if pid == 0:
        if listener is not None:
            listener.close()
        files = os.dup(report_file.fileno()), os.dup(crash_file.fileno())
        run_assignment(Assignment(number, starter, variables, *files, output), work)
    return Rank(number, pid, report_file, crash_file, output)


def _spawn(
    number: int,
    work: Callable[[], None],
    variables: dict[str, str],
    output: Path | None,
    listener: socket.socket | None,
) -> Rank:
    """A rank that is a Python of its own; for devices that do not survive a fork."""
    report_file, crash_file = _files()
    files = report_file.fileno(), crash_file.fileno()
    with tempfile.TemporaryFile() as task:
        pickle.dump(sys.path, task)
        pickle.dump((Assignment(number, os.getpid(), variables, *files, output), work), task)
        task.seek(0)
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("spawned.py"), str(task.fileno())],
            env={**os.environ, **variables},
            pass_fds=(task.fileno(), *files),
        )
    process.returncode = 0  # we wait for the pid ourselves
    return Rank(number, process.pid, report_file, crash_file, output)


class _Signals:
    """This process's answer to signals while ranks run: SIGINT ends the job, the others are the ranks' business."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.interrupted_at: float | None = None
        self.received: set[int] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        # Held back until every rank has its own handlers: a signal in between would find half a job.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        self._before = {number: signal.signal(number, self._receive) for number in WATCHED}
        return self

    def open(self) -> None:
        """Lets signals through from here on."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.open()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)
        if number == signal.SIGINT and self.interrupted_at is None:
            self.interrupted_at = time.monotonic()
        for rank in self.ranks:
            _send(rank, number)


def _send(rank: Rank, number: int) -> None:
    """Sends a signal to a rank that still runs."""
    if rank.exit_code is None:
        os.kill(rank.pid, number)


def _kill(ranks: Sequence[Rank]) -> None:
    """Ends what still runs, at once and for good, and waits for it."""
    running = [rank for rank in ranks if rank.exit_code is None]
    for rank in running:
        rank.look()
        _send(rank, signal.SIGKILL)
    while any(rank.exit_code is None for rank in running):
        for rank in running:
            rank.killed |= rank.look() and rank.exit_code == -signal.SIGKILL
        time.sleep(POLL_SECONDS / 10)


def _watch(ranks: Sequence[Rank], signals: _Signals) -> None:
    """Returns when all ranks have ended or the rest has to be killed."""
    deadline = float("inf")
    while any(rank.exit_code is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank.look() and not rank.good:
                grace = RESTART_GRACE_SECONDS if rank.wants_restart else FAULT_GRACE_SECONDS
                deadline = min(deadline, time.monotonic() + grace)
        if signals.interrupted_at is not None:
            deadline = min(deadline, signals.interrupted_at + INTERRUPT_GRACE_SECONDS)
        time.sleep(POLL_SECONDS)


def _verdict(ranks: Sequence[Rank], signals: _Signals, share: Share) -> int:
    """The job's exit status; says why it is not 0, last."""
    if signals.interrupted_at is not None:
        _say("Stopped by Ctrl-C." if sys.stderr.isatty() else "Stopped by SIGINT.")
        return EXIT_INTERRUPTED
    bad = [rank for rank in ranks if not (rank.good or rank.wants_restart or rank.killed)]
    if not bad:
        return EXIT_RESTART if any(rank.wants_restart for rank in ranks) else 0
    cause = min(bad, key=_blame)
    assert cause.report is not None and cause.exit_code is not None
    if -cause.exit_code in signals.received:  # it was told to end, and had no other way yet
        number = -cause.exit_code
        _say(f"Stopped by {signal.Signals(number).name}.")
        return 128 + number
    if cause.report.kind == "user":
        _say(cause.report.text)
        return EXIT_USER
    if cause.report.consequence and not share.whole:
        time.sleep(CONSEQUENCE_DELAY_SECONDS)  # the cause is on another machine
    where = f"; what it printed is in {cause.output}" if _has_text(cause.output) else ""
    _say(f"\nRank {cause.number} of {share.world_size} failed{where}:\n\n{cause.report.text}")
    return EXIT_FAILED


def _blame(rank: Rank) -> tuple[bool, float]:
    """Sorts the rank that failed of itself before those that lost it, then by time."""
    assert rank.report is not None
    return rank.report.consequence, rank.report.seconds


def _has_text(path: Path | None) -> bool:
    return path is not None and path.exists() and path.stat().st_size > 0


def _say(text: str) -> None:
    """The last words on stderr, below whatever a progress bar left there."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\n")  # a bar that was killed may have left the cursor hidden
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
