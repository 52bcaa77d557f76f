"""Starting: from the command to the end of the first step, and where that time goes, with cold and warm caches."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.harness.arguments import describe_contestants, entries_of, installed, tell_left_out
from benchmarks.harness.environments import OURS, torch_version
from benchmarks.harness.runner import Course, Start, compete, contestant_name, progress
from benchmarks.harness.task import Task
from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table

PARTS = ("imports", "ranks started", "built", "first_step")
HEAD = ("contestant", "model", "cache", "to the first step", *PARTS, "graphs compiled")
COMMAND = "train.py, to the line of step 1"

EXPLANATION = """\
From the start of the program to the end of its first step, and the parts of it: imports; of this project the settings,
the plan and the start of the ranks; building model and optimizer; the first step, compiling included. Cold means that
graphs had to be compiled. Medians; files were in the page cache.

"""


def describe(parser: argparse.ArgumentParser) -> None:
    """The sub-command's arguments."""
    describe_contestants(parser)
    parser.set_defaults(models=["llama_15m"], precision=["fp32"], layouts=["one", "tp2"])
    parser.add_argument("--rounds", type=int, default=3, help="starts with a warm cache (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/startup.md")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write; status 1 if a contestant was left out."""
    cells, left_out = entries_of(args), dict[str, str]()
    pythons = dict(installed(args, left_out))
    starts: list[tuple[str, str, Start]] = []
    entries = [entry for cell in cells.values() for entry in cell if entry[0].name in pythons]
    ours = sum(peer.name == OURS for peer, _ in entries)
    with progress((len(entries) + ours) * args.rounds) as advance:
        for peer, task in entries:
            for number in range(args.rounds):
                cold = number == 0 and task.mode == "compiled"
                course = Course(0, 0, cold, lambda: 0.0, advance, left_out)  # no turns, only starts
                for result in compete([(peer, pythons[peer.name], task)], course):
                    starts += [(result.name, task.preset, start) for start in result.starts]
            if peer.name == OURS:
                for _ in range(args.rounds):
                    advance(f"train.py, {task.mode}")
                    starts.append((f"{contestant_name(peer.name, task)}, {COMMAND}", task.preset, _command(task)))
    text = "\n".join(_page(args, list(start_rows(starts)))) + "\n"
    write_atomically(args.output, text)
    sys.stdout.write(text)
    return tell_left_out(left_out)


def _command(task: Task) -> Start:
    """`python train.py` with the task's settings, from its start to the line of its first step, with warm caches."""
    from benchmarks.peers.train_ours import overrides

    with tempfile.TemporaryDirectory() as folder:
        settings = [*overrides(task, f"{folder}/run"), "trainer.steps=2", "logging.every_steps=1"]
        command = [sys.executable, "-u", str(ROOT / "train.py"), *settings, "checkpoint.save_last=false"]
        start = time.time()
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": task.cache}  # torch may have set this process's
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as program:
            assert program.stdout is not None
            found = next((time.time() - start for line in program.stdout if line.startswith("step 1/")), float("nan"))
            program.stdout.read()
    return Start(found, {}, 0)


def start_rows(starts: Sequence[tuple[str, str, Start]]) -> Iterator[list[str]]:
    """Rows of HEAD: medians of the starts of one contestant, those that compiled graphs apart from the others."""
    for key in dict.fromkeys((name, model, start.graphs > 0) for name, model, start in starts):
        alike = [start for name, model, start in starts if (name, model, start.graphs > 0) == key]
        parts = [median(start.parts.get(part, 0.0) for start in alike) for part in PARTS]
        yield [
            key[0],
            key[1],
            "cold" if key[2] else "warm",
            f"{median(start.seconds for start in alike):.1f} s",
            *(f"{part:.1f} s" if part else "" for part in parts),
            str(max(start.graphs for start in alike)),
        ]


def _page(args: argparse.Namespace, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from [f"# Starting ({date.today()})", ""]
    yield f"Machine: {describe_machine(args.device)}. torch {torch_version()}, commit {commit()}."
    yield from ["", f"    {command_line()}", ""]
    yield from EXPLANATION.splitlines()
    yield from markdown_table(HEAD, rows)
