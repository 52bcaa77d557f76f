"""The settings of ``cluster`` and ``tune``: of single tools, and no part of ``Config``.

``cluster`` describes machines that a plan is made for and that need not be here. A run's machines are those it finds,
so train.py neither takes nor saves these settings, and a resumed run has nothing to compare. ``tune`` says what
scripts/tune.py looks for, and how long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import yaml

from megatron_llama.config.fields import settings_of
from megatron_llama.config.limits import above_zero, at_least, one_of
from megatron_llama.config.problems import Problem, nearest

CLUSTER, TUNE = "cluster", "tune"
OBJECTIVES = ("throughput", "max_seq_len", "min_devices")
Owner = TypeVar("Owner")


@dataclass
class ClusterConfig:
    """Machines to plan for; of scripts/plan.py and scripts/tune.py."""

    device: str = "h100"
    """Accelerator, a name of the hardware table: a100, h100, h200, b200, mi300x, trn1, gaudi2, ...; python
    scripts/plan.py --devices lists them. cpu: this machine, as scripts/plan.py --calibrate has measured it."""
    nodes: Annotated[int | None, at_least(1)] = None
    """Machines. Derived: as many as tp * pp * dp need."""
    devices_per_node: Annotated[int | None, at_least(1)] = None
    """Devices of a machine. Derived: what the hardware table says."""
    price: Annotated[float | None, above_zero()] = None
    """Price of one device for an hour, in any currency; null leaves the cost out."""
    tokens: Annotated[float | None, above_zero()] = None
    """Tokens to train on. Derived: those of the run's steps."""
    failure_hours: Annotated[float, above_zero()] = 50_000.0
    """Mean hours between failures of one device that stop the run. The default is what 16,384 H100 had while Llama 3
    was trained, 419 in 54 days (arXiv:2407.21783)."""
    restart_minutes: Annotated[float, at_least(0)] = 10.0
    """From a failure to the first new step, without the steps that are lost."""
    storage_gbps: Annotated[float, above_zero()] = 1.0
    """Gigabytes per second that one machine writes of a checkpoint."""


def load_cluster(overrides: Sequence[str]) -> tuple[ClusterConfig, list[str], list[Problem]]:
    """The cluster of a command line, the overrides that are not about it, and what is wrong with those that are."""
    return load_section(ClusterConfig, CLUSTER, overrides)


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
    dotted = [f"{TUNE}.{text}" if text.startswith("objective=") else text for text in overrides]
    return load_section(TuneConfig, TUNE, dotted)


def load_section(owner: type[Owner], section: str, overrides: Sequence[str]) -> tuple[Owner, list[str], list[Problem]]:
    """The ``section`` of a command line as an ``owner``, a dataclass; the overrides that are not of that section, and
    what is wrong with those that are."""
    settings = settings_of(owner, section)
    values: dict[str, Any] = {}
    rest, problems = [], []
    for text in overrides:
        name, equals, written = text.partition("=")
        if not name.startswith(section + ".") or not equals:
            rest.append(text)
            continue
        setting = settings.get(name)
        if setting is None:
            guess = nearest(name, list(settings))
            instead = f"write {guess}={written}" if guess else f"write one of {', '.join(settings)}"
            problems.append(Problem(name, written, "there is no setting of this name", instead))
            continue
        value = written if setting.kind is str and written != "null" else _read(written)
        if setting.kind is float and isinstance(value, str):  # YAML reads 2e12 as text
            with contextlib.suppress(ValueError):
                value = float(value)
        if not (setting.has_type(value) or (value is None and setting.optional)):
            problems.append(Problem(name, value, f"must be {setting.kind_in_words}", setting.advice(value)))
        elif problem := setting.problem(value):
            problems.append(problem)
        else:
            values[name.removeprefix(section + ".")] = setting.kind(value) if value is not None else None
    return owner(**values), rest, problems


def _read(written: str) -> Any:
    """What YAML reads; the text itself where it is none."""
    try:
        return yaml.safe_load(written)
    except yaml.YAMLError:
        return written
