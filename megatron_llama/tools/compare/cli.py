"""The command line of scripts/compare.py: what is asked, read and checked, with every mistake at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.metric_names import ROLES
from megatron_llama.tools.compare.read_logs import TRAINER_STATE
from megatron_llama.tools.compare.runs import Reading, Run, read_run
from megatron_llama.tools.compare.verdict import Comparison, compare
from megatron_llama.train.metrics_file import METRICS_FILE

# Names inside a run's folder, which say nothing about the run.
NO_NAMES = (METRICS_FILE, TRAINER_STATE, "tensorboard", "/")


@dataclass(frozen=True)
class Asked:
    """What a user asked for, as it was written."""

    runs: Sequence[str]
    """The reference, and those compared with it."""
    seeds: Sequence[str] = ()
    tolerance: float = 0.01
    window: float | None = None
    tags: Sequence[str] = ()
    samples_per_step: Sequence[str] = ()
    min_overlap: float = 0.9


def run_comparison(asked: Asked) -> Comparison:
    """Reads the runs and compares them; raises ConfigError with everything that is wrong with what was asked."""
    problems = list(_bad_numbers(asked))
    reading = Reading(_tags(asked.tags, problems), _samples_per_step(asked, problems))
    paths = [*asked.runs, *asked.seeds]
    runs: list[Run] = []
    for path, name in zip(paths, labels(paths), strict=True):
        run = read_run(path, name, reading)
        if isinstance(run, Run):
            runs.append(run)
        else:
            problems += run
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    count = len(asked.runs)
    return compare(runs[0], runs[1:count], asked.tolerance, runs[count:], asked.window, asked.min_overlap)


def labels(paths: Sequence[str]) -> list[str]:
    """A short name for each path: as many of its last parts as tell it from the others."""
    parts = [tuple(part for part in PurePath(path).parts if part not in NO_NAMES) or (path,) for path in paths]
    names = ["/".join(own[-1:]) for own in parts]
    for depth in range(2, 1 + max(map(len, parts))):
        names = [
            "/".join(own[-depth:]) if names.count(name) > 1 else name for own, name in zip(parts, names, strict=True)
        ]
    return [
        f"{name} ({names[:index].count(name) + 1})" if name in names[:index] else name
        for index, name in enumerate(names)
    ]


def _bad_numbers(asked: Asked) -> list[Problem]:
    problems = []
    if not (math.isfinite(asked.tolerance) and asked.tolerance >= 0):
        problems.append(Problem("--tolerance", asked.tolerance, "must be at least 0", "write --tolerance 0.01"))
    if asked.window is not None and not asked.window > 0:
        problems.append(Problem("--window", asked.window, "must be above 0, in samples", "leave it out"))
    if not 0 <= asked.min_overlap <= 1:
        rule, instead = "must be a share from 0 to 1", "write --min-overlap 0.9"
        problems.append(Problem("--min-overlap", asked.min_overlap, rule, instead))
    known = {Path(path).resolve() for path in asked.runs}
    for index, path in enumerate(asked.seeds):
        where = Path(path).resolve()
        if where in known or where in {Path(other).resolve() for other in asked.seeds[:index]}:
            rule = "is named twice: seeds are further runs, and comparing a seed with its own mean says nothing"
            problems.append(Problem("--seeds", path, rule, "name each run once"))
    return problems


def _tags(given: Sequence[str], problems: list[Problem]) -> dict[str, list[str]]:
    """{role: names} from role=name."""
    tags: dict[str, list[str]] = {}
    for text in given:
        role, equals, name = text.partition("=")
        if role in ROLES and equals and name:
            tags.setdefault(role, []).append(name)
        else:
            rule = f"must be ROLE=NAME, with a role of {', '.join(ROLES)}"
            problems.append(Problem("--tag", text, rule, "write --tag loss=NAME"))
    return tags


def _samples_per_step(asked: Asked, problems: list[Problem]) -> dict[str, float]:
    """{path: samples} from N or PATH=N."""
    sizes: dict[str, float] = {}
    for text in asked.samples_per_step:
        path, _, number = text.rpartition("=")
        try:
            sizes[path] = float(number)
            good = math.isfinite(sizes[path]) and sizes[path] > 0
        except ValueError:
            good = False
        if not good or (path and path not in [*asked.runs, *asked.seeds]):
            rule = "must be N, or RUN=N with a run as it is written beside it"
            problems.append(Problem("--samples-per-step", text, rule, "write the global batch size, 256"))
    return sizes
