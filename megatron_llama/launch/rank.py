"""The process of a rank: runs the entry, ends with its launcher, and reports how it ended.

``python -m megatron_llama.launch.rank FD`` is a spawned rank; FD has the pickled assignment.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron_llama.system.output import protect_output

if __name__ == "__main__":  # first: the terminal may close during the imports
    protect_output()

from megatron_llama import event_hook  # noqa: E402
from megatron_llama.config import ConfigError  # noqa: E402
from megatron_llama.launch.failure_cause import CONSEQUENCE_DELAY_SECONDS, Report, describe, is_peer_lost  # noqa: E402
from megatron_llama.launch.job_store import describe_lost_store  # noqa: E402
from megatron_llama.launch.run_dir import report_to_batch_script  # noqa: E402
from megatron_llama.launch.start_log import log_end, log_start  # noqa: E402
from megatron_llama.launch.supervise import WATCHED  # noqa: E402
from megatron_llama.plan import Plan  # noqa: E402
from megatron_llama.system import phase  # noqa: E402
from megatron_llama.system.errors import machine_fault  # noqa: E402
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART, EXIT_USER  # noqa: E402
from megatron_llama.system.interrupts import exit_on_lost_interrupt  # noqa: E402
from megatron_llama.system.signals import JOB_SIGNALS, exit_with_parent, is_ignored_by_user  # noqa: E402
from megatron_llama.system.wrapping import wrap  # noqa: E402

Entry = Callable[[Plan], None] | str
"""The work of each rank: a function of the plan, or its name "package.module:function".

A name is imported only in the ranks: a launcher of spawned ranks does not import torch.
"""
TRAIN: Entry = "megatron_llama.train.run_rank:run_rank"

# Makes a rank write its stacks.
STACKS_SIGNAL = signal.SIGQUIT


@dataclass
class Assignment:
    """Arguments of a rank's process."""

    rank: int
    launcher_pid: int
    environment: dict[str, str]
    report_fd: int
    """File descriptor for the pickled Report."""
    crash_fd: int
    """File descriptor for the stack of a fatal signal."""
    phase_fd: int
    """File descriptor of the PhaseFile."""
    output: Path | None
    """File for stdout and stderr; None: inherited."""


def load_entry(entry: Entry) -> Callable[[Plan], None]:
    """Return the function of ``entry``; import its module if ``entry`` is a name."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    # megatron.core imports wandb, if it is installed, for 0.3 s and without need.
    hides_wandb = "wandb" not in sys.modules
    if hides_wandb:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        function: Callable[[Plan], None] = getattr(import_module(module), name)
    finally:
        if hides_wandb:
            del sys.modules["wandb"]
    return function


def run_assignment(assignment: Assignment, plan: Plan, entry: Entry) -> NoReturn:
    """Run ``entry`` as one rank of ``plan`` and end the process."""
    exit_with_parent(assignment.launcher_pid)
    for number in JOB_SIGNALS:  # replace the launcher's handlers, then unblock pending signals
        if not is_ignored_by_user(number):
            signal.signal(number, signal.SIG_DFL)
    _raise_first_interrupt()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    os.environ.update(assignment.environment)
    if assignment.output is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(assignment.output, "wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    with os.fdopen(assignment.crash_fd, "w") as crash:
        faulthandler.enable(file=crash)
        faulthandler.register(STACKS_SIGNAL, file=crash)  # in C, without the GIL
        phase.share(assignment.phase_fd)
        phase.enter("importing the program", phase.PATIENT)
        report = Report(0)
        try:
            load_entry(entry)(plan)
        except BaseException as error:
            report = describe(error)
        with os.fdopen(assignment.report_fd, "wb") as pipe:
            pickle.dump(report, pipe)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the terminal or pipe is closed
                stream.flush()
        _end_compile_processes()
        # Not sys.exit: a forked rank must not run the launcher's exit handlers or wait for unfinished collectives.
        os._exit(report.code)


def _end_compile_processes() -> None:
    """Kill Inductor's compile processes, which would outlive this process by up to a minute."""
    for pool in getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ()):
        if (process := getattr(pool, "process", None)) is not None:
            process.kill()


def _raise_first_interrupt() -> None:
    """Raise KeyboardInterrupt at the first SIGINT only: Ctrl-C arrives from the terminal and from the launcher."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    exit_on_lost_interrupt(lambda: os._exit(EXIT_INTERRUPTED))  # one that Python would only print


def run_as_rank(plan: Plan, rank: int, entry: Entry) -> int:
    """Run ``entry`` in this process, a rank of torchrun or srun; return the exit status. Rank 0 logs start and end."""
    _raise_first_interrupt()
    if rank == 0:
        log_start(plan)

    def log(status: int, reason: str = "") -> int:
        if rank == 0:
            log_end(plan.run_dir, status, reason)
        return status

    try:
        load_entry(entry)(plan)
    except KeyboardInterrupt:
        return log(EXIT_INTERRUPTED, "stopped by SIGINT before the ranks could save")
    except ConfigError as error:
        if rank > 0:
            time.sleep(CONSEQUENCE_DELAY_SECONDS)
        sys.stderr.write(f"{error}\n")
        return log(EXIT_USER, str(error))
    except SystemExit as error:
        if error.code == EXIT_RESTART:
            return log(EXIT_RESTART, getattr(error, "reason", ""))
        log(error.code if isinstance(error.code, int) else EXIT_FAILED)
        raise
    except Exception as error:
        lost = describe_lost_store(error)
        if lost is None and is_peer_lost(error):
            lost = f"Rank {rank} lost its connection to another rank, whose output has the cause: {error}"
        if lost:
            time.sleep(CONSEQUENCE_DELAY_SECONDS)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reads the first failure from this file
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        fault = machine_fault(error) or lost and wrap(lost)
        sys.stderr.write(traceback.format_exc() if fault is None else f"{fault}\n")
        sys.stderr.flush()
        if rank == 0:
            report_to_batch_script(EXIT_FAILED)
        log(EXIT_FAILED, fault or f"rank {rank} failed: {describe(error).reason}")
        event_hook.finish()
        # Not sys.exit: a clean exit may deadlock with other ranks, and the launcher must see the cause first.
        os._exit(EXIT_FAILED)
    return log(0)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "rb") as task:
        sys.path[:] = pickle.load(task)  # first: the assignment's modules are found there
        arguments = pickle.load(task)
    run_assignment(*arguments)
