"""Objectives of ``scripts/tune.py``: parse the command line, search, print the results and write an experiment."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from megatron_llama.config import Config, ConfigError, Problem
from megatron_llama.config.settings_table import check_limits, get
from megatron_llama.plan import batch_line
from megatron_llama.plan.defaults_and_notes import choose_defaults
from megatron_llama.system.files import write_atomically
from megatron_llama.system.progress import ProgressBar
from megatron_llama.system.tables import GIB, gib, plural, text_table
from megatron_llama.system.wrapping import WIDTH, wrap_lines
from megatron_llama.tools.cluster_settings import CLUSTER, ClusterConfig, TuneConfig, load_section, load_tuning
from megatron_llama.tools.common import NO_FILES, check_recipe, locked_setting
from megatron_llama.tools.plan.forecast_run import MOST_DEVICES, forecast_plan
from megatron_llama.tools.planned_run import read_config
from megatron_llama.tools.tune import longest_sequence
from megatron_llama.tools.tune import trial as trials
from megatron_llama.tools.tune.candidates import NOT_TRIED, TUNED, Candidate, CandidateSpace, Tuner, fixed_settings
from megatron_llama.tools.tune.search import SearchResult, enumerate_candidates, format_outcome, search
from megatron_llama.tools.tune.target import Target, find_target

STATED = ("data.seq_length", "trainer.global_batch_size", "trainer.precision", "device.name")
"""Settings that each experiment file states, also if they are defaults."""
MARK = "Written by scripts/tune.py"
LENGTH_MARGIN = 1.05
"""Factor of the corrected memory forecast, applied after a length at which all trials ran out of memory."""


class NothingWorks(Exception):
    """No settings fit or run; the message has the reasons."""


@dataclass(frozen=True)
class TuneRequest:
    """Parsed command line."""

    all_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    """Overrides of train.py, without tune and cluster."""
    config: Config
    tune: TuneConfig
    """Settings of the search, with name and folder."""
    target: Target
    output: Path | None
    """File of the best settings: the experiment of ``tune.name``, or --output; None: only print them."""


def read_request(overrides: Sequence[str]) -> TuneRequest:
    """Parse a command line. Raises ConfigError with all problems of the settings."""
    tune, rest, problems = load_tuning(overrides)
    cluster, rest, more = load_section(ClusterConfig, CLUSTER, rest)
    problems += more
    config = read_config(rest, [*NO_FILES, "dry_run=true"], problems)
    if config is not None:
        problems += [each for each in check_limits(config) if each not in problems]
    target, more = find_target(config or Config(), cluster, overrides)
    problems += more
    if tune.jobs and (target is None or target.is_local):
        rule = "needs cluster.device and cluster.nodes"
        problems.append(Problem("tune.jobs", True, rule, "add cluster.device=NAME cluster.nodes=N"))
    if is_named := tune.name is not None:
        problems += trials.check_name(str(tune.name), tune.overwrite)
    elif config is not None and target is not None:
        devices = f"{target.ranks}x{target.name}"
        tune = replace(tune, name=re.sub(r"[^\w.-]", "_", f"{config.model.name}_{tune.objective}_{devices}"))
    folder = Path(tune.dir or f"runs/tune-{tune.name}").absolute()
    if not next(path for path in (folder, *folder.parents) if path.exists()).is_dir():
        problems.append(Problem("tune.dir", str(folder), "is not a folder", "write another tune.dir=PATH"))
    if problems or config is None or target is None:
        raise ConfigError(problems)
    if config.device.name == "auto":
        config.device.name = target.device.kind
    config = choose_defaults(config)[0]
    output = trials.experiment_path(str(tune.name)) if is_named else None
    return TuneRequest(tuple(overrides), tuple(rest), config, replace(tune, dir=str(folder)), target, output)


def tune(overrides: Sequence[str], output: Path | None = None) -> None:
    """Run ``scripts/tune.py`` with a command line. ``output`` is the file to write.

    Raises:
        ConfigError: a setting or ``output`` is invalid.
        NothingWorks: nothing fits, or all trials failed.
    """
    request = read_request(overrides)
    if output is not None:
        check_recipe("--output", output, MARK)
        request = replace(request, output=output)
    if request.target.note is not None:
        _print_lines([request.target.note, ""])
    title = f"{request.config.model.name}: {request.tune.objective} on {request.target}"
    lines = [*wrap_lines(title, rest="  "), batch_line(request.config, request.target.title)]
    _print_lines([*lines, *wrap_lines(f"time forecast: {request.target.basis}", rest="  ")])
    if request.tune.trials and not (request.target.is_local or request.tune.jobs):
        request = replace(request, tune=replace(request.tune, trials=0))
        _print_lines(["plan only: another machine (tune.jobs=true runs trials as SLURM jobs)"])
    if request.tune.trials:
        _print_lines([f"trials are in {request.tune.dir}"])
    tuned = Tuner(request.config, fixed_settings(request.config, list(request.overrides)), request.target)
    if request.tune.objective == "max_seq_len":
        _max_seq_len(request, tuned)
    elif request.tune.objective == "min_devices":
        _min_devices(request, tuned)
    else:
        _show_and_write(request, search_or_fail(request, tuned, enumerate_candidates(tuned)))


def _max_seq_len(request: TuneRequest, tuned: Tuner) -> None:
    """Print the table of lengths, then search the fastest settings for the longest sequence.

    If all trials of a length run out of memory, the next length follows from the corrected forecast.
    """
    config, target = request.config, request.target
    with ProgressBar("forecast", "lengths") as bar:
        table = longest_sequence.sequence_table(config, tuned.fixed, target, bar.show)
    _print_lines(["", *longest_sequence.sequence_lines(table, config), ""])
    scale, positions = 1.0, config.model.max_position_embeddings
    for _ in range(max(1, request.tune.trials)):
        with ProgressBar("forecast", "layouts") as bar:
            tokens, more = longest_sequence.longest_in_any_layout(
                tuned, partial(Candidate.fits_on, target=target, scale=scale), bar.show
            )
        if not tokens:
            raise NothingWorks(f"Sequences of {longest_sequence.STEP} tokens do not fit on {target}.")
        capped = min(tokens, positions)
        limit = f"; model.max_position_embeddings limits them to {positions:,}" if tokens > positions else ""
        _print_lines(wrap_lines(f"longest sequence that fits in any layout: {tokens:,} tokens{limit}"))
        settings = {**longest_sequence.length_settings(config, capped), **more}
        longer = Tuner(config, tuned.fixed, target, settings, context=True)
        result = run_search(request, longer, enumerate_candidates(longer))
        if result.best is not None:
            _show_and_write(request, result)
            return
        scale = result.history.memory_scale * LENGTH_MARGIN
    raise NothingWorks("\n".join(failure_lines(result)))


def _min_devices(request: TuneRequest, tuned: Tuner) -> None:
    """Increase the number of devices until the run fits and meets the deadline, then search."""
    target, deadline = tuned.target, request.tune.days
    # This machine has no more devices, and the user may have limited them.
    bounded = target.is_local or any(text.startswith("cluster.nodes=") for text in request.all_overrides)
    counts: list[DeviceCount] = []
    with ProgressBar("forecast", "device counts") as bar:
        for number in device_counts(target, target.ranks if bounded else MOST_DEVICES):
            counts.append(count_devices(Tuner(tuned.config, tuned.fixed, target.subset(number))))
            bar.show(len(counts))
            if counts[-1].meets(deadline):
                break
    _print_lines(["", *device_count_lines(counts), ""])
    last = counts[-1]
    if not last.meets(deadline):
        in_time = f" within {deadline:g} days" if deadline else ""
        raise NothingWorks(f"The run does not fit{in_time} on up to {last.tuned.target.ranks:,} devices.")
    _show_and_write(request, search_or_fail(request, last.tuned, last.space))


def search_or_fail(request: TuneRequest, tuned: Tuner, space: CandidateSpace) -> SearchResult:
    """Run a search; raise NothingWorks if no candidate fits or all trials failed."""
    result = run_search(request, tuned, space)
    if result.best is None:
        raise NothingWorks("\n".join(failure_lines(result)))
    return result


def run_search(request: TuneRequest, tuned: Tuner, space: CandidateSpace) -> SearchResult:
    """Run a search with its trials in subfolders of ``tune.dir``."""
    folder, target, tune = Path(str(request.tune.dir)), tuned.target, request.tune

    def attempt(candidate: Candidate, best: float | None) -> trials.TrialOutcome:
        name = candidate.key.replace("trainer.", "").replace("=", "").replace(" ", "-")
        return trials.run_trial(candidate, request.overrides, tune, folder / name, best, target.nodes)

    if not tune.trials:
        return search(tuned, space, 0, None, attempt)
    inputs = {"words": list(request.overrides), "steps": tune.steps, "machine": f"{target.ranks} {target.name}"}
    with locked_setting("tune.dir", folder):
        return search(tuned, space, tune.trials, trials.Journal(folder, inputs), attempt)


def failure_lines(result: SearchResult) -> Iterable[str]:
    """Yield the reasons why no settings are left."""
    tried = result.history.tried
    yield f"All trials failed on {result.target}:" if tried else f"Nothing fits on {result.target}:"
    if not tried:
        yield from (f"  {count:,} {reason}" for reason, count in result.space.rejected.most_common())
        yield "objective=min_devices finds the number of devices."
    yield from (f"  {each.key}: {format_outcome(out)}" for each, out in tried.values())


def _show_and_write(request: TuneRequest, result: SearchResult) -> None:
    """Print the table and the best settings; write them as an experiment on request."""
    config = request.config
    if (length := result.ranking[0].settings.get(longest_sequence.LENGTH)) is not None:
        config = replace(config, data=replace(config.data, seq_length=length))
    _print_lines(["", *result_lines(result, config), ""])
    best, name = result.best, str(request.tune.name)
    assert best is not None, "checked by the caller"
    _print_lines(["best settings, to add to the command line of train.py:"])
    _print_lines(wrap_lines(best.key, "  "))
    if request.output is None:
        _print_lines(["", "--output FILE.yaml writes all settings as an experiment."])
        return
    comment = experiment_comment(result, config, request.tune.objective)
    stated = {name: get(config, name) for name in STATED}
    text = trials.experiment_text(request.overrides, {**stated, **best.settings}, comment, always=STATED)
    write_atomically(request.output, text)
    chosen = name if request.output == trials.experiment_path(name) else request.output
    _print_lines(["", f"wrote {request.output}", f"  python train.py experiment={chosen}"])


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


class DeviceCount(NamedTuple):
    """Candidates on a number of devices."""

    tuned: Tuner
    space: CandidateSpace
    days: float | None
    """Days of the run with the fastest settings, with failures and checkpoints; None if nothing fits."""

    def meets(self, deadline: float | None) -> bool:
        """Whether the run fits, and ends within ``deadline`` days."""
        return self.days is not None and (deadline is None or self.days <= deadline)


def count_devices(tuned: Tuner) -> DeviceCount:
    """Return the candidates on all devices of a tuner's target."""
    target, space = tuned.target, tuned.enumerate(memory_factor=1.0)
    if not space.candidates:
        return DeviceCount(tuned, space, None)
    best = space.candidates[0]
    plan, device = tuned.plan(best.settings, best.ranks), target.rank_device(best.ranks)
    return DeviceCount(tuned, space, forecast_plan(plan, target.cluster, device, best.ranks).days)


