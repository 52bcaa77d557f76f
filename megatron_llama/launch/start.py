"""Launch of ranks on this machine. If one fails, all are ended and its traceback is printed last.

``run_here`` is a whole run: it locks the run folder, and restarts the ranks if configured. ``start_ranks`` starts the
ranks once.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_llama import event_hook
from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices import Device, get_device
from megatron_llama.devices.compile_cache import open_compile_cache
from megatron_llama.launch.environment import check_interface
from megatron_llama.launch.failure_cause import CONSEQUENCE_DELAY_SECONDS, Report
from megatron_llama.launch.host_checks import check_start
from megatron_llama.launch.job_store import QUIET, Board
from megatron_llama.launch.rank import STACKS_SIGNAL, TRAIN, Assignment, Entry, load_entry, run_assignment
from megatron_llama.launch.run_dir import claim_run_dir, open_plan, rank_outputs
from megatron_llama.launch.start_log import log_end, log_start
from megatron_llama.launch.supervise import Child, Grace, Signals, report, supervise, with_restarts
from megatron_llama.launch.watchdog import Hang, Watchdog, print_report, wait_for_full_report
from megatron_llama.plan import Plan
from megatron_llama.system.errors import LaunchFailed, reason_of
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART, EXIT_USER
from megatron_llama.system.interrupts import signal_name
from megatron_llama.system.object_store import end_threads
from megatron_llama.system.phase import FINISHING, Phase, PhaseFile
from megatron_llama.system.signals import is_stopped
from megatron_llama.system.ulimits import explain_crash
from megatron_llama.system.wrapping import wrap
from megatron_llama.train.loss_curve import draw_run

GRACE = Grace(fault=1.0, restart=30.0, interrupt=3.0)


def run_here(plan: Plan, entry: Entry = TRAIN, prints_plan: bool = True) -> int:
    """Lock the run folder and run ``entry`` in all ranks of ``plan``, with restarts; return the exit status.

    Args:
        prints_plan: Whether to print the plan; otherwise the path of its file.
    """
    folder = Path(str(plan.config.run.dir))
    with claim_run_dir(folder):
        event_hook.listen(plan.config.hook.on_event, folder)
        checked = check_start(plan, folder) if entry == TRAIN else ""
        sys.stdout.write(open_plan(plan, prints_plan) + checked + "\n")
        with rank_outputs(folder, range(plan.world_size)) as output_dir:
            hang_seconds = plan.config.trainer.hang_timeout_seconds
            share = LocalRanks(plan.world_size, output_dir=output_dir, hang_seconds=hang_seconds)
            status = with_restarts(plan, lambda: logged_start(plan, entry, share), share.received)
            if status not in (0, EXIT_RESTART, EXIT_USER):
                with contextlib.suppress(Exception):  # rank 0 may have been killed before it could draw
                    draw_run(plan)
            return status


def logged_start(plan: Plan, entry: Entry, share: LocalRanks, while_running: Callable[[], None] | None = None) -> int:
    """Run ``start_ranks``; note the start and its end in the run's starts.jsonl. Return the exit status."""
    log_start(plan)
    try:
        status = start_ranks(plan, entry, share, while_running)
    except Exception as error:
        log_end(plan.run_dir, EXIT_FAILED, str(error), is_last=True)
        raise
    log_end(plan.run_dir, status, share.reason, is_last=bool(share.received))
    return status


def _import_torch() -> None:
    """Import torch. Raises ConfigError for variables that it rejects, such as TORCH_LOGS."""
    try:
        import torch  # noqa: F401
    except ValueError as error:
        rule = f"torch rejects an environment variable: {str(error).strip()}"
        raise ConfigError([Problem("environment", None, rule, "correct or unset that variable")]) from error


def rank_environment(device: Device, plan: Plan) -> dict[str, str]:
    """Return the variables to set before torch is imported, except variables that the user has set.

    Raises ConfigError if other users can change a named compile cache, or if gloo's interface does not exist.
    """
    check_interface(os.environ, "GLOO_SOCKET_IFNAME")
    variables = QUIET | device.environment(plan.config)
    if device.compiles_code(plan.config):
        variables |= open_compile_cache(device, plan.config, is_named=plan.requested.trainer.compile_cache is not None)
    return {name: value for name, value in variables.items() if name not in os.environ}


