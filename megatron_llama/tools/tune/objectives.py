"""From a command line to an experiment: what is asked, the search for its objective, and what is written."""
from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_llama import cli
from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.fields import check_limits, get
from megatron_llama.plan.choices import choose_defaults
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import gib, plural, text_table
from megatron_llama.tools.common import NO_FILES, progress_bar
from megatron_llama.tools.plan.forecast_run import MOST_DEVICES, forecast_plan
from megatron_llama.tools.settings import TuneConfig, load_cluster, load_tuning
from megatron_llama.tools.tune.candidates import TUNED, Candidate, CandidateSpace, Tuner, fixed_settings
from megatron_llama.tools.tune.search import SearchResult, attempt_with, forecast_space, in_words, search
from megatron_llama.tools.tune.target import Target, find_target
from megatron_llama.tools.tune.trial import DONE, Journal, check_name, experiment_path, experiment_text
from megatron_llama.topology import Grid

SHORTER = 1.05
"""After trials that ran out of memory at a length, the next one leaves so much more."""


class NothingWorks(Exception):
    """No settings were found; the message says why."""


@dataclass(frozen=True)
class TuneRequest:
    """What a command line asks for."""

    all_words: tuple[str, ...]
    words: tuple[str, ...]
    """Of train.py: all but those of tune and cluster."""
    config: Config
    tune: TuneConfig
    """With a name and a folder."""
    target: Target


def read_request(words: Sequence[str]) -> TuneRequest:
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
    return TuneRequest(tuple(words), tuple(rest), config, replace(tune, dir=str(folder)), target)


def tune(words: Sequence[str]) -> None:
    """Does what a command line asks for. Raises ConfigError and NothingWorks."""
    request = read_request(words)
    _say([f"{request.config.model.name}: {request.tune.objective} on {request.target}"])
    _say([f"forecasts of time: {request.target.basis}"])
    trials = request.tune.trials
    if trials and not (request.target.here or request.tune.jobs):
        trials = 0
        _say(["planned, not tried: that machine is not here (tune.jobs=true tries by jobs)"])
    tuned = Tuner(request.config, fixed_settings(request.config, list(request.words)), request.target)
    {"throughput": _throughput, "max_seq_len": _max_seq_len, "min_devices": _min_devices}[request.tune.objective](
        request, tuned, trials
    )


def _throughput(request: TuneRequest, tuned: Tuner, trials: int) -> None:
    _show_and_write(request, searched(request, tuned, forecast_space(tuned), trials))


def _max_seq_len(request: TuneRequest, tuned: Tuner, trials: int) -> None:
    """The table, then the fastest settings for the longest sequence that any layout takes. Where trials show that it
    does not fit after all, the next shorter one by the corrected forecast."""
    config, target = request.config, request.target
    with progress_bar("forecast", "lengths") as shown:
        cells = stage_table(config, tuned.fixed, target, shown.show)
    _say(["", *sequence_lines(cells, config), ""])
    scale, positions = 1.0, config.model.max_position_embeddings
    for _ in range(max(1, trials)):
        with progress_bar("forecast", "layouts") as shown:
            tokens = longest_of_all(tuned, partial(_fits, target, scale), shown.show)
        if not tokens:
            raise NothingWorks(f"Not even {STEP} tokens fit on {target}.")
        capped = min(tokens, positions)
        more = f"would fit; model.max_position_embeddings={positions} takes no more than {positions:,}"
        what = "fit in some layout" if tokens <= positions else more
        _say([f"{tokens:,} tokens {what}"])
        longer = Tuner(config, tuned.fixed, target, of_length(config, capped))
        found = search_in(request, longer, forecast_space(longer), trials)
        if found.best is not None and (not found.knowledge.tried or found.knowledge.best):
            _show_and_write(request, found)
            return
        scale = found.knowledge.memory_scale * SHORTER
    raise NothingWorks("\n".join(why_nothing(found)))


def _fits(target: Target, scale: float, each: Candidate) -> bool:
    return target.needs(each.grown_peak(scale), each.ranks) <= target.room


def _min_devices(request: TuneRequest, tuned: Tuner, trials: int) -> None:
    """Device count after device count, until the run fits, ends in time, and works where it is tried."""
    named = any(word.startswith("cluster.nodes=") for word in request.all_words)
    most = most_devices(request.target, bounded=named)
    with progress_bar("forecast", "device counts") as shown:
        counts = enough(tuned, request.tune.days, most, 1.0, shown.show)
    _say(["", *count_lines(counts), ""])
    last = counts[-1]
    in_time = last.days is not None and (request.tune.days is None or last.days <= request.tune.days)
    if not in_time:
        late = f" and ends within {request.tune.days:g} days" if request.tune.days else ""
        raise NothingWorks(f"No number of devices up to {last.tuned.target.ranks:,} fits{late}.")
    _show_and_write(request, searched(request, last.tuned, last.space, trials))


