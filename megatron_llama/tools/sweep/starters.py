"""Runs a sweep's runs: one after another on this machine, or as Slurm jobs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESTART
from megatron_llama.system.signals import STOP_SIGNALS, handle_signals
from megatron_llama.tools.sweep.combinations import Combination, Record, Sweep

ROOT = Path(__file__).resolve().parents[3]
STOPPED = (EXIT_RESTART, EXIT_INTERRUPTED, 128 + signal.SIGTERM, 128 + signal.SIGHUP, 128 + signal.SIGUSR1)
"""Statuses of a run that was asked to end: the sweep ends too, and the same line goes on with it."""
_POLL_SECONDS = 5.0

Run = Callable[[Sequence[str]], int]
"""Runs train.py with these arguments; its exit status."""


def one_after_another(sweep: Sweep, record: Record, run: Run) -> int | None:
    """Runs what is not finished. The status of a run that was asked to stop, where the sweep ends; None at the end."""
    left = [one for one in sweep.combinations if not record[one].finished]
    for number, one in enumerate(left, start=1):
        sys.stdout.write(f"\n== run {number} of {len(left)}: {' '.join(one.overrides)}\n")
        sys.stdout.flush()
        status = run([*one.overrides, run_dir(sweep, one)])
        record.note(one, status=status)
        if status in STOPPED:
            return status
    return None


def run_train_py(arguments: Sequence[str]) -> int:
    """``python train.py`` in a process of its own, which gets this one's signals."""
    asked: list[int] = []
    child = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *arguments])

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # a terminal has sent that to both
            child.send_signal(number)

    with handle_signals((signal.SIGINT, signal.SIGUSR1, *STOP_SIGNALS), forward):
        status = child.wait()
    if asked and status == 0:  # it came between two runs, or at the very end of one
        return EXIT_RESTART
    return 128 - status if status < 0 else status


def as_slurm_jobs(sweep: Sweep, record: Record, options: str) -> None:
    """Submits run.slurm for each run that is not finished and has no job yet, and waits for all jobs. A record that is
    interrupted here finds them again. Raises ConfigError where sbatch takes none."""
    for one in sweep.combinations:
        job = record[one].job
        if record[one].finished or (job is not None and _in_queue([job])):
            continue
        command = ["sbatch", "--parsable", *shlex.split(options), "run.slurm", *one.overrides, run_dir(sweep, one)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        except FileNotFoundError:
            rule, instead = "there is no sbatch here", "leave --slurm out, or start the sweep where Slurm is"
            raise ConfigError([Problem("--slurm", options, rule, instead)]) from None
        if done.returncode:
            problem = Problem("--slurm", options, f"sbatch: {done.stderr.strip()}", "correct the options of sbatch")
            raise ConfigError([problem])
        record.note(one, job=done.stdout.strip().partition(";")[0])
        sys.stdout.write(f"job {record[one].job}: {' '.join(one.overrides)}\n")
    waiting = [one for one in sweep.combinations if not record[one].finished]
    sys.stdout.write("Waiting for the jobs. Ctrl-C leaves them alone; the same line waits again.\n")
    sys.stdout.flush()
    while waiting:
        queued = _in_queue([str(record[one].job) for one in waiting])
        for one in [one for one in waiting if record[one].job not in queued]:
            record.note(one, status=_status_of(str(record[one].job)), job=record[one].job)
            waiting.remove(one)
        time.sleep(_POLL_SECONDS if waiting else 0)


def run_dir(sweep: Sweep, one: Combination) -> str:
    """The override that names a run's folder; in quotes, since its name may have commas."""
    return f"run.dir='{(sweep.folder / one.name).absolute()}'"


def _in_queue(jobs: Sequence[str]) -> set[str]:
    """Those of the jobs that Slurm has not ended."""
    done = subprocess.run(["squeue", "--noheader", "--format=%i", "--me"], capture_output=True, text=True)
    if done.returncode:  # it does not answer; that is no reason to take the jobs for ended
        return set(jobs)
    return set(jobs) & set(done.stdout.split())


def _status_of(job: str) -> int:
    """What the first rank of a job that has ended has left, of its last start."""
    with suppress(OSError, ValueError, IndexError):
        newest = max((ROOT / "logs" / job).glob("*/status"), key=os.path.getmtime, default=None)
        if newest is not None:
            return int(newest.read_text(encoding="utf-8").splitlines()[0])
    return EXIT_FAILED
