"""Training beside its peers: this project, transformers and litgpt, eager and compiled, in turn on the same work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import config_of, describe_contestants, entries_of, installed, tell_left_out
from benchmarks.harness.environments import Peer, torch_version
from benchmarks.harness.runner import Course, compete, progress
from benchmarks.harness.standings import (
    FACTS_HEAD,
    HEAD,
    LAYOUT_HEAD,
    Cell,
    Spread,
    fact_rows,
    layout_rows,
    speed_rows,
    verdict_lines,
)
from benchmarks.harness.task import Task
from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.arch.flops import flops_per_token
from megatron_llama.devices import Device, get_device
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table

EXPLANATION = """\
Every contestant trains the same shape on the same tokens: forward, backward, gradients clipped to the same norm,
AdamW on fp32 weights; with bf16 the matrix products are in bf16. All are started alone, train three steps, then take
turns, each with the machine to itself while the others sleep; a turn's first step, after its sleep, is not counted.
Figures are medians over the rounds; a ratio is taken in each round, and given with its least and most. GFLOP/s
counts 6 per parameter and token without the embedding table, plus causal attention. The peak is this machine's best
product of two 1024 x 1024 matrices in the same dtype and threads, before and after each turn. Resident is the most
memory of the process in its steps, live the most bytes of tensors at a time. First step counts from the start of the
program; cold means that graphs had to be compiled.
"""


def describe(parser: argparse.ArgumentParser) -> None:
    """The sub-command's arguments."""
    describe_contestants(parser)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of each contestant (default %(default)s)")
    add("--steps", type=int, default=2, help="steps of a turn (default %(default)s)")
    add("--cold", action="store_true", help="empty the compilers' caches first, and time a start without and with them")
    add("--install", action="store_true", help="only make the peers' environments")
    add("--output", type=Path, default=ROOT / "docs/results/train", help="without .md and .json")


def run(args: argparse.Namespace) -> int:
    """Compete, print and write; status 1 if a contestant was left out."""
    entries, left_out = entries_of(args), dict[str, str]()
    pythons = dict(installed(args, left_out))
    if args.install:
        return tell_left_out(left_out)
    cells = []
    text = ""
    for cell in _compete(args, entries, pythons, left_out):
        cells.append(asdict(cell))
        text = _write(args, cells, left_out)  # after each cell: what is measured stays when the rest is interrupted
    sys.stdout.write(text)
    return tell_left_out(left_out)


def _without_places(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell without the paths of this machine."""

    def task(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in ("cache", "address", "started")}

    return cell | {"results": [result | {"task": task(result["task"])} for result in cell["results"]]}


def _write(args: argparse.Namespace, cells: list[dict[str, Any]], left_out: dict[str, str]) -> str:
    """Writes the results so far; returns the page."""
    record = {
        "date": str(date.today()),
        "machine": describe_machine(args.device),
        "commit": commit(),
        "command": command_line(),
        "versions": {"python": sys.version.split()[0], "torch": torch_version()},
        "left_out": left_out,
        "cells": cells,
    }
    text = "\n".join(page(record)) + "\n"
    published = record | {"cells": [_without_places(cell) for cell in cells]}
    write_atomically(args.output.with_suffix(".json"), json.dumps(published, indent=1) + "\n")
    write_atomically(args.output.with_suffix(".md"), text)
    return text


def _compete(
    args: argparse.Namespace,
    entries: dict[tuple[str, str], list[tuple[Peer, Task]]],
    pythons: dict[str, Path],
    left_out: dict[str, str],
) -> Iterator[Cell]:
    """The cells, each as soon as it is measured, with a bar on stderr."""
    import torch  # not for --help

    device = get_device(args.device)
    torch.set_num_threads(args.threads)
    cells = {cell: [entry for entry in asked if entry[0].name in pythons] for cell, asked in entries.items()}
    contestants = sum(map(len, cells.values()))
    with progress(contestants * (args.rounds + 2)) as advance:
        for (model, precision), able in cells.items():
            title, left = f"{model} {precision}", dict[str, str]()
            course = Course(
                rounds=args.rounds,
                steps=args.steps,
                cold=args.cold,
                peak=partial(_peak, device, precision),
                advance=lambda text, title=title: advance(f"{title}: {text}"),  # type: ignore[misc]
                left_out=left,
            )
            results = compete([(peer, pythons[peer.name], task) for peer, task in able], course)
            left_out.update({f"{title} {name}": reason for name, reason in left.items()})
            if results:
                length = results[0].task.seq_length
                yield Cell(flops_per_token(config_of(model, args.layers).model, length).causal, results)


def _peak(device: Device, precision: str) -> float:
    return device.peak_flops(precision).flops


def page(record: dict[str, Any]) -> Iterator[str]:
    """The result as a page in Markdown, from what the JSON file holds."""
    versions: dict[str, str] = dict(record["versions"])
    cells = [Cell.from_json(cell) for cell in record["cells"]]
    for result in (result for cell in cells for result in cell.results):
        versions.update(result.facts.versions)
    yield from [f"# Training beside its peers ({record['date']})", ""]
    yield f"Machine: {record['machine']}. " + ", ".join(f"{name} {number}" for name, number in versions.items()) + "."
    yield from [f"Commit {record['commit']}.", "", f"    {record['command']}", ""]
    yield from EXPLANATION.splitlines()
    for cell in cells:
        yield from ["", f"## {cell.title}", ""]
        yield from markdown_table(HEAD, speed_rows(cell))
        peaks = [turn.peak_flops / 1e9 for result in cell.results for turn in result.turns]
        yield from ["", f"Matrix peak around the turns: {Spread.of(peaks)} GFLOP/s. ", *verdict_lines(cell)]
        if rows := list(layout_rows(cell)):
            yield from ["", *markdown_table(LAYOUT_HEAD, rows)]
    yield from ["", "## What each contestant is", ""]
    yield from markdown_table(FACTS_HEAD, fact_rows(cells))
    if record["left_out"]:
        yield from ["", "## Left out", ""]
        for name, reason in record["left_out"].items():
            yield from [f"* {name}: {reason}"]