def searched(request: TuneRequest, tuned: Tuner, space: CandidateSpace, trials: int) -> SearchResult:
    """The search among all settings of ``tuned``. Raises NothingWorks where none is left."""
    found = search_in(request, tuned, space, trials)
    tried = found.knowledge.tried
    if found.best is None or (tried and found.knowledge.best is None):
        raise NothingWorks("\n".join(why_nothing(found)))
    return found


def search_in(request: TuneRequest, tuned: Tuner, space: CandidateSpace, trials: int) -> SearchResult:
    """The search, with the trials in the folder that was asked for."""
    folder = Path(str(request.tune.dir))
    journal = None
    if trials:
        target = tuned.target
        machine = f"{target.ranks} {target.name}"
        journal = Journal(folder, {"words": list(request.words), "steps": request.tune.steps, "machine": machine})
    nodes = tuned.target.nodes
    return search(tuned, space, trials, journal, attempt_with(request.words, request.tune, folder, nodes))


def why_nothing(found: SearchResult) -> Iterable[str]:
    """Why no settings are left."""
    tried = found.knowledge.tried
    yield f"Nothing {'that was tried works' if tried else 'fits'} on {found.target}:"
    if not tried:
        yield from (f"  {count:,} {reason}" for reason, count in found.space.dropped.most_common())
        yield "objective=min_devices says how many devices it takes."
    yield from (f"  {each.key}: {in_words(out)}" for each, out in tried.values())


def _show_and_write(request: TuneRequest, found: SearchResult) -> None:
    """The table, and the best settings as an experiment."""
    config = request.config
    if (length := found.order[0].settings.get(LENGTH)) is not None:
        config = replace(config, data=replace(config.data, seq_length=length))
    _say(["", *table(found, config), ""])
    best, name = found.best, str(request.tune.name)
    assert best is not None, "searched() has seen to it"
    path = experiment_path(name)
    about = comment(found, config, request.tune.objective)
    write_atomically(path, experiment_text(request.words, best.settings, about))
    _say([f"wrote {path}", f"  python train.py experiment={name}"])