@dataclass
class LocalRanks:
    """The ranks that this process starts, and the store of the job."""

    ranks: int
    world_size: int | None = None
    """Ranks of the job; None: equal to ``ranks``."""
    first_rank: int = 0
    master: tuple[str, int] | None = None
    """Address and port of an existing store; None: this process hosts one."""
    board: Board | None = None
    """Exchanges hang reports with the launchers of other machines."""
    output_dir: Path | None = None
    """Folder for the output of ranks above 0; None: the terminal."""
    hang_seconds: float | None = None
    """Seconds without progress, times the phase's patience, after which the job ends. None: no limit."""
    reason: str = ""
    """Reason of the last end, set by ``start_ranks``; empty if the exit status is the reason."""
    received: set[int] = field(default_factory=set)
    """Signals that this process received, added by ``start_ranks``."""

    @property
    def job_size(self) -> int:
        """Ranks of the job."""
        return self.world_size or self.ranks

    def environment(self, listener: socket.socket | None) -> dict[str, str]:
        """Return the variables with which a rank finds the store.

        Args:
            listener: Socket of the store if this process hosts it. The port is bound before the first rank starts.
        """
        variables = {
            "WORLD_SIZE": str(self.job_size),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch: rank 0 does not host the store
        }
        if listener is None:
            assert self.master is not None, "without a listener, master is set"
            return variables | {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            # gloo would resolve the host name, which fails or is slow on many laptops.
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


@dataclass
class Rank(Child):
    """Handle of a started rank."""

    number: int
    pid: int
    report_file: IO[bytes]
    crash_file: IO[bytes]
    phase_file: PhaseFile
    output: Path | None
    exit_code: int | None = None
    """None while the rank runs; the negative signal number if a signal ended it."""
    killed: bool = False
    """Whether this process killed the rank."""
    report: Report | None = None

    @classmethod
    def start(cls, number: int, plan: Plan, entry: Entry, share: LocalRanks, listener: socket.socket | None) -> Rank:
        """Start a rank: fork this process, or spawn a Python process for devices that cannot be forked."""
        device = get_device(plan.config.device.name)
        variables = rank_environment(device, plan) | share.environment(listener)
        variables |= {"RANK": str(number), "LOCAL_RANK": str(number - share.first_rank)}
        output = share.output_dir / f"rank_{number:05d}.txt" if share.output_dir and number else None
        # Unnamed temporary files survive the rank and need no cleanup.
        report_file, crash_file, phase_file = tempfile.TemporaryFile(), tempfile.TemporaryFile(), PhaseFile()
        files = report_file.fileno(), crash_file.fileno(), phase_file.file.fileno()
        end_threads()
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
    def is_finishing(self) -> bool:
        return not self.ended and self.phase.name.startswith(FINISHING)

    @property
    def interrupted(self) -> bool:
        """Whether SIGINT ended the rank before it could save."""
        return self.exit_code in (EXIT_INTERRUPTED, -signal.SIGINT)

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
        if self.phase.number > 0:  # before the first phase the signal would end the rank
            self.send(STACKS_SIGNAL)

    def stacks(self) -> str:
        # pread: the rank shares the file position and may be writing.
        file = self.crash_file.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").strip()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # a signal handler may interrupt poll after its waitpid
            if not self.ended:
                os.kill(self.pid, number)

    def poll(self) -> bool:
        if self.ended:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.exit_code, self.status = os.waitstatus_to_exitcode(status), EXIT_FAILED
        self.report_file.seek(0)
        written = self.report_file.read()
        if self.exit_code >= 0 and written:
            self.report = pickle.loads(written)
        else:
            self.report = self._report_crash()
        self.status = self.report.code
        return True

    def _report_crash(self) -> Report:
        """Return the report of a rank that ended without writing one."""
        assert self.exit_code is not None
        stack = self.stacks()
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = " (the system may be out of memory)" if name == "SIGKILL" else ""
            text = f"rank {self.number} was killed by {name}{hint}"
        else:
            text = f"rank {self.number} exited with status {self.exit_code} before the end of its work"
        if limits := explain_crash() if self.exit_code != -signal.SIGKILL else "":
            text = f"{text}\n{wrap(limits)}"
        return Report(EXIT_FAILED, f"{stack}\n\n{text}".strip())


def start_ranks(
    plan: Plan, entry: Entry, share: LocalRanks | None = None, while_running: Callable[[], None] | None = None
) -> int:
    """Run ``entry`` in the ranks of ``share``, default: all ranks of ``plan``.

    Forked ranks inherit the imports of this process. Spawned ranks need a picklable ``entry``.

    Args:
        while_running: Called after all ranks have started; must not block.

    Returns:
        The exit status of the job.

    Raises:
        ConfigError: As ``rank_environment``, or if torch cannot be imported because of a variable.
        LaunchFailed: The store cannot be hosted.
    """
    share = share or LocalRanks(plan.world_size)
    device = get_device(plan.config.device.name)
    environment = rank_environment(device, plan)  # for spawned ranks too: raises before a rank starts
    if device.forkable:
        os.environ.update(environment)  # before torch is imported
        _import_torch()
        load_entry(TRAIN)  # imports once what most entries need
    sys.stdout.flush()
    sys.stderr.flush()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024) if share.master is None else None
    with listener or contextlib.nullcontext(), Signals(share.received, hold=True) as signals:
        ranks: list[Rank] = []
        for number in range(share.first_rank, share.first_rank + share.ranks):
            ranks.append(Rank.start(number, plan, entry, share, listener))
            signals.children.append(ranks[-1])
        store, hang = None, None
        try:
            if listener is not None:  # after the forks: the store starts a thread
                store = _host_store(listener, share.job_size)
            signals.release()
            if while_running is not None:
                while_running()
            watchdog = Watchdog(ranks, share.job_size, share.hang_seconds, share.board)
            supervise(ranks, signals, GRACE, wait=watchdog.wait)
        except Hang as error:
            hang = error
            wait_for_full_report(hang, share.board)
        finally:
            _kill(ranks)
            del store
        share.reason = ""
        if hang is not None:
            print_report(hang, share.board)
            share.reason = str(hang).splitlines()[-1]
            return EXIT_FAILED
        return _exit_status(ranks, signals, share, plan)


