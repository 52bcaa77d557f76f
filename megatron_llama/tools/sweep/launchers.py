"""Start the runs of a sweep: sequentially on this machine, or as Slurm jobs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from megatron_llama.cli import NO_PLAN
from megatron_llama.config import Problem
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART
from megatron_llama.system.programs import BATCH_FOLDER, ROOT
from megatron_llama.system.signals import JOB_SIGNALS, handle_signals
from megatron_llama.tools.slurm import call, submit
from megatron_llama.tools.sweep.combinations import Combination, Sweep, SweepState

STOPPED = (EXIT_RESTART, EXIT_INTERRUPTED, *(128 + number for number in JOB_SIGNALS))
"""Exit statuses of a run stopped by a signal: the sweep stops too, and the same command resumes it."""
_POLL_SECONDS = 5.0

RunFunction = Callable[[Sequence[str]], int]
"""Runs train.py with these arguments and returns its exit status."""


def run_sequentially(sweep: Sweep, state: SweepState, run: RunFunction) -> int | None:
    """Run the unfinished runs. Return the status of a run stopped by a signal, or None after the last run."""
    unfinished = [combination for combination in sweep.combinations if not state[combination].finished]
    for number, combination in enumerate(unfinished, start=1):
        sys.stdout.write(f"\n== run {number} of {len(unfinished)}: {' '.join(combination.overrides)}\n")
        sys.stdout.flush()
        status = run([*combination.overrides, run_dir(sweep, combination)])
        state.update(combination, status=status)
        if status in STOPPED:
            return status
    return None


def run_train_py(arguments: Sequence[str]) -> int:
    """Run ``python train.py --no-plan`` in a subprocess and forward signals to it."""
    signals: list[int] = []
    child = subprocess.Popen([sys.executable, str(ROOT / "train.py"), NO_PLAN, *arguments])

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number != signal.SIGINT:  # the terminal sends SIGINT to both
            child.send_signal(number)

    with handle_signals((signal.SIGINT, *JOB_SIGNALS), forward):
        status = child.wait()
    if signals and status == 0:  # the signal arrived between runs or at the end of a run
        return EXIT_RESTART
    return 128 - status if status < 0 else status


def run_slurm_jobs(sweep: Sweep, state: SweepState, options: str) -> None:
    """Submit run.slurm for each unfinished run without a queued job, and wait for all jobs.

    After an interruption the same command finds the jobs. Raises ConfigError if sbatch rejects a job.
    """
    for combination in sweep.combinations:
        job = state[combination].job
        if state[combination].finished or (job is not None and _in_queue([job])):
            continue
        words = [*combination.overrides, run_dir(sweep, combination)]
        instead = "correct the options of sbatch, omit --slurm, or start the sweep on a Slurm login node"
        state.update(combination, job=submit(shlex.split(options), words, Problem("--slurm", options, "", instead)))
        sys.stdout.write(f"job {state[combination].job}: {' '.join(combination.overrides)}\n")
    waiting = [combination for combination in sweep.combinations if not state[combination].finished]
    sys.stdout.write("Waiting for the jobs. Ctrl-C does not cancel them; run the same command to wait again.\n")
    sys.stdout.flush()
    while waiting:
        queued = _in_queue([str(state[combination].job) for combination in waiting])
        for combination in [combination for combination in waiting if state[combination].job not in queued]:
            state.update(combination, status=_status_of(str(state[combination].job)), job=state[combination].job)
            waiting.remove(combination)
        time.sleep(_POLL_SECONDS if waiting else 0)


def run_dir(sweep: Sweep, combination: Combination) -> str:
    """Return the run.dir override of a run, quoted because names may contain commas."""
    return f"run.dir='{(sweep.folder / combination.name).absolute()}'"


def _in_queue(jobs: Sequence[str]) -> set[str]:
    """Return the jobs that are queued or running."""
    done = call(["squeue", "--noheader", "--format=%i", "--me"])
    if done.returncode:  # squeue failed, which does not mean that the jobs ended
        return set(jobs)
    return set(jobs) & set(done.stdout.split())


def _status_of(job: str) -> int:
    """Return the exit status of the first rank in the last start of a job."""
    with suppress(OSError, ValueError, IndexError):
        newest = max((BATCH_FOLDER / "logs" / job).glob("*/status"), key=os.path.getmtime, default=None)
        if newest is not None:
            return int(newest.read_text(encoding="utf-8").splitlines()[0])
    return EXIT_FAILED
