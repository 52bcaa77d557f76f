"""From a command line to an experiment: what is asked, the search for its objective, and what is written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.fields import check_limits
from megatron_llama.plan.choices import choose_defaults
from megatron_llama.system.files import write_atomically
from megatron_llama.tools.bar import bar
from megatron_llama.tools.mock_run import NO_FILES
from megatron_llama.tools.settings import TuneConfig, load_cluster, load_tuning
from megatron_llama.tools.tune import fewest, sequences
from megatron_llama.tools.tune.candidates import Candidate, Space, Tuned, kept_settings
from megatron_llama.tools.tune.experiment import check_name, experiment_path, experiment_text
from megatron_llama.tools.tune.journal import Journal
from megatron_llama.tools.tune.page import comment, table
from megatron_llama.tools.tune.search import Found, attempt_with, forecast_space, in_words, search
from megatron_llama.tools.tune.target import Target, find_target

SHORTER = 1.05
"""After trials that ran out of memory at a length, the next one leaves so much more."""


class NothingWorks(Exception):
    """No settings were found; the message says why."""


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    all_words: tuple[str, ...]
    words: tuple[str, ...]
    """Of train.py: all but those of tune and cluster."""
    config: Config
    tune: TuneConfig
    """With a name and a folder."""
    target: Target


def read(words: Sequence[str]) -> Asked:
    """What is asked. Raises ConfigError with everything that is wrong with it."""
    tune, rest, problems = load_tuning(words)
    cluster, rest, more = load_cluster(rest)
    problems += more
    config = None
    try:
        config = cli.parse_overrides([*rest, *NO_FILES, "dry_run=true"])
    except ConfigError as error:
        problems += error.problems
        config = error.config
    if config is not None:
        problems += [each for each in check_limits(config) if each not in problems]
    target, more = find_target(config or Config(), cluster, words)
    problems += more
    if tune.jobs and (target is None or target.here):
        rule = "jobs are for machines that cluster describes"
        problems.append(Problem("tune.jobs", True, rule, "write cluster.device=NAME cluster.nodes=N too"))
    if tune.name is None and config is not None and target is not None:
        where = f"{target.ranks}x{target.name}"
        tune = replace(tune, name=re.sub(r"[^\w.-]", "_", f"{config.model.name}_{tune.objective}_{where}"))
    problems += check_name(tune.name or "x", tune.overwrite)
    if problems or config is None or target is None:
        raise ConfigError(problems)
    if config.device.name == "auto":
        config.device.name = target.device.kind
    config = choose_defaults(config)[0]
    folder = Path(tune.dir or f"runs/tune-{tune.name}").absolute()
    return Asked(tuple(words), tuple(rest), config, replace(tune, dir=str(folder)), target)


def tune(words: Sequence[str]) -> None:
    """Does what a command line asks for. Raises ConfigError and NothingWorks."""
    asked = read(words)
    _say([f"{asked.config.model.name}: {asked.tune.objective} on {asked.target}"])
    _say([f"forecasts of time: {asked.target.basis}"])
    trials = asked.tune.trials
    if trials and not (asked.target.here or asked.tune.jobs):
        trials = 0
        _say(["planned, not tried: that machine is not here (tune.jobs=true tries by jobs)"])
    tuned = Tuned(asked.config, kept_settings(asked.config, list(asked.words)), asked.target)
    {"throughput": _throughput, "max_seq_len": _max_seq_len, "min_devices": _min_devices}[asked.tune.objective](
        asked, tuned, trials
    )


def _throughput(asked: Asked, tuned: Tuned, trials: int) -> None:
    _show_and_write(asked, searched(asked, tuned, forecast_space(tuned), trials))


def _max_seq_len(asked: Asked, tuned: Tuned, trials: int) -> None:
    """The table, then the fastest settings for the longest sequence that any layout takes. Where trials show that it
    does not fit after all, the next shorter one by the corrected forecast."""
    config, target = asked.config, asked.target
    with bar("forecast", "lengths") as shown:
        cells = sequences.stage_table(config, tuned.kept, target, shown.show)
    _say(["", *sequences.table_lines(cells, config), ""])
    scale, positions = 1.0, config.model.max_position_embeddings
    for _ in range(max(1, trials)):
        with bar("forecast", "layouts") as shown:
            tokens = sequences.longest_of_all(tuned, partial(_fits, target, scale), shown.show)
        if not tokens:
            raise NothingWorks(f"Not even {sequences.STEP} tokens fit on {target}.")
        capped = min(tokens, positions)
        more = f"would fit; model.max_position_embeddings={positions} takes no more than {positions:,}"
        what = "fit in some layout" if tokens <= positions else more
        _say([f"{tokens:,} tokens {what}"])
        longer = Tuned(config, tuned.kept, target, sequences.of_length(config, capped))
        found = search_in(asked, longer, forecast_space(longer), trials)
        if found.best is not None and (not found.knowledge.tried or found.knowledge.best):
            _show_and_write(asked, found)
            return
        scale = found.knowledge.memory_scale * SHORTER
    raise NothingWorks("\n".join(why_nothing(found)))


def _fits(target: Target, scale: float, each: Candidate) -> bool:
    return target.needs(each.grown_peak(scale), each.ranks) <= target.room


def _min_devices(asked: Asked, tuned: Tuned, trials: int) -> None:
    """Device count after device count, until the run fits, ends in time, and works where it is tried."""
    named = any(word.startswith("cluster.nodes=") for word in asked.all_words)
    most = fewest.most_devices(asked.target, bounded=named)
    with bar("forecast", "device counts") as shown:
        counts = fewest.enough(tuned, asked.tune.days, most, 1.0, shown.show)
    _say(["", *fewest.table_lines(counts), ""])
    last = counts[-1]
    in_time = last.days is not None and (asked.tune.days is None or last.days <= asked.tune.days)
    if not in_time:
        late = f" and ends within {asked.tune.days:g} days" if asked.tune.days else ""
        raise NothingWorks(f"No number of devices up to {last.tuned.target.ranks:,} fits{late}.")
    _show_and_write(asked, searched(asked, last.tuned, last.space, trials))


def searched(asked: Asked, tuned: Tuned, space: Space, trials: int) -> Found:
    """The search among all settings of ``tuned``. Raises NothingWorks where none is left."""
    found = search_in(asked, tuned, space, trials)
    tried = found.knowledge.tried
    if found.best is None or (tried and found.knowledge.best is None):
        raise NothingWorks("\n".join(why_nothing(found)))
    return found


def search_in(asked: Asked, tuned: Tuned, space: Space, trials: int) -> Found:
    """The search, with the trials in the folder that was asked for."""
    folder = Path(str(asked.tune.dir))
    journal = None
    if trials:
        target = tuned.target
        journal = Journal(
            folder, {"words": list(asked.words), "steps": asked.tune.steps, "machine": f"{target.ranks} {target.name}"}
        )
    nodes = tuned.target.nodes
    return search(tuned, space, trials, journal, attempt_with(asked.words, asked.tune, folder, nodes))


def why_nothing(found: Found) -> Iterable[str]:
    """Why no settings are left."""
    tried = found.knowledge.tried
    yield f"Nothing {'that was tried works' if tried else 'fits'} on {found.target}:"
    if not tried:
        yield from (f"  {count:,} {reason}" for reason, count in found.space.dropped.most_common())
        yield "objective=min_devices says how many devices it takes."
    yield from (f"  {each.key}: {in_words(out)}" for each, out in tried.values())


def _show_and_write(asked: Asked, found: Found) -> None:
    """The table, and the best settings as an experiment."""
    config = asked.config
    if (length := found.order[0].settings.get(sequences.LENGTH)) is not None:
        config = replace(config, data=replace(config.data, seq_length=length))
    _say(["", *table(found, config), ""])
    best, name = found.best, str(asked.tune.name)
    assert best is not None, "searched() has seen to it"
    path = experiment_path(name)
    write_atomically(path, experiment_text(asked.words, best.settings, comment(found, config, asked.tune.objective)))
    _say([f"wrote {path}", f"  python train.py experiment={name}"])


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