def _say(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


# The fewest devices that a run fits on, and ends in time on.


@dataclass(frozen=True)
class Count:
    """A number of devices that was looked at."""

    tuned: Tuner
    space: CandidateSpace
    days: float | None
    """Of the whole run with the fastest settings, failures and checkpoints included; None where nothing fits."""

    @property
    def fastest(self) -> Candidate | None:
        """The fastest settings by forecast."""
        return self.space.candidates[0] if self.space.candidates else None


def numbers(target: Target, most: int) -> Iterator[int]:
    """Numbers of devices to look at: those that divide a node, then 1, 2, 3, 4, 6, 8, 12, ... nodes, up to ``most``."""
    yield from (n for n in range(1, target.per_node + 1) if target.per_node % n == 0 and n <= most)
    nodes = sorted({times << power for times in (1, 3) for power in range(MOST_DEVICES.bit_length())})
    yield from (n * target.per_node for n in nodes if 1 < n and n * target.per_node <= most)


def most_devices(target: Target, bounded: bool) -> int:
    """The most to look at: what there is, where the user has said so or it is here."""
    return target.ranks if bounded or target.here else MOST_DEVICES


def enough(tuned: Tuner, days: float | None, most: int, sure: float, progress: Callable[[int], None]) -> list[Count]:
    """What was looked at, up to the first number of devices on which the run fits and ends within ``days``."""
    found: list[Count] = []
    for number in numbers(tuned.target, most):
        part = Tuner(tuned.config, tuned.fixed, tuned.target.part(number), tuned.extra)
        space = part.enumerate(memory_factor=sure)
        best = space.candidates[0] if space.candidates else None
        found.append(Count(part, space, _days(part, best) if best else None))
        progress(len(found))
        if best and (days is None or (found[-1].days or 0.0) <= days):
            break
    return found


def _days(tuned: Tuner, best: Candidate) -> float:
    target, plan = tuned.target, tuned.plan(best.settings, best.ranks)
    return forecast_plan(plan, target.cluster, target.rank_device(best.ranks), best.ranks).days


def count_lines(found: list[Count]) -> Iterator[str]:
    """A row for each number of devices."""
    rows = [["devices", "sets that fit", "fastest: s a step", "days", "memory", "tp", "pp", "dp", "zero"]]
    for each in found:
        best, days = each.fastest, each.days
        row = [f"{each.tuned.target.ranks:,}", f"{len(each.space.candidates):,}"]
        if best is not None and days is not None:
            row += [f"{best.seconds:.4g}", f"{days:,.3g}", gib(best.needs)]
            row += [str(best.settings[f"trainer.{name}"]) for name in ("tp", "pp", "dp", "zero")]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    yield from text_table(rows, left=0)


# The longest sequences that fit: for each layout by bisecting the forecast of memory, and as a table of ZeRO stages by
# device counts, of full fine-tuning and of LoRA.


STEP = 64
"""Lengths are multiples of this many tokens."""
LONGEST = 1 << 24
LENGTH, POSITIONS, BATCH = "data.seq_length", "model.max_position_embeddings", "trainer.global_batch_size"
METHODS = {"full": "every weight trained", "lora": "LoRA"}
SAVING = {"trainer.micro_batch_size": 1, "trainer.recompute": "full", "trainer.vpp": 1}
"""What a sequence is longest with, where the user does not say otherwise."""

Fits = Callable[[Candidate], bool]


@dataclass(frozen=True)
class LengthCell:
    """One number of the table."""

    method: str
    zero: int
    ranks: int
    tokens: int
    """Tokens in the longest sequence; 0 where not even the shortest fits."""


def longest(tuned: Tuner, settings: Mapping[str, Any], ranks: int, fits: Fits) -> int:
    """The most tokens in a sequence with which ``settings`` fit, a multiple of 64; 0 where none do.

    Raises ConfigError where the settings break a rule.
    """
    unit = math.lcm(STEP, settings["trainer.tp"])

    def fit(count: int) -> bool:
        return fits(tuned.candidate({**settings, **of_length(tuned.config, count * unit)}, ranks))

    low, high = 0, 1
    while high * unit <= LONGEST and fit(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * unit


def of_length(config: Config, tokens: int) -> dict[str, int]:
    """Settings for sequences of so many tokens, with positions for all of them."""
    more = {POSITIONS: tokens} if tokens > config.model.max_position_embeddings else {}
    return {LENGTH: tokens, **more}


def longest_of_all(tuned: Tuner, fits: Fits, progress: Callable[[int], None]) -> int:
    """The most tokens that any layout of the target takes; 0 where none fits. Raises ConfigError where all break a
    rule."""
    saving = Tuner(tuned.config, {**SAVING, **tuned.fixed}, tuned.target)
    found, broken, done = [], None, 0
    for ranks in tuned.target.worlds():
        for layout in saving.layouts(ranks):
            size = saving.fixed["trainer.micro_batch_size"]
            try:
                found.append(longest(saving, {**layout, "trainer.micro_batch_size": size}, ranks, fits))
            except ConfigError as error:
                broken = error
            done += 1
            progress(done)
    if not found and broken is not None:
        raise broken
    return max(found, default=0)


def stage_table(
    config: Config, kept: Mapping[str, Any], target: Target, progress: Callable[[int], None]
) -> list[LengthCell]:
    """The longest sequence by method, ZeRO stage and number of data-parallel ranks: 1, 2, 4, ... as many as there are.

    A global batch that does not divide by the ranks is taken larger.
    """
    found = []
    tp, pp = kept.get("trainer.tp", 1), kept.get("trainer.pp", 1)
    grid = Grid.of(config.trainer).resized(tp=tp, pp=pp)
    for method in METHODS:
        changed = deepcopy(config)
        changed.finetune.method = method
        tuned = Tuner(changed, kept, target)
        for zero in [kept["trainer.zero"]] if "trainer.zero" in kept else range(4):
            for ranks in counts(target, grid.block):
                settings = _plain(config, kept, tp, pp, grid.with_world(ranks).sizes["dp"], zero)
                tokens = longest(tuned, settings, ranks, partial(_fits_on, target.part(ranks)))
                found.append(LengthCell(method, zero, ranks, tokens))
                progress(len(found))
    return found


def _fits_on(target: Target, each: Candidate) -> bool:
    return target.needs(each.peak, each.ranks) <= target.room


def counts(target: Target, block: int) -> list[int]:
    """``block``, twice, four times as many ranks, up to all of the target."""
    return [block << power for power in range(target.ranks.bit_length()) if block << power <= target.ranks]


def _plain(config: Config, kept: Mapping[str, Any], tp: int, pp: int, dp: int, zero: int) -> dict[str, Any]:
    """Settings of one cell, with all that ``Tuned.candidate`` wants."""
    values = {**dict.fromkeys(TUNED), **SAVING, **kept, "trainer.tp": tp, "trainer.pp": pp}
    unit = dp * values["trainer.micro_batch_size"]
    batch = -(-get(config, BATCH) // unit) * unit
    return {**values, "trainer.dp": dp, "trainer.zero": zero, "trainer.shard_group": None, BATCH: batch}


def sequence_lines(cells: list[LengthCell], config: Config) -> Iterator[str]:
    """The table: a row for each method and stage, a column for each number of devices."""
    ranks = sorted({cell.ranks for cell in cells})
    tokens = {(cell.method, cell.zero, cell.ranks): cell.tokens for cell in cells}
    rows = [["longest data.seq_length", "zero", *(f"{n} device{'s' * (n > 1)}" for n in ranks)]]
    for method, words in METHODS.items():
        for zero in sorted({cell.zero for cell in cells}):
            first = words if zero == min(cell.zero for cell in cells) else ""
            rows.append([first, str(zero), *(_shown(tokens[method, zero, n]) for n in ranks)])
    yield from text_table(rows, left=1)
    positions = config.model.max_position_embeddings
    if any(cell.tokens > positions for cell in cells):
        yield f"  {config.model.name} has {positions:,} positions; longer sequences need model.max_position_embeddings"


def _shown(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "-"


# What a search found, as text: a table of settings with their forecast and what was measured.


SHOWN = 12
_HEADS = ("tp", "pp", "vpp", "dp", "zero", "group", "micro", "recompute")


def table(found: SearchResult, config: Config) -> Iterator[str]:
    """The best, those that were tried, and why the others were left out."""
    tokens = config.trainer.global_batch_size * config.data.length
    tried = found.knowledge.tried
    failed = [each for each, out in tried.values() if out.status != DONE]
    head = ["", *_HEADS, "forecast s", "tokens/s", "memory"]
    head += ["measured s", "tokens/s", "memory", ""] if tried else []
    rows = [head]
    shown = [*enumerate(found.order[:SHOWN], 1), *((0, each) for each in failed)]
    for number, each in shown:
        row = [str(number) if number else "-", *_values(each)]
        row += [f"{each.seconds:.4g}", f"{tokens / each.seconds:,.0f}", gib(each.needs)]
        row += _measured(found, each, tokens) if tried else []
        rows.append(row)
    yield from text_table(rows, left=1)
    if len(found.order) > SHOWN:
        yield f"  and {len(found.order) - SHOWN:,} slower ones that fit"
    yield ""
    yield from reasons(found)


def _values(candidate: Candidate) -> list[str]:
    """The settings' values; a dash where nothing is chosen."""
    values = (candidate.settings[name] for name in TUNED)
    return ["-" if value is None else str(value) for value in values]


def _measured(found: SearchResult, candidate: Candidate, tokens: int) -> list[str]:
    trial = found.knowledge.tried.get(candidate.key)
    if trial is None:
        return ["", "", "", "not tried"]
    out = trial[1]
    seconds = [f"{out.seconds:.4g}", f"{tokens / out.seconds:,.0f}"] if out.seconds else ["", ""]
    memory = gib(found.target.measured(out.memory, candidate.ranks)) if out.memory else ""
    return [*seconds, memory, "" if out.status == DONE else out.status]


def reasons(found: SearchResult) -> Iterator[str]:
    """How many were looked at, and why the others are not in the table."""
    yield f"{found.space.looked_at:,} {plural(found.space.looked_at, 'set')} of settings looked at; left out:"
    dropped = dict(found.space.dropped.most_common())
    known = found.knowledge
    after = sum(each.key not in known.tried and not known.may_fit(each) for each in found.space.candidates)
    if after:
        dropped["does not fit, as trials show"] = after
    yield from (f"  {count:>7,}  {reason}" for reason, count in dropped.items())
    if known.tried:
        yield f"  forecasts of activations are multiplied by {known.memory_scale:.2f}, which follows from the trials"


def comment(found: SearchResult, config: Config, objective: str) -> list[str]:
    """What the experiment's file says about itself."""
    best = found.best
    assert best is not None, "something was found"
    tokens = config.trainer.global_batch_size * config.data.length
    target = str(found.target).removesuffix(", this machine")
    lines = [f"{config.model.name} on {target}: the best settings for {objective} on {time.strftime('%Y-%m-%d')}."]
    lines += ["", "Found by scripts/tune.py. Forecast: a step of " + _numbers(best.seconds, tokens, best.needs)]
    trial = found.knowledge.tried.get(best.key)
    if trial is not None and trial[1].seconds:
        memory = found.target.measured(trial[1].memory or 0, best.ranks)
        lines.append("Measured: a step of " + _numbers(trial[1].seconds, tokens, memory))
        lines.append(f"With {_versions()}, {len(found.knowledge.tried)} trials.")
    else:
        lines.append("Not tried.")
    return lines


def _numbers(seconds: float, tokens: int, memory: int) -> str:
    return f"{seconds:.4g} s, {tokens / seconds:,.0f} tokens/s, {gib(memory)}."


def _versions() -> str:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, torch {version('torch')}, megatron-core {version('megatron-core')}"
