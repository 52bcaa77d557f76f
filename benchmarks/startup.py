"""Measure the time from the command to the end of the first step, by phase, with cold and warm caches."""

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

from benchmarks.harness.arguments import add_program_arguments, build_entries, install_peers, report_excluded
from benchmarks.harness.environments import OURS, torch_version
from benchmarks.harness.runner import RoundSettings, StartupTime, program_name, progress, run_rounds
from benchmarks.harness.task import TrainingTask
from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table

PARTS = ("imports", "ranks started", "built", "first_step")
HEAD = ("program", "model", "cache", "to the first step", *PARTS, "graphs compiled")
COMMAND = "train.py, until it logs step 1"

EXPLANATION = """\
Time from the start of the program to the end of its first step. Phases are imports, start of the ranks (this project
only, with settings and plan), building of model and optimizer, and first step with compilation. Cold means an
empty compile cache. Values are medians; files were in the page cache.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_program_arguments(parser)
    parser.set_defaults(models=["llama_15m"], precision=["fp32"], layouts=["one", "tp2"])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each program (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/benchmarks/startup.md", help="path of the page")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the page; return 1 if a program was excluded."""
    cells, excluded = build_entries(args), dict[str, str]()
    pythons = dict(install_peers(args, excluded))
    starts: list[tuple[str, str, StartupTime]] = []
    entries = [entry for cell in cells.values() for entry in cell if entry[0].name in pythons]
    ours = sum(peer.name == OURS for peer, _ in entries)
    with progress((len(entries) + ours) * args.rounds) as advance:
        for peer, task in entries:
            for number in range(args.rounds):
                cold = number == 0 and task.mode == "compiled"
                settings = RoundSettings(0, 0, cold, lambda: 0.0, advance, excluded)  # only starts
                for result in run_rounds([(peer, pythons[peer.name], task)], settings):
                    starts += [(result.name, task.preset, start) for start in result.starts]
            if peer.name == OURS:
                for _ in range(args.rounds):
                    advance(f"train.py, {task.mode}")
                    starts.append((f"{program_name(peer.name, task)}, {COMMAND}", task.preset, _command(task)))
    text = "\n".join(_page(args, list(start_rows(starts)))) + "\n"
    write_atomically(args.output, text)
    sys.stdout.write(text)
    return report_excluded(excluded)


def _command(task: TrainingTask) -> StartupTime:
    """Time `python train.py` with the task's settings and warm caches until it logs the first step."""
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
            logged = (time.time() - start for line in program.stdout if line.startswith("step 1/"))
            seconds = next(logged, float("nan"))
            program.stdout.read()
    return StartupTime(seconds, {}, 0)


def start_rows(starts: Sequence[tuple[str, str, StartupTime]]) -> Iterator[list[str]]:
    """Yield rows of HEAD: medians over the starts of each program, cold and warm starts separately."""
    for key in dict.fromkeys((name, model, start.graphs > 0) for name, model, start in starts):
        group = [start for name, model, start in starts if (name, model, start.graphs > 0) == key]
        parts = [median(start.parts.get(part, 0.0) for start in group) for part in PARTS]
        yield [
            key[0],
            key[1],
            "cold" if key[2] else "warm",
            f"{median(start.seconds for start in group):.1f} s",
            *(f"{part:.1f} s" if part else "" for part in parts),
            str(max(start.graphs for start in group)),
        ]


def _page(args: argparse.Namespace, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from [f"# Startup time ({date.today()})", ""]
    yield f"Machine: {describe_machine(args.device)}. torch {torch_version()}, commit {commit()}."
    yield from ["", f"    {command_line()}", ""]
    yield from EXPLANATION.splitlines()
    yield from markdown_table(HEAD, rows)