def device_counts(target: Target, most: int) -> Iterator[int]:
    """Yield the device counts to consider, up to ``most``: divisors of a node, then 2, 3, 4, 6, 8, 12, ... nodes."""
    yield from (n for n in range(1, target.per_node + 1) if target.per_node % n == 0 and n <= most)
    nodes = sorted({times << power for times in (1, 3) for power in range(MOST_DEVICES.bit_length())})
    yield from (n * target.per_node for n in nodes if 1 < n and n * target.per_node <= most)


def device_count_lines(counts: list[DeviceCount]) -> Iterator[str]:
    """Yield one row per device count, with its fastest settings."""
    rows = [["devices", "candidates", "s/step", "days", "memory", "tp", "cp", "pp", "dp", "zero"]]
    for each in counts:
        row = [f"{each.tuned.target.ranks:,}", f"{len(each.space.candidates):,}"]
        if each.days is not None:
            best = each.space.candidates[0]
            row += [f"{best.seconds:.4g}", f"{float(f'{each.days:.3g}'):,g}", gib(best.required_bytes)]
            row += [str(best.settings[f"trainer.{name}"]) for name in ("tp", "cp", "pp", "dp", "zero")]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    yield from text_table(rows, left=0)


# Report of a search.
SHOWN = 12  # number of candidates in the report
_HEADS = ("tp", "cp", "pp", "vpp", "dp", "zero", "group", "micro", "recompute")
_NUMBERS = ("s/step", "tokens/s", "GiB")


