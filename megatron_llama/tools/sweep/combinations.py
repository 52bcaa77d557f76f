"""Which runs a command line with several values means. Hydra's grammar, read by Hydra's own parser."""
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

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.exit_status import EXIT_RESTART, EXIT_USER
from megatron_llama.system.files import read_json, write_atomically

RUN_DIR = "run.dir"


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    name: str
    """Its folder's name in the sweep's folder: the values that only it has."""
    overrides: tuple[str, ...]
    """All of its command line but run.dir."""
    differing: dict[str, str]
    """The settings that the sweep varies, with its values of them."""


@dataclass(frozen=True)
class Sweep:
    """Several runs, and the folder that theirs are in."""

    folder: Path
    varied: tuple[str, ...]
    """The settings that differ, in the order of the command line."""
    combinations: tuple[Combination, ...]


def combinations(arguments: Sequence[str], conf_dir: Path) -> Sweep:
    """The sweep that a command line means: every combination of ``a,b``, ``choice(...)``, ``range(...)`` and, for the
    groups of ``conf_dir``, ``glob(...)``; the last setting varies fastest.

    Without ``run.dir`` the folder's name follows from the arguments, so that the same line goes on with the same runs.
    Raises ConfigError.
    """
    parser, problems = OverridesParser.create(), list[Problem]()
    choices: dict[str, list[str]] = {}
    fixed: list[str] = []
    folder = ""
    for text in arguments:
        try:
            override = parser.parse_override(text)
        except HydraException:  # load_config says it better, once for all runs
            fixed.append(text)
            continue
        if override.key_or_group == RUN_DIR and not override.is_sweep_override():
            folder = str(override.value())
        elif not override.is_sweep_override():
            fixed.append(text)
        elif problem := _no_list(override):
            problems.append(problem)
        else:
            choices[override.get_key_element()] = _values(override, conf_dir)
    problems += [
        Problem(key, None, "no value is left of it", f"write {key}=VALUE,VALUE")
        for key, all_ in choices.items()
        if not all_
    ]
    if not choices and not problems:
        rule = "asks for several runs, and no setting has several values"
        problems.append(
            Problem("-m", None, rule, "write them with commas, such as optim.lr=1e-4,3e-4, or leave -m out")
        )
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


def _no_list(override: Override) -> Problem | None:
    """Why values of this override are none that can be listed."""
    key = override.key_or_group
    if key == RUN_DIR:
        return Problem(key, None, "is the folder of the whole sweep", "write one folder; each run gets its own in it")
    if override.is_discrete_sweep():
        return None
    rule = "an interval has no list of values"
    return Problem(key, None, rule, f"write {key}=range(FROM,TO,STEP) or {key}=VALUE,VALUE")


def _values(override: Override, conf_dir: Path) -> list[str]:
    """The values, as they are written on a command line."""
    value = override.value()
    if isinstance(value, Glob):  # Hydra would look into a config that it has composed itself
        return value.filter(sorted(path.stem for path in (conf_dir / override.key_or_group).glob("*.yaml")))
    return [str(text) for text in override.sweep_string_iterator()]


def _file_name(text: str) -> str:
    """``text`` as a short part of a path that needs no quotes, neither in a shell nor in Hydra's grammar."""
    plain = re.sub(r"[^\w.+-]+", "_", text)
    return plain if len(plain) <= 120 else f"{plain[:110]}-{_digest([text])}"


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


# What has become of a sweep's runs, in ``<folder>/sweep.json``: a sweep that was interrupted goes on from it.


FILE = "sweep.json"


@dataclass(frozen=True)
class Outcome:
    """What is known of one run."""

    overrides: tuple[str, ...]
    status: int | None = None
    """Its exit status; None before its end."""
    job: str | None = None
    """The number of its Slurm job."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.status == 0

    @property
    def in_words(self) -> str:
        """For the table."""
        if self.status is None:
            return f"job {self.job}" if self.job else "not started"
        words = {0: "done", EXIT_USER: "refused", EXIT_RESTART: "stopped, saved"}
        return words.get(self.status, f"failed, status {self.status}")


class Record:
    """The outcomes of a sweep's runs, kept on disk."""

    def __init__(self, sweep: Sweep) -> None:
        """Reads what an earlier start has left. A run whose command line has changed begins its life anew; its folder,
        with its checkpoints, is as the run itself finds it. Raises ConfigError."""
        self._path = sweep.folder / FILE
        known = self._read()
        self._outcomes = {
            one.name: known[one.name]
            if one.name in known and known[one.name].overrides == one.overrides
            else Outcome(one.overrides)
            for one in sweep.combinations
        }
        self._others = {name: outcome for name, outcome in known.items() if name not in self._outcomes}

    def __getitem__(self, run: Combination) -> Outcome:
        return self._outcomes[run.name]

    def note(self, run: Combination, *, status: int | None = None, job: str | None = None) -> None:
        """Keeps what has become of a run."""
        self._outcomes[run.name] = replace(self._outcomes[run.name], status=status, job=job)
        runs = {name: asdict(outcome) for name, outcome in {**self._others, **self._outcomes}.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps({"runs": runs}, indent=1) + "\n")

    def _read(self) -> dict[str, Outcome]:
        if not self._path.exists():
            return {}
        try:
            found: Mapping[str, Mapping] = read_json(self._path)["runs"]
            return {
                name: Outcome(tuple(map(str, run["overrides"])), run["status"], run["job"])
                for name, run in found.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"can't be read as the record of a sweep: {error}"
            raise ConfigError(
                [Problem(str(self._path), None, rule, "remove it: each run then looks for itself")]
            ) from None
