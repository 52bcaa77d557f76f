"""The table on the terminal, and the files of the folder: page, results and environment."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.progress import duration
from megatron_llama.system.tables import markdown_table, wrapped_table
from megatron_llama.system.wrapping import WIDTH
from megatron_llama.tools.prove_gpu import environment
from megatron_llama.tools.prove_gpu.checks import PartResult, Result, Status

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


def page(facts: dict[str, Any], results: Sequence[PartResult], command: str) -> Iterator[str]:
    """Yield the lines of the Markdown page."""
    cards = ", ".join(dict.fromkeys(card["name"] for card in facts["cards"])) or facts["processor"]
    yield from [f"# Checks on {facts['count']} x {cards} ({date.today()})", "", f"    {command}", ""]
    if facts["small"]:
        yield from ["Small shapes: speed and memory say nothing about the card.", ""]
    yield from [last_line(results), ""]
    rows = [(part.name, str(part.status), duration(part.seconds), _cell(part.detail)) for part in results]
    yield from markdown_table(HEAD, rows)
    yield from ["", "## Environment", ""]
    rows_of_facts = [(name, _cell(value)) for name, value in environment.lines(facts)]
    yield from markdown_table(("property", "value"), rows_of_facts)
    for part in results:
        yield from ["", f"## {part.name.capitalize()}", "", f"{part.title[:1].upper()}{part.title[1:]}.", ""]
        checks = [(c.name, str(c.status), duration(c.seconds), _cell(c.detail)) for c in part.results]
        yield from markdown_table(("check", "result", "time", "detail"), checks)
    yield from ["", "## This folder", "", CONTENTS]


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
    write_atomically(path, redact("\n".join(page(facts, results, command))) + "\n")
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