def result_lines(result: SearchResult, config: Config) -> Iterator[str]:
    """Yield the forecast of the best and the failed settings, their measurements, and the rejected settings."""
    tokens = config.trainer.global_batch_size * config.data.length
    tried = result.history.tried
    failed = [each for each, out in tried.values() if out.status != trials.DONE]
    forecast, measured = [["", *_HEADS, *_NUMBERS]], [["", *_NUMBERS, ""]]
    shown = [*enumerate(result.ranking[:SHOWN], 1), *((0, each) for each in failed)]
    for number, each in shown:
        label = str(number) if number else "-"
        values = ("-" if each.settings[name] is None else str(each.settings[name]) for name in TUNED)
        numbers = (f"{each.seconds:.4g}", f"{tokens / each.seconds:,.0f}", f"{each.required_bytes / GIB:.2f}")
        forecast.append([label, *values, *numbers])
        measured.append([label, *_measured(result, each, tokens)])
    yield "forecast"
    table = text_table(forecast, left=1)
    yield from table if len(table[0]) <= WIDTH else text_table(forecast, left=1, gap=1)
    if len(result.ranking) > SHOWN:
        yield f"  and {len(result.ranking) - SHOWN:,} slower candidates"
    if tried:
        yield from ("", "measured")
        yield from text_table(measured, left=1)
    yield ""
    yield from rejection_lines(result)


