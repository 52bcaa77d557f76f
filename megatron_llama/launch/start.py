"""Starts ranks on this machine. When one fails all end, and its traceback is the last thing on stderr."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device, get_device
from megatron_llama.launch.board import Board
from megatron_llama.launch.rank_process import (
    CONSEQUENCE_DELAY_SECONDS,
    STACKS_SIGNAL,
    Assignment,
    Report,
    run_assignment,
)
from megatron_llama.launch.supervise import POLL_SECONDS, Child, Grace, Signals, report, supervise
from megatron_llama.launch.watchdog import Hang, Watch, hold_back, tell
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER
from megatron_llama.system.phase import Phase, PhaseFile
from megatron_llama.system.signals import is_stopped

GRACE = Grace(fault=1.0, restart=30.0, interrupt=3.0)
# The program of a rank that is no fork of its starter. It gets the starter's import path first: what the starter could
# import, the rank can.
_BOOTSTRAP = """\
import os, pickle, sys
with os.fdopen(int(sys.argv[1]), "rb") as task:
    sys.path[:] = pickle.load(task)
    assignment, work = pickle.load(task)
from megatron_llama.system.output import protect
protect()
from megatron_llama.launch.rank_process import run_assignment
run_assignment(assignment, work)
"""


def rank_environment(device: Device, plan: Plan) -> dict[str, str]:
    """The variables that must be set before a rank imports torch, without those that the user has set.

    Raises ConfigError where the compile cache can't be created."""
    variables = device.environment(plan.config)
    if plan.config.trainer.compile:
        cache = Path(str(plan.config.trainer.compile_cache))
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"the folder can't be created: {error.strerror}"
            problem = Problem("trainer.compile_cache", str(cache), rule, "write another trainer.compile_cache=PATH")
            raise ConfigError([problem]) from error
        variables |= device.compile_environment(cache)
    return {name: value for name, value in variables.items() if name not in os.environ}


def run_on_this_machine(
    work: Callable[[], None],
    plan: Plan,
    *,
    ranks: int | None = None,
    imports: Sequence[str] = (),
    output_dir: Path | None = None,
    hang_seconds: float | None = None,
) -> int:
    """Runs ``work`` in all ranks of ``plan`` on this machine, with its device's environment; returns the exit status.

    ``ranks`` is for tools that start another number of processes than the plan has ranks. ``imports`` are modules that
    ``work`` needs: where ranks are forked they are imported once, here. ``hang_seconds``: see ``start_ranks``; only for
    work that says its phases. Raises ConfigError as ``rank_environment``.
    """
    device = get_device(plan.config.device.name)
    environment = rank_environment(device, plan)
    if device.forkable:
        os.environ.update(environment)  # before torch is imported
        for module in imports:
            import_module(module)
    count = plan.world_size if ranks is None else ranks
    return start_ranks(
        work,
        count,
        fork=device.forkable,
        environment=environment,
        output_dir=output_dir,
        hang_seconds=hang_seconds,
    )


@dataclass
class Share:
    """The ranks that this process starts, and where they meet all others."""

    ranks: int
    world_size: int
    first_rank: int = 0
    master: tuple[str, int] | None = None
    """Address and port of the store where the ranks meet, if it exists already; None: this process hosts one."""

    @property
    def whole(self) -> bool:
        """Whether these are all the ranks."""
        return self.ranks == self.world_size


