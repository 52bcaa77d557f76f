"""Starts ranks on this machine. When one fails all end, and its traceback is the last thing on stderr.

``run_here`` is a whole run: it claims the run's folder, and restarts the ranks if configured. ``start_ranks`` starts
the ranks once.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device, get_device
from megatron_llama.launch.job_store import Board
from megatron_llama.launch.rank import (
    CONSEQUENCE_DELAY_SECONDS,
    STACKS_SIGNAL,
    TRAIN,
    Assignment,
    Entry,
    Report,
    load_entry,
    run_assignment,
)
from megatron_llama.launch.run_dir import claim_run_dir, rank_outputs, write_config_and_plan
from megatron_llama.launch.supervise import POLL_SECONDS, Child, Grace, Signals, report, supervise, with_restarts
from megatron_llama.launch.watchdog import Hang, Watch, hold_back, tell
from megatron_llama.plan import Plan
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER
from megatron_llama.system.phase import Phase, PhaseFile
from megatron_llama.system.signals import is_stopped

GRACE = Grace(fault=1.0, restart=30.0, interrupt=3.0)


def run_here(plan: Plan, entry: Entry = TRAIN) -> int:
    """Claim the run's folder and run ``entry`` in all ranks of ``plan``, with restarts; return the exit status."""
    folder = Path(str(plan.config.run.dir))
    with claim_run_dir(folder):
        sys.stdout.write(write_config_and_plan(plan, folder) + "\n")
        with rank_outputs(folder, range(plan.world_size)) as output_dir:
            hang_seconds = plan.config.trainer.hang_timeout_seconds
            share = Share(plan.world_size, output_dir=output_dir, hang_seconds=hang_seconds)
            return with_restarts(plan, lambda: start_ranks(plan, entry, share))


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


