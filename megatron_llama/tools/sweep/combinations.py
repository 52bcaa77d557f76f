"""Expand a command line with several values to runs, and store the state of a sweep. Uses Hydra's override parser."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from megatron_llama.config import ConfigError, Problem, load_config
from megatron_llama.config.conf_folders import options_of
from megatron_llama.system.exit_status import EXIT_RESTART, EXIT_USER
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.object_store import is_url

RUN_DIR = "run.dir"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    name: str
    """Folder name in the folder of the sweep, from the varied values."""
    overrides: tuple[str, ...]
    """Its command line without run.dir."""
    differing: dict[str, str]
    """Varied settings with their values in this run."""


@dataclass(frozen=True)
class Sweep:
    """Runs and their common folder."""

    folder: Path
    varied: tuple[str, ...]
    """Varied settings, in the order of the command line."""
    combinations: tuple[Combination, ...]


def combinations(arguments: Sequence[str], conf_dir: Path) -> Sweep:
    """Expand a command line to all combinations of its values; the last setting varies fastest.

    Values are ``a,b``, ``choice(...)``, ``range(...)`` and, for the groups of ``conf_dir``, ``glob(...)``. Without
    ``run.dir`` the folder name is derived from the arguments, so that the same command resumes the same runs.
    Raises ConfigError.
    """
    parser, problems = OverridesParser.create(), list[Problem]()
    choices: dict[str, list[str]] = {}
    fixed: list[str] = []
    folder = ""
    for text in arguments:
        try:
            override = parser.parse_override(text)
        except HydraException:  # load_config reports it, once for all runs
            fixed.append(text)
            continue
        if override.key_or_group == RUN_DIR and not override.is_sweep_override():
            folder = str(override.value())
            if is_url(folder):
                problems.append(Problem(RUN_DIR, folder, "must be a local path", "write a local path"))
        elif not override.is_sweep_override():
            fixed.append(text)
        elif problem := _sweep_problem(override):
            problems.append(problem)
        else:
            choices[override.get_key_element()] = _values(override, conf_dir)
    problems += [
        Problem(key, None, "matches no value", f"write {key}=VALUE,VALUE") for key, all_ in choices.items() if not all_
    ]
    if not choices and not problems:
        load_config(fixed, conf_dir)  # reports values that are no sweep because of their syntax, such as 1,,2
        rule = "needs a setting with several values"
        problems.append(Problem("-m", None, rule, "write values with commas, such as optim.lr=1e-4,3e-4, or omit -m"))
    if problems:
        raise ConfigError(problems)
    runs: dict[str, Combination] = {}
    for values in itertools.product(*choices.values()):
        differing = dict(zip(choices, values, strict=True))
        words = [f"{key}={value}" for key, value in differing.items()]
        name = _file_name("+".join(f"{key}_{value}" for key, value in differing.items()))
        if name in runs and runs[name].differing != differing:
            name += f"-{_digest(words)}"
        runs[name] = Combination(name, (*fixed, *words), differing)
    folder = folder or f"runs/sweep-{_file_name('+'.join(choices))}-{_digest(arguments)}"
    return Sweep(Path(folder), tuple(choices), tuple(runs.values()))


def _sweep_problem(override: Override) -> Problem | None:
    """Return the problem of an override whose values cannot be listed, or None."""
    key = override.key_or_group
    if key == RUN_DIR:
        return Problem(key, None, "is the folder of the sweep", "write one folder; each run gets a subfolder")
    if override.is_discrete_sweep():
        return None
    rule = "an interval has no discrete values"
    return Problem(key, None, rule, f"write {key}=range(FROM,TO,STEP) or {key}=VALUE,VALUE")


def _values(override: Override, conf_dir: Path) -> list[str]:
    """Return the values in command-line syntax."""
    value = override.value()
    if isinstance(value, Glob):  # Hydra needs a composed config for this
        return value.filter(options_of(override.key_or_group, conf_dir))
    return [str(text) for text in override.sweep_string_iterator()]


def _file_name(text: str) -> str:
    """Shorten ``text`` to a file name that needs no quotes in a shell."""
    plain = re.sub(r"[^\w.+-]+", "_", text).encode()
    return plain.decode() if len(plain) <= 120 else f"{plain[:110].decode(errors='ignore')}-{_digest([text])}"


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


# State of the runs in ``<folder>/sweep.json``, from which an interrupted sweep resumes.
FILE = "sweep.json"


@dataclass(frozen=True)
class RunState:
    """State of a run."""

    overrides: tuple[str, ...]
    status: int | None = None
    """Exit status; None until the run ends."""
    job: str | None = None
    """Slurm job id."""

    @property
    def finished(self) -> bool:
        """Whether the run ended successfully."""
        return self.status == 0

    @property
    def description(self) -> str:
        """Status for the table."""
        if self.status is None:
            return f"job {self.job}" if self.job else "not started"
        words = {0: "done", EXIT_USER: "config error", EXIT_RESTART: "stopped, saved"}
        return words.get(self.status, f"failed, status {self.status}")


class SweepState:
    """States of the runs of a sweep, stored on disk."""

    def __init__(self, sweep: Sweep) -> None:
        """Read the stored states. Raises ConfigError.

        A run whose command line has changed loses its state but keeps its folder and checkpoints.
        """
        self._path = sweep.folder / FILE
        self._states = self._read()
        for run in sweep.combinations:
            if run.name not in self._states or self._states[run.name].overrides != run.overrides:
                self._states[run.name] = RunState(run.overrides)

    def __getitem__(self, run: Combination) -> RunState:
        return self._states[run.name]

    def update(self, run: Combination, *, status: int | None = None, job: str | None = None) -> None:
        """Store the state of a run."""
        self._states[run.name] = replace(self._states[run.name], status=status, job=job)
        runs = {name: asdict(state) for name, state in self._states.items()}
        write_atomically(self._path, json.dumps({"runs": runs}, indent=1) + "\n")

    def _read(self) -> dict[str, RunState]:
        if not self._path.exists():
            return {}
        try:
            runs: Mapping[str, Mapping] = read_json(self._path)["runs"]
            return {
                name: RunState(tuple(map(str, run["overrides"])), run["status"], run["job"])
                for name, run in runs.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule, advice = f"is not a valid state file of a sweep: {error}", "delete it; each run then resumes"
            raise ConfigError([Problem(str(self._path), None, rule, f"{advice} from its own folder")]) from None
