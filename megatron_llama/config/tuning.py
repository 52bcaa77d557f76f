"""The settings of ``tune``: what scripts/tune.py looks for, and how long. No part of ``Config``, like ``cluster``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from megatron_llama.config.limits import above_zero, at_least, one_of
from megatron_llama.config.problems import Problem
from megatron_llama.config.tool_settings import load_section

SECTION = "tune"
OBJECTIVES = ("throughput", "max_seq_len", "min_devices")


@dataclass
class TuneConfig:
    """What scripts/tune.py looks for; of that program only."""

    objective: Annotated[str, one_of(*OBJECTIVES)] = "throughput"
    """throughput (the most tokens a second), max_seq_len (the longest data.seq_length that fits) or min_devices (the
    fewest devices that do). Also written objective=..."""
    trials: Annotated[int, at_least(0)] = 8
    """Runs of a few steps that are timed, the most promising first; as many more may run out of memory, and the fastest
    three, where they are close, run twice more in turn. 0 only plans, as for machines that are not here."""
    steps: Annotated[int, at_least(1)] = 5
    """Steps of a trial that are timed, after one that is not; their median counts."""
    trial_minutes: Annotated[float, above_zero()] = 10.0
    """A trial that takes longer is ended."""
    days: Annotated[float | None, above_zero()] = None
    """For min_devices: the run must end within so many days, with failures and checkpoints; null asks for no more than
    that it fits."""
    jobs: bool = False
    """Try as SLURM jobs, by sbatch run.slurm on cluster.nodes machines; tune.dir must be on a disk that they share."""
    sbatch: str = ""
    """More options for sbatch, such as tune.sbatch="--partition gpu --time 20"."""
    name: str | None = None
    """Name of the experiment that is written in conf/experiment/. Derived: from model, objective, machine."""
    overwrite: bool = False
    """Replace an experiment of that name."""
    dir: str | None = None
    """Folder of the trials; one that holds some of the same search goes on. Derived: runs/tune-<name>."""


def load_tuning(overrides: Sequence[str]) -> tuple[TuneConfig, list[str], list[Problem]]:
    """The settings of tune on a command line, the overrides that are not about it, and what is wrong with those that
    are."""
    dotted = [f"{SECTION}.{text}" if text.startswith("objective=") else text for text in overrides]
    return load_section(TuneConfig, SECTION, dotted)