@dataclass
class Rank(Child):
    """One started rank, as its starter sees it."""

    number: int
    pid: int
    report_file: IO[bytes]
    crash_file: IO[bytes]
    phase_file: PhaseFile
    output: Path | None
    exit_code: int | None = None
    """None while it runs; minus the signal's number where a signal ended it."""
    killed: bool = False
    """This process has killed it."""
    report: Report | None = None

    @property
    def succeeded(self) -> bool:
        return self.report is not None and self.report.kind == "done"

    @property
    def wants_restart(self) -> bool:
        return self.report is not None and self.report.code == EXIT_RESTART

    @property
    def phase(self) -> Phase:
        return self.phase_file.read()

    @property
    def awaited(self) -> str:
        return self.phase_file.awaited

    @property
    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def ask_for_stacks(self) -> None:
        if self.phase.number > 0:  # before that the signal would end it
            self.send(STACKS_SIGNAL)

    def stacks(self) -> str:
        # The rank shares the file's position, and may be writing: moving it would let it overwrite its own first lines.
        file = self.crash_file.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").strip()

    def send(self, number: int) -> None:
        if not self.ended:
            os.kill(self.pid, number)

    def poll(self) -> bool:
        if self.ended:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.ended = True
        self.exit_code = os.waitstatus_to_exitcode(status)
        self.report_file.seek(0)
        written = self.report_file.read()
        if self.exit_code >= 0 and written:
            self.report = pickle.loads(written)
        else:
            self.report = self._sudden_end()
        return True

    def _sudden_end(self) -> Report:
        """The report of a rank that could not write one."""
        assert self.exit_code is not None
        stack = self.stacks()
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = " (not by this program; often the system was out of memory)" if name == "SIGKILL" else ""
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
    hang_seconds: float | None = None,
    board: Board | None = None,
) -> int:
    """Runs ``work`` in the processes of ``share`` on this machine; returns the exit status of them all. A number means
    that many ranks, and no others elsewhere.

    ``fork`` starts them in a moment from this process, with all it has imported; otherwise each is a Python of its own,
    and ``work`` must be picklable. With ``output_dir``, ranks above 0 print to files there instead of the terminal.
    ``while_running`` is called once all ranks are started; it must return at once. Ranks that make no progress for
    ``hang_seconds``, times their phase's patience, end the job; where others are elsewhere, ``board`` asks about them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    share = Share(share, share) if isinstance(share, int) else share
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024) if share.master is None else None
    with listener or contextlib.nullcontext(), Signals(hold=True) as signals:
        common = {**(environment or {}), **_store_environment(share, listener)}
        ranks: list[Rank] = []
        for local in range(share.ranks):
            number = share.first_rank + local
            variables = {**common, "RANK": str(number), "LOCAL_RANK": str(local)}
            output = output_dir / f"rank_{number:05d}.txt" if output_dir and number else None
            ranks.append(_start_rank(fork, number, work, variables, output, listener))
            signals.children.append(ranks[-1])
        store = None
        if listener is not None:  # after the ranks are forked, because it starts a thread
            from torch.distributed import TCPStore

            port, file = listener.getsockname()[1], os.dup(listener.fileno())
            address, size = "127.0.0.1", share.world_size
            store = TCPStore(address, port, size, is_master=True, wait_for_workers=False, master_listen_fd=file)
        hang = None
        try:
            signals.release()
            if while_running is not None:
                while_running()
            watch = Watch(ranks, share.world_size, hang_seconds, board)
            supervise(ranks, signals, GRACE, wait=watch.wait)
        except Hang as found:
            hang = found
            hold_back(hang, board)
        finally:
            _kill(ranks)
            del store
        if hang is not None:
            tell(hang, board)
            return EXIT_FAILED
        return _verdict(ranks, signals, share)


def _store_environment(share: Share, listener: socket.socket | None) -> dict[str, str]:
    """What all ranks need to find the store. A starter hosts it: it outlives every rank, and its port is bound before
    the first rank starts."""
    variables = {
        "WORLD_SIZE": str(share.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for: rank 0 must not host the store
    }
    if listener is None:
        assert share.master is not None, "without a listener the store is elsewhere"
        return variables | {"MASTER_ADDR": share.master[0], "MASTER_PORT": str(share.master[1])}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine; gloo would look up the host's name, which fails or is slow on many laptops.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


def _start_rank(
    fork: bool,
    number: int,
    work: Callable[[], None],
    variables: dict[str, str],
    output: Path | None,
    listener: socket.socket | None,
) -> Rank:
    """Starts a rank: as a copy of this process, or as a Python of its own for devices that do not survive a fork."""
    # Unnamed files: they outlive the rank and leave nothing behind.
    report_file, crash_file, phase_file = tempfile.TemporaryFile(), tempfile.TemporaryFile(), PhaseFile()
    files = report_file.fileno(), crash_file.fileno(), phase_file.file.fileno()
    starter = os.getpid()
    if fork:
        pid = os.fork()
        if pid == 0:
            if listener is not None:
                listener.close()
            copies = os.dup(files[0]), os.dup(files[1]), os.dup(files[2])
            run_assignment(Assignment(number, starter, variables, *copies, output), work)
        return Rank(number, pid, report_file, crash_file, phase_file, output)
    with tempfile.TemporaryFile() as task:
        pickle.dump(sys.path, task)
        pickle.dump((Assignment(number, starter, variables, *files, output), work), task)
        task.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(task.fileno())],
            env={**os.environ, **variables},
            pass_fds=(task.fileno(), *files),
        )
    process.returncode = 0  # Rank.poll waits for the pid
    return Rank(number, process.pid, report_file, crash_file, phase_file, output)


def _kill(ranks: Sequence[Rank]) -> None:
    """Kills what still runs, and waits for it."""
    running = [rank for rank in ranks if not rank.ended]
    for rank in running:
        rank.poll()
        rank.send(signal.SIGKILL)
    while not all(rank.ended for rank in running):
        for rank in running:
            rank.killed |= rank.poll() and rank.exit_code == -signal.SIGKILL
        time.sleep(POLL_SECONDS / 10)


def _verdict(ranks: Sequence[Rank], signals: Signals, share: Share) -> int:
    """The job's exit status; the reason why it is not 0 is the last thing on stderr."""
    if signals.interrupted_at is not None:
        report("Stopped by Ctrl-C." if sys.stderr.isatty() else "Stopped by SIGINT.")
        return EXIT_INTERRUPTED
    bad = [rank for rank in ranks if not (rank.succeeded or rank.wants_restart or rank.killed)]
    if not bad:
        return EXIT_RESTART if any(rank.wants_restart for rank in ranks) else 0
    # The rank that failed of itself before those that only lost it, then the first.
    cause = min(bad, key=lambda rank: (rank.report.consequence, rank.report.seconds) if rank.report else (True, 0.0))
    assert cause.report is not None and cause.exit_code is not None
    if -cause.exit_code in signals.received:  # it was asked to end before it had a handler of its own
        number = -cause.exit_code
        report(f"Stopped by {signal.Signals(number).name}.")
        return 128 + number
    if cause.report.kind == "user":
        report(cause.report.text)
        return EXIT_USER
    if cause.report.consequence and not share.whole:
        time.sleep(CONSEQUENCE_DELAY_SECONDS)  # the cause is on another machine
    output = cause.output
    where = f"; its output is in {output}" if output and output.exists() and output.stat().st_size else ""
    report(f"\nRank {cause.number} of {share.world_size} failed{where}:\n\n{cause.report.text}")
    return EXIT_FAILED