def _host_store(listener: socket.socket, size: int) -> Any:
    """Host torch's store for ``size`` ranks on a bound socket; return the store. Raises LaunchFailed."""
    from torch.distributed import TCPStore

    port, file = listener.getsockname()[1], os.dup(listener.fileno())
    try:
        return TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=file)
    except RuntimeError as error:
        raise LaunchFailed(f"cannot host the rendezvous store on 127.0.0.1:{port}: {reason_of(error)}") from error


def _spawn(assignment: Assignment, plan: Plan, entry: Entry) -> int:
    """Start a Python process for a rank; return its process id."""
    # The rank imports packages before it reads sys.path from the task.
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), *sys.path)))
    with tempfile.TemporaryFile() as task:
        pickle.dump(sys.path, task)  # in the launcher's order
        pickle.dump((assignment, plan, entry), task)
        task.seek(0)
        process = subprocess.Popen(
            # -P: do not add the current folder to sys.path.
            [sys.executable, "-P", "-m", "megatron_llama.launch.rank", str(task.fileno())],
            env={**os.environ, **assignment.environment, "PYTHONPATH": path},
            pass_fds=(task.fileno(), assignment.report_fd, assignment.crash_fd, assignment.phase_fd),
        )
    process.returncode = 0  # Rank.poll waits for the pid
    return process.pid


def _kill(ranks: Sequence[Rank]) -> None:
    """Kill running ranks and wait for them."""
    running = [rank for rank in ranks if not rank.ended]
    for rank in running:
        rank.poll()
        rank.send(signal.SIGKILL)
    while not all(rank.ended for rank in running):
        for rank in running:
            rank.killed |= rank.poll() and rank.exit_code == -signal.SIGKILL
        time.sleep(0.005)


def _explain_bus_error(plan: Plan) -> str:
    """Return the likely cause of SIGBUS: a data file that shrank, named with its size if it is still too small."""
    from megatron_llama.data.checks import check_data

    problems: list[Problem] = []
    with contextlib.suppress(Exception):  # the report of the rank matters more
        problems = check_data(plan.config)
    if problems:
        files = "\n".join(wrap(f"{problem.field} = {problem.value} {problem.rule}.") for problem in problems)
        return f"A data file has changed during the run:\n{files}"
    return wrap(
        "A file that the run reads has probably become shorter, such as a .bin or .idx of data.prefixes, or the disk "
        "of shared memory (/dev/shm) is full. Do not write to datasets during a run."
    )


def _exit_status(ranks: Sequence[Rank], signals: Signals, share: LocalRanks, plan: Plan) -> int:
    """Return the exit status of the job; print the cause of a failure last on stderr, and note it in ``share``."""
    if signals.ends_at_once or any(rank.interrupted for rank in ranks):
        share.reason = f"stopped by {signal_name(signal.SIGINT)} before the ranks could save"
        report(f"Stopped by {signal_name(signal.SIGINT)}.")
        return EXIT_INTERRUPTED
    bad = [rank for rank in ranks if rank.status not in (0, EXIT_RESTART) and not rank.killed]
    if not bad:
        restarts = any(rank.status == EXIT_RESTART for rank in ranks)
        if restarts and signals.received:
            names = sorted(signal.Signals(number).name for number in signals.received)
            share.reason = f"stopped by {', '.join(names)} after saving"
        return EXIT_RESTART if restarts else 0
    # Causes before consequences, then the first in time.
    cause = min(bad, key=lambda rank: (rank.report.consequence, rank.report.seconds) if rank.report else (True, 0.0))
    assert cause.report is not None and cause.exit_code is not None
    if -cause.exit_code in signals.received:  # the signal came before the rank's handler
        number = -cause.exit_code
        share.reason = f"stopped by {signal.Signals(number).name} before the ranks could save"
        report(f"Stopped by {signal.Signals(number).name}.")
        return 128 + number
    share.reason = f"rank {cause.number} failed: {cause.report.reason}"
    if cause.report.code in (EXIT_USER, EXIT_PIPE):
        share.reason = cause.report.reason
        report(cause.report.text)
        return cause.report.code
    if cause.report.consequence and share.ranks < share.job_size:
        time.sleep(CONSEQUENCE_DELAY_SECONDS)  # the cause is on another machine
    where = f" (output: {output})" if (output := cause.output) and output.exists() and output.stat().st_size else ""
    text = cause.report.text
    if cause.exit_code == -signal.SIGBUS:
        text += f"\n{_explain_bus_error(plan)}"
    report(f"\nRank {cause.number} of {share.job_size} failed{where}:\n\n{text}")
    return EXIT_FAILED
