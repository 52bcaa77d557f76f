"""Settings of the sections ``cluster`` and ``tune``, which belong to tools and not to ``Config``.

``cluster`` describes the machines of a forecast; they need not exist. train.py uses the machines that it finds, so it
neither accepts nor saves these settings. ``tune`` holds the objective and the limits of scripts/tune.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import yaml

from megatron_llama.config.limits import above_zero, at_least, one_of
from megatron_llama.config.problems import Problem, closest_match
from megatron_llama.config.settings_table import settings_of

CLUSTER, TUNE = "cluster", "tune"
OBJECTIVES = ("throughput", "max_seq_len", "min_devices")
Owner = TypeVar("Owner")


@dataclass
class ClusterConfig:
    """Machines of a forecast; for scripts/plan.py and scripts/tune.py."""

    device: str = "h100"
    """Accelerator name (h100, b200, mi300x, trn1, ...; list: scripts/plan.py --devices). cpu: this machine, after
    scripts/plan.py --calibrate. Unset: a usual chip of ``device``, such as trn2 or gaudi2."""
    nodes: Annotated[int | None, at_least(1)] = None
    """Number of machines. Derived: enough for tp * cp * pp * dp ranks."""
    devices_per_node: Annotated[int | None, at_least(1)] = None
    """Devices per machine. Derived: from the hardware table."""
    price: Annotated[float | None, above_zero()] = None
    """Price of one device per hour, in any currency. null omits the cost."""
    tokens: Annotated[float | None, above_zero()] = None
    """Tokens to train on. Derived: tokens of trainer.steps."""
    failure_hours: Annotated[float, above_zero()] = 50_000.0
    """Mean hours between failures of one device. Default: 419 failures of 16,384 H100 in 54 days (Llama 3,
    arXiv:2407.21783)."""
    restart_minutes: Annotated[float, at_least(0)] = 10.0
    """Minutes from a failure to the first new step, without the lost steps."""
    storage_gbps: Annotated[float, above_zero()] = 1.0
    """Write bandwidth of one machine for checkpoints, in GB/s."""


@dataclass
class TuneConfig:
    """Objective and limits of a search; for scripts/tune.py."""

    objective: Annotated[str, one_of(*OBJECTIVES)] = "throughput"
    """Objective: most tokens/s, longest data.seq_length that fits, or fewest devices. Short form: objective=..."""
    trials: Annotated[int, at_least(0)] = 8
    """Number of timed trials, most promising settings first. 0: plan only; always 0 for other machines unless
    tune.jobs."""
    steps: Annotated[int, at_least(1)] = 5
    """Timed steps of a trial, after one warm-up step. The result is their median."""
    trial_minutes: Annotated[float, above_zero()] = 10.0
    """Time limit of a trial, in minutes."""
    days: Annotated[float | None, above_zero()] = None
    """Deadline of the run for min_devices, in days with failures and checkpoints. null: the run only has to fit."""
    jobs: bool = False
    """Whether trials run as SLURM jobs (run.slurm, on cluster.nodes machines). Needs tune.dir on a shared disk."""
    sbatch: str = ""
    """Additional sbatch options, such as tune.sbatch="--partition gpu --time 20"."""
    name: str | None = None
    """Name of an experiment file to write in conf/experiment/. null: no file; --output writes another file."""
    overwrite: bool = False
    """Whether an existing experiment of this name is replaced."""
    dir: str | None = None
    """Folder of the trials. An interrupted search of the same command resumes. Derived: runs/tune-<name>."""


def load_tuning(overrides: Sequence[str]) -> tuple[TuneConfig, list[str], list[Problem]]:
    """Parse the overrides of ``tune``: (its settings, the other overrides, problems)."""
    dotted = [f"{TUNE}.{text}" if text.startswith("objective=") else text for text in overrides]
    return load_section(TuneConfig, TUNE, dotted)


def load_section(owner: type[Owner], section: str, overrides: Sequence[str]) -> tuple[Owner, list[str], list[Problem]]:
    """Parse the overrides of one section, whose settings are the fields of the dataclass ``owner``.

    Returns (an ``owner``, the overrides of other sections, problems of this section's overrides).
    """
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
            guess = closest_match(name, list(settings))
            instead = f"write {guess}={written}" if guess else f"write one of {', '.join(settings)}"
            problems.append(Problem(name, written, "unknown setting", instead))
            continue
        value: Any = written
        if setting.kind is not str or written == "null":
            with contextlib.suppress(yaml.YAMLError):  # else the text itself
                value = yaml.safe_load(written)
        if setting.kind is float and isinstance(value, str):  # YAML reads 2e12 as text
            with contextlib.suppress(ValueError):
                value = float(value)
        if not (setting.has_type(value) or (value is None and setting.optional)):
            problems.append(Problem(name, value, f"must be {setting.type_name}", setting.suggest_value(value)))
        elif problem := setting.problem(value):
            problems.append(problem)
        else:
            values[name.removeprefix(section + ".")] = setting.kind(value) if value is not None else None
    return owner(**values), rest, problems
