"""Command line of ``scripts/report.py``, and the page that train.py writes at the end of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.config import ConfigError, Problem, format_problems
from megatron_llama.config.stored_settings import NAME
from megatron_llama.optional_tools import REPORT_FILE
from megatron_llama.system.exit_status import EXIT_USER
from megatron_llama.system.files import write_atomically
from megatron_llama.system.programs import name_commands
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.wrapping import escape_controls
from megatron_llama.tools.compare.cli import labels
from megatron_llama.tools.report.page import render
from megatron_llama.tools.report.runs import read_run
from megatron_llama.train.metrics_file import METRICS_FILE, read_last_step

ABOUT = """Write a report of runs as one HTML page: curves over steps and tokens, starts and their ends, settings that
differ, data, plan, pipeline and samples. The page needs no network. It works for runs in progress."""
STATUS = "Exit status: 0 done, 2 wrong arguments or a run that cannot be read. See docs/guides/tools/report.md."


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/report.py`` with ``argv``; return the exit status."""
    arguments = parser().parse_args(argv)
    folders = [Path(path) for path in arguments.runs]
    output = arguments.output or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    try:
        size = write_report(folders, output)
    except ConfigError as error:
        sys.stderr.write(format_problems(error, "This report") + "\n")
        return EXIT_USER
    sys.stdout.write(f"wrote {escape_controls(str(output))} ({size / 1e6:.1f} MB)\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of scripts/report.py."""
    result = ArgumentParser(description=name_commands(ABOUT), epilog=STATUS)
    result.add_argument("runs", metavar="RUN", nargs="+", help="run folder; several runs are drawn in the same charts")
    text = f"the page (default: {REPORT_FILE} in the run folder; of several runs, in the current folder)"
    result.add_argument("--output", type=Path, metavar="FILE", help=text)
    return result


def write_report(folders: Sequence[Path], output: Path) -> int:
    """Write the page of runs, which only the user may read, as plan.txt; return its size in bytes.

    Raises ConfigError with all problems of the runs, and of the output.
    """
    problems = check_runs(folders)
    if output.is_dir():
        problems.append(Problem("--output", str(output), "is a folder", f"write --output {output / REPORT_FILE}"))
    runs = []
    for folder, name in zip(folders, labels([os.path.realpath(folder) for folder in folders]), strict=True):
        if any(problem.value == str(folder) for problem in problems):
            continue
        try:
            run = read_run(folder, name)
        except OSError as error:
            rule = f"its metrics.jsonl cannot be read: {error.strerror}"
            problems.append(Problem("RUN", str(folder), rule, "make the file readable, or omit the run"))
            continue
        if not run.metrics.last:
            rule = "; ".join(["its metrics.jsonl has no step", *run.metrics.notes])
            problems.append(Problem("RUN", str(folder), rule, "wait for the first step, or omit the run"))
        runs.append(run)
    if problems:
        raise ConfigError(problems)
    page = render(runs).encode(errors="backslashreplace")  # names may have lone surrogates
    try:
        write_atomically(output, page, private=True)
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError([Problem("--output", str(output), rule, "write --output FILE in another folder")]) from error
    return len(page)


def check_runs(folders: Sequence[Path]) -> list[Problem]:
    """Return the problems of paths that are no run folders, and of runs given twice."""
    problems, known = [], set[str]()
    for folder in folders:
        instead = "write the path of a run folder, such as runs/mine"
        rule = ""
        if not folder.exists():
            rule = "does not exist"
        elif not folder.is_dir():
            rule = "is not a folder"
        elif not (folder / METRICS_FILE).is_file():
            has_settings = (folder / NAME).is_file()
            rule = "has no step yet" if has_settings else "is not a run folder: it has no metrics.jsonl"
            instead = "wait for the first step" if has_settings else instead
        elif os.path.realpath(folder) in known:
            rule, instead = "is given twice", "give each run once"
        known.add(os.path.realpath(folder))
        if rule:
            problems.append(Problem("RUN", str(folder), rule, instead))
    return problems


def write_run_report(folder: Path) -> None:
    """Write the report.html of a run that ended; a run without a step has no report. Raises ConfigError and OSError."""
    if (folder / METRICS_FILE).is_file() and read_last_step(folder / METRICS_FILE) is not None:
        write_report([folder], folder / REPORT_FILE)
