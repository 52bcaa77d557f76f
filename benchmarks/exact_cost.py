"""Step time and memory with and without trainer.exact: tp 2, dp 2, 4 micro batches.

    python -m benchmarks exact_cost

Runs alternate. A rank's processor time, which other programs affect less, is compared as well as the step time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import ROOT, command_line, commit, describe_machine
from megatron_llama.system.tables import markdown_table

RANKS, DEVICE = 4, "cpu"
RECIPE = (
    f"data=mock device={DEVICE} trainer.compile=false trainer.tp=2 trainer.dp=2 trainer.micro_batch_size=1 "
    "trainer.global_batch_size=8 logging.tensorboard=false logging.sample_prompts=[] checkpoint.every_steps=null "
    "checkpoint.every_minutes=null checkpoint.save_last=false"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="llama_15m", help="model (default llama_15m)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="sequence lengths, tokens")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run; two are not counted (default 6)")
    parser.add_argument("--rounds", type=int, default=3, help="runs with and without exact mode (default 3)")


def run(args: argparse.Namespace) -> int:
    """Train in turn, and print the page."""
    rows = []
    for length in args.lengths:
        runs: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for _ in range(args.rounds):
            for is_exact, measured in runs.items():
                measured.append(_train(args, length, is_exact))
        usual, exact = ([statistics.median(column) for column in zip(*runs[key], strict=True)] for key in (False, True))
        cells = (f"{b / a:.2f} ({a:.2f} → {b:.2f})" for a, b in zip(usual, exact, strict=True))
        rows.append((f"{length:,}", *cells))
    print("# Cost of exact mode\n")
    print(f"{describe_machine(DEVICE)}, load {os.getloadavg()[0]:.1f} at the end, commit {commit()}, ")
    print(f"`{command_line()}`. {args.model}, tp 2, dp 2, 4 micro batches of 1 sequence, fp32, {RANKS} ranks.\n")
    print("Ratios exact / usual, medians, with both values:\n")
    columns = ("tokens per sequence", "step, seconds", "processor time of the run, seconds", "peak of a rank, GiB")
    print("\n".join(markdown_table(columns, rows)))
    return 0


def _train(args: argparse.Namespace, length: int, exact: bool) -> tuple[float, float, float]:
    """Return (median seconds of a step, processor seconds of the run, GiB at the peak of process 0)."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"model={args.model}", f"data.seq_length={length}", f"trainer.steps={args.steps}", *RECIPE]
        words += [f"model.max_position_embeddings={max(length, 1024)}"]
        words += [f"trainer.exact={str(exact).lower()}", f"run.dir={folder}/run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][2:]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = statistics.median(step["step_time_s"] for step in steps)
    return seconds, used, max(step["peak_memory_bytes"] for step in steps) / 2**30
