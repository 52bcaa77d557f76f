"""Command line of ``scripts/prove_gpu.py``: run all parts, print the table, write the page and the folder."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_llama.config.settings import DEVICES
from megatron_llama.system.errors import UserError
from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.programs import name_commands
from megatron_llama.system.progress import duration
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.tables import gib, markdown_table, wrapped_table
from megatron_llama.system.ulimits import usable_cores
from megatron_llama.system.wrapping import WIDTH, fill, wrap, wrap_lines
from megatron_llama.tools.common import read_help, show_line
from megatron_llama.tools.prove_gpu.run_checks import TABLE, Part, PartResult, Result, Status, read_rows, run_parts
from megatron_llama.tools.prove_gpu.session import CheckFailed, Clock, Session

MINUTES = 10.0
MOST_MINUTES = 24 * 60.0
MOST_JOBS = 4
"""Default of --jobs on many cores."""
RESULTS = Path("runs/prove_gpu")
SEND = "Send back the folder. It has no weights and no data; private paths, user and machine names are replaced."


def parts(small: bool = False) -> list[Part]:
    """Return all parts of ``plan.toml`` in their order."""
    plan = []
    for name, fields in TABLE["parts"].items():
        module, _, function = fields["check"].partition(".")
        check = getattr(import_module(f"{__package__}.{module}"), function)
        rows = read_rows(f"small_{name}" if small and f"small_{name}" in TABLE["rows"] else name)
        plan.append(Part(name, TABLE["titles"][name], **{**fields, "rows": rows, "check": check}))
    return plan


def main(argv: Sequence[str]) -> int:
    """Run ``scripts/prove_gpu.py`` with ``argv``; return the exit status."""
    lines = [line for name, title in TABLE["titles"].items() for line in wrap_lines(title, f"  {name:<13}")]
    usage = read_help("prove_gpu").replace("{parts}", "\n".join(lines))
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(usage)
        return 0
    arguments, names = _read_arguments(argv, usage)
    with tempfile.TemporaryDirectory(prefix="prove-gpu-") as work:
        return _run(arguments, names, Path(work), argv)


def _read_arguments(argv: Sequence[str], usage: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments and the names of the requested parts. Raises UserError."""
    parser = ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES)
    add("--parts")
    add("--jobs", type=int, default=max(1, min(MOST_JOBS, len(usable_cores()) // 4)))
    add("--output", type=Path)
    add("--resume", action="store_true")
    add("--archive", type=Path)
    add("--device", default="auto")
    add("--small", action="store_true")
    arguments, unknown = parser.parse_known_args(argv)
    problems = [f"there is no argument {word}: see --help" for word in unknown]
    if not 0 < arguments.minutes <= MOST_MINUTES:
        rule = f"must be above 0 and at most {MOST_MINUTES:g}"
        problems.append(f"--minutes {arguments.minutes:g} {rule}: write --minutes 10")
    if arguments.jobs < 1:
        problems.append(f"--jobs {arguments.jobs} must be at least 1")
    if arguments.device not in DEVICES:
        problems.append(f"--device {arguments.device} is unknown: write one of {', '.join(DEVICES)}")
    names = list(TABLE["parts"])
    requested = names if arguments.parts is None else ["environment", *arguments.parts.split(",")]
    unknown = [name for name in requested if name not in names]
    problems += [f"--parts {name} is unknown: write some of {','.join(names)}" for name in unknown]
    output, archive = arguments.output, arguments.archive
    if arguments.resume and output is None:
        problems.append("--resume needs --output FOLDER, the folder of the stopped command")
    elif output is not None and output.exists() and not (output.is_dir() and arguments.resume):
        if not output.is_dir() or any(output.iterdir()):
            problems.append(f"--output {output} exists and is not empty: name a new folder, or add --resume")
    if archive is not None and not archive.absolute().parent.is_dir():
        problems.append(f"--archive {archive}: there is no folder {archive.parent}")
    if problems:
        raise UserError("\n".join(problems))
    return arguments, requested


def _run(arguments: argparse.Namespace, names: Sequence[str], work: Path, argv: Sequence[str]) -> int:
    """Run the parts in the folder ``work``, printing a row for each; write the results. Return the exit status."""
    folder = arguments.output or RESULTS / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    clock = Clock(60 * arguments.minutes)
    session = Session(folder.absolute(), work, clock, arguments.device, small=arguments.small, jobs=arguments.jobs)
    show_line("examining the environment")
    try:
        facts = session.module("environment", "environment", arguments.device)
    except CheckFailed as failure:
        raise UserError(f"torch does not work here: {failure}") from None
    if "missing" in facts:
        if not arguments.resume:
            shutil.rmtree(folder)  # only the log of the environment
        raise UserError(f"no GPU to check: {facts['missing']}")
    session.environment, session.device = facts, facts["device"]
    session.small = session.small or not session.is_accelerator
    facts["small"], command = session.small, f"{name_commands('python scripts/prove_gpu.py')} {shlex.join(argv)}"

    def show(text: str) -> None:
        show_line(f"{text}, at most {duration(clock.left)} left")

    def save(results: Sequence[PartResult]) -> Path:
        path = write_files(folder, facts, results, command, session.redact)
        if arguments.archive is not None:
            pack(folder, arguments.archive)
        return path

    def print_row(part: PartResult | None) -> None:
        show_line("")
        sys.stdout.write("\n".join(table_lines(part)) + "\n")
        sys.stdout.flush()

    selected = [part for part in parts(session.small) if part.name in names]
    results: list[PartResult] = []
    status = 0
    print_row(None)
    try:
        for result in run_parts(selected, session, show, save, read_results(folder, session.small)):
            results.append(result)
            print_row(result)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    path = save(results)
    sys.stdout.write(f"\n{wrap(last_line(results))}\n\n  page    {path}\n  folder  {folder}\n\n")
    sys.stdout.write(fill("", SEND) + "\n")
    sys.stdout.flush()
    return status or (EXIT_FAILED if any(part.status == Status.FAILED for part in results) else 0)


# The table on the terminal, and the files of the folder: page, results and environment.
HEAD = ("part", "result", "time", "detail")
WIDTHS = (12, 8, 6)
"""Least characters of the columns before the last one, so that rows printed one by one are aligned."""
CONTENTS = """\
- `results.json`: the results of all checks with their numbers
- `environment.json`: versions, devices, driver, compiler, variables of torch and of the devices
- `PART*/log.txt`: commands and output of each process
- `PART*/config.yaml, plan.txt, metrics.jsonl, compile.json`: settings, plan, and metrics of each run
- `PART*/profile/`: a trace for chrome://tracing or Perfetto, and times and memory by module

Paths of the home folder, the checkout, Python and temporary files, and the names of the user and the machine, are \
replaced in all texts. The folder has no weights, no data, and no variables named KEY, TOKEN or PASS."""


def table_lines(part: PartResult | None) -> list[str]:
    """Return the lines of a row of the table in at most 79 columns; None for the head."""
    row = HEAD if part is None else (part.name, part.status, duration(part.seconds), part.detail)
    cells = [cell.ljust(width) for cell, width in zip(row[:-1], WIDTHS, strict=True)]
    return wrapped_table([(*cells, row[-1])], WIDTH)


def last_line(results: Sequence[PartResult]) -> str:
    """Return the summary: the failed parts and the parts that did not run, or not with all checks."""
    by_status = {status: [part.name for part in results if part.status == status] for status in Status}
    sentences = [f"{len(by_status[Status.PASSED])} of {len(results)} parts passed."]
    if by_status[Status.FAILED]:
        sentences.append(f"Failed: {', '.join(by_status[Status.FAILED])}.")
    if by_status[Status.NOT_RUN]:
        sentences.append(f"Not run: {', '.join(by_status[Status.NOT_RUN])}.")
    if partly := [part.name for part in results if part.status != Status.NOT_RUN and part.named(Status.NOT_RUN)]:
        sentences.append(f"Run in part: {', '.join(partly)}.")
    return " ".join(sentences)


def page_lines(facts: dict[str, Any], results: Sequence[PartResult], command: str) -> Iterator[str]:
    """Yield the lines of the Markdown page."""
    cards = ", ".join(dict.fromkeys(card["name"] for card in facts["cards"])) or facts["processor"]
    yield from [f"# Checks on {facts['count']} x {cards} ({date.today()})", "", f"    {command}", ""]
    if facts["small"]:
        yield from ["Small shapes: speed and memory say nothing about the card.", ""]
    yield from [last_line(results), ""]
    rows = [(part.name, str(part.status), duration(part.seconds), _cell(part.detail)) for part in results]
    yield from markdown_table(HEAD, rows)
    yield from ["", "## Environment", ""]
    rows_of_facts = [(name, _cell(value)) for name, value in _fact_rows(facts)]
    yield from markdown_table(("property", "value"), rows_of_facts)
    for part in results:
        yield from ["", f"## {part.name.capitalize()}", "", f"{part.title[:1].upper()}{part.title[1:]}.", ""]
        checks = [(c.name, str(c.status), duration(c.seconds), _cell(c.detail)) for c in part.results]
        yield from markdown_table(("check", "result", "time", "detail"), checks)
    yield from ["", "## This folder", "", CONTENTS]


def _fact_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows (property, value) for the page."""
    rows = [(name, str(facts[name])) for name in ("device", "count", "python", "platform", "processor", "cores")]
    rows += [("memory", gib(facts["memory_bytes"])), ("commit", facts["commit"])]
    for number, card in enumerate(facts["cards"]):
        rows.append((f"card {number}", f"{card['name']}, {gib(card['memory_bytes'])}, {card['capability']}"))
    for title in ("hardware", "libraries", "packages", "variables"):
        rows += [(name, value) for name, value in facts[title].items()]
    return [*rows, ("compiler", facts["compiler"] or "not installed")]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def write_files(folder: Path, facts: dict[str, Any], results: Sequence[PartResult], command: str, redact: Any) -> Path:
    """Write page, results and environment into the folder; return the path of the page."""
    parts = [
        {"name": part.name, "status": part.status, "seconds": part.seconds, "checks": [*map(asdict, part.results)]}
        for part in results
    ]
    record = {"date": str(date.today()), "command": command, "commit": facts["commit"], "small": facts["small"]}
    record["parts"] = parts
    write_atomically(folder / "environment.json", redact(json.dumps(facts, indent=1)) + "\n")
    write_atomically(folder / "results.json", redact(json.dumps(record, indent=1)) + "\n")
    path = folder / f"gpu-{date.today()}.md"
    write_atomically(path, redact("\n".join(page_lines(facts, results, command))) + "\n")
    return path


def read_results(folder: Path, small: bool) -> dict[tuple[str, str], Result]:
    """Return the passed and failed checks of ``write_files``. Raises UserError if the shapes were others."""
    path = folder / "results.json"
    if not path.exists():
        return {}
    record = read_json(path)
    if record["small"] != small:
        raise UserError(f"{path} has results of {'small' if record['small'] else 'full'} shapes: name another folder")
    checks = [(part["name"], Result(**check)) for part in record["parts"] for check in part["checks"]]
    return {(part, check.name): check for part, check in checks if check.status != Status.NOT_RUN}


def pack(folder: Path, archive: Path) -> None:
    """Write the folder as a .tar.gz file."""
    draft = archive.with_name(f".{archive.name}.draft")
    with tarfile.open(draft, "w:gz", compresslevel=1) as file:
        file.add(folder, folder.name)
    draft.replace(archive)