def _measured(result: SearchResult, candidate: Candidate, tokens: int) -> list[str]:
    trial = result.history.tried.get(candidate.key)
    if trial is None:
        return ["", "", "", "not tried"]
    out = trial[1]
    seconds = [f"{out.seconds:.4g}", f"{tokens / out.seconds:,.0f}"] if out.seconds else ["", ""]
    memory = f"{result.target.measured_bytes(out.memory, candidate.ranks) / GIB:.2f}" if out.memory else ""
    return [*seconds, memory, "" if out.status == trials.DONE else out.status]


def rejection_lines(result: SearchResult) -> Iterator[str]:
    """Yield the number of settings considered, and of rejected ones by reason."""
    rejected = dict(result.space.rejected.most_common())
    history = result.history
    after = sum(each.key not in history.tried and not history.can_fit(each) for each in result.space.candidates)
    if after:
        rejected["does not fit, by the corrected forecast"] = after
    end = "; rejected:" if rejected else ", none rejected"
    yield f"{result.space.total:,} {plural(result.space.total, 'set')} of settings considered{end}"
    yield from (f"  {count:>7,}  {reason}" for reason, count in rejected.items())
    yield from wrap_lines(f"not tried: {NOT_TRIED}", "  ", "    ")
    if history.tried:
        yield f"  correction of the activation forecast from trials: x {history.memory_scale:.2f}"


def experiment_comment(result: SearchResult, config: Config, objective: str) -> list[str]:
    """Return the comment at the top of the experiment file."""
    best = result.best
    assert best is not None, "checked by the caller"
    tokens = config.trainer.global_batch_size * config.data.length
    target = str(result.target).removesuffix(", this machine")
    lines = [f"{config.model.name} on {target}: best settings for {objective}, {time.strftime('%Y-%m-%d')}."]
    lines.append(batch_line(config, result.target.title) + ".")
    forecast = _format_numbers(best.seconds, tokens, best.required_bytes)
    lines += ["", f"{MARK}. Forecast: a step of {forecast}"]
    trial = result.history.tried.get(best.key)
    if trial is not None and trial[1].seconds:
        memory = result.target.measured_bytes(trial[1].memory or 0, best.ranks)
        lines.append("Measured: a step of " + _format_numbers(trial[1].seconds, tokens, memory))
        versions = f"torch {version('torch')}, megatron-core {version('megatron-core')}"
        lines.append(f"With Python {platform.python_version()}, {versions}, {len(result.history.tried)} trials.")
    else:
        lines.append("Not measured.")
    return [part for line in lines for part in wrap_lines(line, width=WIDTH - 2) or [""]]


def _format_numbers(seconds: float, tokens: int, memory: int) -> str:
    return f"{seconds:.4g} s, {tokens / seconds:,.0f} tokens/s, {gib(memory)}."