@dataclass
class Share:
    """The ranks that this process starts, and where they meet all others."""

    ranks: int
    world_size: int | None = None
    """Ranks of the job; None: the ranks of this share are all."""
    first_rank: int = 0
    master: tuple[str, int] | None = None
    """Address and port of the store where the ranks meet, if it exists already; None: this process hosts one."""
    board: Board | None = None
    """Asks the launchers of other machines about hangs there."""
    output_dir: Path | None = None
    """Ranks above 0 print to files in this folder; None: to the terminal."""
    hang_seconds: float | None = None
    """Ranks that make no progress for this long, times the patience of their phase, end the job. None: no limit, for
    entries that do not report their phases."""

    @property
    def job_size(self) -> int:
        """Ranks of the job."""
        return self.world_size or self.ranks

    def environment(self, listener: socket.socket | None) -> dict[str, str]:
        """The variables with which a rank finds the store. ``listener`` is the store's socket if this process hosts it:
        the store outlives every rank, and its port is bound before the first rank starts."""
        variables = {
            "WORLD_SIZE": str(self.job_size),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for: rank 0 must not host the store
        }
        if listener is None:
            assert self.master is not None, "without a listener the store is elsewhere"
            return variables | {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            # All ranks are on this machine; gloo would look up the host's name, which fails or is slow on many laptops.
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


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

    @classmethod
    def start(cls, number: int, plan: Plan, entry: Entry, share: Share, listener: socket.socket | None) -> Rank:
        """Start a rank: a fork of this process, or a Python process for devices that do not survive a fork."""
        device = get_device(plan.config.device.name)
        variables = rank_environment(device, plan) | share.environment(listener)
        variables |= {"RANK": str(number), "LOCAL_RANK": str(number - share.first_rank)}
        output = share.output_dir / f"rank_{number:05d}.txt" if share.output_dir and number else None
        # Unnamed files: they outlive the rank and leave nothing behind.
        report_file, crash_file, phase_file = tempfile.TemporaryFile(), tempfile.TemporaryFile(), PhaseFile()
        files = report_file.fileno(), crash_file.fileno(), phase_file.file.fileno()
        launcher, pid = os.getpid(), os.fork() if device.forkable else None
        if pid == 0:
            if listener is not None:
                listener.close()
            copies = os.dup(files[0]), os.dup(files[1]), os.dup(files[2])
            run_assignment(Assignment(number, launcher, variables, *copies, output), plan, entry)
        if pid is None:
            pid = _spawn(Assignment(number, launcher, variables, *files, output), plan, entry)
        return cls(number, pid, report_file, crash_file, phase_file, output)

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

    def request_stacks(self) -> None:
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
    plan: Plan, entry: Entry, share: Share | None = None, while_running: Callable[[], None] | None = None
) -> int:
    """Run ``entry`` in the ranks of ``share``, or in all ranks of ``plan``, with the environment of its device.

    Forked ranks begin with all that this process has imported. Other ranks are Python processes, for which ``entry``
    must be picklable.

    Args:
        while_running: Called once all ranks are started; it must return at once.

    Returns:
        The exit status of all ranks together.

    Raises:
        ConfigError: As ``rank_environment``.
    """
    share = share or Share(plan.world_size)
    device = get_device(plan.config.device.name)
    environment = rank_environment(device, plan)  # for spawned ranks too: its errors come before any rank
    if device.forkable:
        os.environ.update(environment)  # before torch is imported
        load_entry(TRAIN)  # imports once what nearly all entries need
    sys.stdout.flush()
    sys.stderr.flush()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024) if share.master is None else None
    with listener or contextlib.nullcontext(), Signals(hold=True) as signals:
        ranks: list[Rank] = []
        for number in range(share.first_rank, share.first_rank + share.ranks):
            ranks.append(Rank.start(number, plan, entry, share, listener))
            signals.children.append(ranks[-1])
        store = None
        if listener is not None:  # after the ranks are forked, because it starts a thread
            from torch.distributed import TCPStore

            port, file = listener.getsockname()[1], os.dup(listener.fileno())
            address, size = "127.0.0.1", share.job_size
            store = TCPStore(address, port, size, is_master=True, wait_for_workers=False, master_listen_fd=file)
        hang = None
        try:
            signals.release()
            if while_running is not None:
                while_running()
            watch = Watch(ranks, share.job_size, share.hang_seconds, share.board)
            supervise(ranks, signals, GRACE, wait=watch.wait)
        except Hang as found:
            hang = found
            hold_back(hang, share.board)
        finally:
            _kill(ranks)
            del store
        if hang is not None:
            tell(hang, share.board)
            return EXIT_FAILED
        return _verdict(ranks, signals, share)


def _spawn(assignment: Assignment, plan: Plan, entry: Entry) -> int:
    """Start a Python process for a rank; return its process id."""
    # All of the launcher's import path: the rank imports packages before it reads the path in the task.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), *sys.path)))
    with tempfile.TemporaryFile() as task:
        pickle.dump(sys.path, task)  # in the launcher's order
        pickle.dump((assignment, plan, entry), task)
        task.seek(0)
        process = subprocess.Popen(
            # -P: the current folder is no part of the import path, as in the launcher.
            [sys.executable, "-P", "-m", "megatron_llama.launch.rank", str(task.fileno())],
            env={**os.environ, **assignment.environment, "PYTHONPATH": path},
            pass_fds=(task.fileno(), assignment.report_fd, assignment.crash_fd, assignment.phase_fd),
        )
    process.returncode = 0  # Rank.poll waits for the pid
    return process.pid


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
    if cause.report.consequence and share.ranks < share.job_size:
        time.sleep(CONSEQUENCE_DELAY_SECONDS)  # the cause is on another machine
    output = cause.output
    where = f"; its output is in {output}" if output and output.exists() and output.stat().st_size else ""
    report(f"\nRank {cause.number} of {share.job_size} failed{where}:\n\n{cause.report.text}")
    return EXIT_FAILED
