"""SLURM jobs of run.slurm, for sweeps and for trials of the tuner."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.programs import BATCH_FOLDER, batch_script, batch_variables


def submit(options: Sequence[str], words: Sequence[str], problem: Problem, **variables: str) -> str:
    """Submit ``run.slurm`` and return the job's id. Raises ConfigError if sbatch is missing or rejects the job.

    ``words`` are overrides of train.py. ``problem`` is the problem to report, without its rule.
    """
    try:
        done = call(["sbatch", "--parsable", *options, batch_script("run.slurm"), *words], **variables)
    except OSError as error:
        raise ConfigError([replace(problem, rule=f"cannot start sbatch: {error.strerror}")]) from error
    if done.returncode:
        raise ConfigError([replace(problem, rule=f"sbatch failed: {(done.stderr or done.stdout).strip()}")])
    return done.stdout.strip().partition(";")[0]


def call(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM in the folder of the batch scripts."""
    env = {**os.environ, **batch_variables(), **variables}
    return subprocess.run(command, cwd=BATCH_FOLDER, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
