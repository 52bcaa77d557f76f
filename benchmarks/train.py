"""Compare the training speed and memory of this project, transformers, litgpt and torchtitan."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, comparison
from benchmarks.harness.environments import Peer
from benchmarks.harness.runner import run_rounds
from benchmarks.harness.task import TrainingTask
from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.arch.flops import flops_per_token
from megatron_llama.devices import get_device
from megatron_llama.system.files import write_atomically
from megatron_llama.system.progress import ProgressBar
from megatron_llama.system.tables import markdown_table

EXPLANATION = """\
All programs train the same model shape on the same tokens: forward, backward, gradient clipping to the same norm,
AdamW on fp32 weights; with bf16, matmuls are in bf16. Each program starts alone and trains three steps. Then programs
run round-robin, one at a time, while the others sleep. The first step of a turn is not counted. Values are medians
over rounds; ratios are computed per round and given with minimum and maximum. GFLOP/s counts 6 FLOPs per parameter
and token, without the embedding, plus causal attention. The peak is the best 1024 x 1024 matmul in the same dtype and
with the same threads, before and after each turn. Resident is the process's peak resident memory in its steps; live
is the peak of the bytes of tensors. First step counts from the start of the program; cold means an empty compile
cache.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_program_arguments(parser)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of each program (default %(default)s)")
    add("--steps", type=int, default=2, help="timed steps per turn (default %(default)s)")
    add("--cold", action="store_true", help="empty the compile caches; time a start with cold and with warm caches")
    add("--install", action="store_true", help="only create the peers' environments")
    add("--output", type=Path, default=ROOT / "runs/benchmarks/train", help="path of the page, without .md and .json")


def run(args: argparse.Namespace) -> int:
    """Run the comparison, print and write the page; return 1 if a program was excluded."""
    entries, excluded = arguments.build_entries(args), dict[str, str]()
    pythons = dict(arguments.install_peers(args, excluded))
    if args.install:
        return arguments.report_excluded(excluded)
    cells, text = list[comparison.ComparisonCell](), ""
    for cell in _measure_cells(args, entries, pythons, excluded):
        cells.append(cell)
        text = _write(args, cells, excluded)  # after each cell, so that an interrupted run keeps its results
    sys.stdout.write(text)
    return arguments.report_excluded(excluded)


def _published(cell: comparison.ComparisonCell) -> dict[str, Any]:
    """Return the fields of a cell, without local paths and times."""
    fields = asdict(cell)
    for result in fields["results"]:
        for name in ("cache", "address", "started"):
            del result["task"][name]
    return fields


def _write(args: argparse.Namespace, cells: list[comparison.ComparisonCell], excluded: dict[str, str]) -> str:
    """Write the current results; return the page."""
    record = {
        "date": str(date.today()),
        "machine": describe_machine(args.device),
        "commit": commit(),
        "command": command_line(),
        "versions": {"python": sys.version.split()[0], "torch": version("torch")},
        "left_out": excluded,
    }
    text = "\n".join(page(record, cells)) + "\n"
    published = record | {"cells": [_published(cell) for cell in cells]}
    write_atomically(args.output.with_suffix(".json"), json.dumps(published, indent=1) + "\n")
    write_atomically(args.output.with_suffix(".md"), text)
    return text


def _measure_cells(
    args: argparse.Namespace,
    entries: dict[tuple[str, str], list[tuple[Peer, TrainingTask]]],
    pythons: dict[str, Path],
    excluded: dict[str, str],
) -> Iterator[comparison.ComparisonCell]:
    """Yield each cell when it is measured; show a progress bar on stderr."""
    import torch  # not for --help

    device = get_device(args.device)
    torch.set_num_threads(args.threads)
    cells = {cell: [entry for entry in task if entry[0].name in pythons] for cell, task in entries.items()}
    turns, done = sum(map(len, cells.values())) * (args.rounds + 2), itertools.count()
    with ProgressBar("train", "turns", turns) as bar:
        for (model, precision), able in cells.items():
            title, left = f"{model} {precision}", dict[str, str]()
            results = run_rounds(
                [(peer, pythons[peer.name], task) for peer, task in able],
                args.rounds,
                args.steps,
                peak=lambda precision=precision: device.peak_flops(precision).flops,  # type: ignore[misc]
                advance=lambda text, title=title: bar.show(next(done), f"{title}: {text}"),  # type: ignore[misc]
                excluded=left,
                cold=args.cold,
            )
            excluded.update({f"{title} {name}": reason for name, reason in left.items()})
            if results:
                shape = arguments.load_preset(model, args.layers).model
                flops = flops_per_token(shape, results[0].task.seq_length).causal
                yield comparison.ComparisonCell(flops, results)


def page(record: dict[str, Any], cells: list[comparison.ComparisonCell]) -> Iterator[str]:
    """Yield the lines of the Markdown page of a JSON record and its cells."""
    versions: dict[str, str] = dict(record["versions"])
    for result in (result for cell in cells for result in cell.results):
        versions.update(result.facts.versions)
    yield from [f"# Training compared with other programs ({record['date']})", ""]
    yield f"Machine: {record['machine']}. " + ", ".join(f"{name} {number}" for name, number in versions.items()) + "."
    yield from [f"Commit {record['commit']}.", "", f"    {record['command']}", ""]
    yield from EXPLANATION.splitlines()
    for cell in cells:
        yield from ["", f"## {cell.title}", ""]
        yield from markdown_table(comparison.HEAD, comparison.speed_rows(cell))
        peaks = [turn.peak_flops / 1e9 for result in cell.results for turn in result.turns]
        yield from ["", f"Matmul peak around the turns: {comparison.Spread.of(peaks)} GFLOP/s.", ""]
        yield from comparison.summary_lines(cell)
        if rows := list(comparison.layout_rows(cell)):
            yield from ["", *markdown_table(comparison.LAYOUT_HEAD, rows)]
    yield from ["", "## Programs", ""]
    yield from markdown_table(comparison.FACTS_HEAD, comparison.fact_rows(cells))
    if record["left_out"]:
        yield from ["", "## Excluded", ""]
        for name, reason in record["left_out"].items():
            yield from [f"* {name}: {reason}"]
