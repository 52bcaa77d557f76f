"""Compare training curves of run folders, TensorBoard folders, metrics.jsonl and trainer_state.json files of this
project, NeMo, Megatron-LM, Lightning and the Hugging Face Trainer. Prints a table and a verdict; --out draws the
curves and their gap. See docs/guides/tools/compare.md."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.wrapping import escape_controls
from megatron_llama.tools.compare.logs import FILES_OF_A_RUN, ROLES, read_run
from megatron_llama.tools.compare.report import as_html, as_text, draw
from megatron_llama.tools.compare.verdict import Comparison, compare
from megatron_llama.tools.figures import as_png

STATUS = (
    "Exit status: 0 the curves agree, 1 they differ, 2 too short to tell (fewer than 16 common points, or too few "
    "samples in common), wrong arguments or an unreadable run."
)


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/compare.py`` with ``argv``; return the exit status."""
    arguments = parser().parse_args(argv)
    try:
        comparison = compare_runs(arguments)
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This comparison") + "\n")
        return EXIT_USER
    sys.stdout.write(as_text(comparison))
    if arguments.out is None:
        sys.stdout.write("\n--out PREFIX writes the curves to PREFIX.png and PREFIX.html\n")
    else:
        try:
            _write_report(comparison, arguments.out)
        except OSError as error:
            sys.stderr.write(f"cannot write the report: {error}\n")
            return EXIT_USER
    if comparison.agree:
        return 0
    return EXIT_FAILED if comparison.differ else EXIT_USER


def _write_report(comparison: Comparison, prefix: Path) -> None:
    """Write the picture and the page, and print their paths."""
    picture, page = Path(f"{prefix}.png"), Path(f"{prefix}.html")
    write_atomically(picture, as_png(draw(comparison)))
    write_atomically(page, as_html(comparison))
    sys.stdout.write(f"\nwrote {picture}\nwrote {page}\n")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of scripts/compare.py."""
    result = ArgumentParser(description=__doc__, epilog=STATUS)
    add = result.add_argument
    add("reference", metavar="RUN_A", help="reference run")
    add("others", metavar="RUN_B", nargs="+", help="runs to compare with RUN_A")
    text = "largest relative gap of the smoothed curves (default 0.01)"
    add("--tolerance", type=float, default=0.01, help=text)
    text = "further runs of RUN_A with other seeds: the mean of all is the reference, and their spread is allowed"
    add("--seeds", nargs="+", default=[], metavar="RUN", help=text)
    text = "smoothing window in samples (default: 5%% of the compared samples, at least 8 steps)"
    add("--window", type=float, help=text)
    text = "minimum share of RUN_A's samples that all runs must have to agree (default 0.9)"
    add("--min-overlap", type=float, default=0.9, metavar="SHARE", help=text)
    text = "name of a series without a built-in name: loss=NAME, samples=NAME, step_time=NAME"
    add("--tag", action="append", default=[], metavar="ROLE=NAME", help=text)
    text = "global batch size of runs that log steps but not samples"
    add("--samples-per-step", action="append", default=[], metavar="[RUN=]N", help=text)
    text = "write the curves to PREFIX.png and PREFIX.html (default: no file)"
    add("--out", type=Path, metavar="PREFIX", help=text)
    return result


def compare_runs(arguments: argparse.Namespace) -> Comparison:
    """Read and compare the runs. Raises ConfigError with all errors in the arguments."""
    compared = [arguments.reference, *arguments.others]
    paths = [*compared, *arguments.seeds]
    problems = list(_wrong_numbers(arguments))
    tags: dict[str, list[str]] = {}
    for text in arguments.tag:
        role, _, name = text.partition("=")
        if role in ROLES and name:
            tags.setdefault(role, []).append(name)
        else:
            rule = f"must be ROLE=NAME, with a role of {', '.join(ROLES)}"
            problems.append(Problem("--tag", text, rule, "write --tag loss=NAME"))
    sizes = _samples_per_step(arguments.samples_per_step, paths, problems)
    runs = []
    for path, name in zip(paths, labels(paths), strict=True):
        try:
            runs.append(read_run(path, name, tags, sizes.get(path, sizes.get(""))))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    (reference, *others), seeds = runs[: len(compared)], runs[len(compared) :]
    return compare(reference, others, arguments.tolerance, seeds, arguments.window, arguments.min_overlap)


def labels(paths: Sequence[str]) -> list[str]:
    """Return a short unique name for each path: its last parts."""
    paths = [escape_controls(path) for path in paths]
    parts = [tuple(part for part in PurePath(path).parts if part not in FILES_OF_A_RUN) or (path,) for path in paths]
    names = [path_parts[-1] for path_parts in parts]
    for depth in range(2, 1 + max(map(len, parts))):
        names = [
            str(PurePath(*path_parts[-depth:])) if names.count(name) > 1 else name
            for path_parts, name in zip(parts, names, strict=True)
        ]
    return [
        f"{name} ({names[:index].count(name) + 1})" if name in names[:index] else name
        for index, name in enumerate(names)
    ]


def _wrong_numbers(arguments: argparse.Namespace) -> Iterator[Problem]:
    if not (math.isfinite(arguments.tolerance) and arguments.tolerance >= 0):
        yield Problem("--tolerance", arguments.tolerance, "must be at least 0", "write --tolerance 0.01")
    if arguments.window is not None and not arguments.window > 0:
        yield Problem("--window", arguments.window, "must be above 0, in samples", "omit --window")
    if not 0 <= arguments.min_overlap <= 1:
        yield Problem("--min-overlap", arguments.min_overlap, "must be a share from 0 to 1", "write --min-overlap 0.9")
    known = {Path(arguments.reference).resolve()}
    for field, paths in (("run", arguments.others), ("--seeds", arguments.seeds)):
        for path in paths:
            if (where := Path(path).resolve()) in known:
                yield Problem(field, path, "is given twice", "give each run once")
            known.add(where)


def _samples_per_step(texts: Sequence[str], paths: Sequence[str], problems: list[Problem]) -> dict[str, float]:
    """Parse PATH=N, or N with the path "", to {path: samples}."""
    sizes: dict[str, float] = {}
    for text in texts:
        path, _, number = text.rpartition("=")
        try:
            sizes[path] = float(number)
        except ValueError:
            sizes[path] = math.nan
        if not 0 < sizes[path] < math.inf or (path and path not in paths):
            rule = "must be N, or RUN=N with RUN as given on the command line"
            problems.append(Problem("--samples-per-step", text, rule, "write the global batch size, such as 256"))
    return sizes
