"""Measure the time per token over model size, sequence length, micro batches and ranks; write a table and a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.arguments import ONE, RunMatrix, build_tasks, parse_layout, report_excluded, split_words
from benchmarks.harness.environments import OURS, PEERS, interpreter, torch_version
from benchmarks.harness.runner import RoundSettings, progress, run_rounds
from benchmarks.harness.task import TrainingTask
from benchmarks.results import ROOT, command_line, commit, describe_machine, figure
from megatron_llama.devices import get_device
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table

SWEEPS = ("model", "sequence", "micro batches", "ranks")
HEAD = ("sweep", "value", "layout", "tokens/s", "us per token", "CPU us per token", "resident MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "--models",
        type=split_words,
        default=["llama_2m", "llama_15m", "llama_56m", "llama_110m"],
        help="presets of the model sweep",
    )
    add("--base", default="llama_15m", help="model of the other sweeps (default %(default)s)")
    add(
        "--sequences",
        type=split_words,
        default=["64", "128", "256"],
        help="tokens per sequence; the tokens per step stay equal",
    )
    add(
        "--micro-batches",
        type=split_words,
        default=["1", "2", "4", "8"],
        help="numbers of micro batches of 8 sequences, in one process and with pp2",
    )
    add(
        "--layouts",
        type=split_words,
        default=[ONE, "tp2", "dp2", "pp2", "dp4", "tp2dp2"],
        help="layouts of the rank sweep, all on the same cores",
    )
    add("--precision", default="fp32", choices=["fp32", "bf16"])
    add("--mode", default="eager", choices=["eager", "compiled"])
    add("--rounds", type=int, default=3, help="turns of each point (default %(default)s)")
    add("--steps", type=int, default=2, help="timed steps per turn (default %(default)s)")
    add("--output", type=Path, default=ROOT / "runs/benchmarks/scaling", help="path of the page, without .md and .png")


def run(args: argparse.Namespace) -> int:
    """Measure, print, draw and write; return 1 if a point failed."""
    excluded: dict[str, str] = {}
    tasks = list(sweeps(args))
    points: list[dict[str, Any]] = []
    with progress(len(tasks) * (args.rounds + 2)) as advance:
        for sweep, value, task in tasks:
            left: dict[str, str] = {}
            settings = RoundSettings(args.rounds, args.steps, False, lambda: 0.0, advance, left)
            for result in run_rounds([(PEERS[OURS], interpreter(PEERS[OURS]), task)], settings):
                tokens = task.batch_size * task.seq_length
                seconds = median(sum(turn.step_seconds) / len(turn.step_seconds) for turn in result.turns)
                points.append(
                    {
                        "sweep": sweep,
                        "value": value,
                        "layout": result.name.removeprefix(OURS).removeprefix(" compiled").strip() or ONE,
                        "us_per_token": seconds / tokens * 1e6,
                        "processor_us": median(turn.processor_seconds for turn in result.turns) / tokens * 1e6,
                        "peak_bytes": max(turn.peak_bytes for turn in result.turns),
                    }
                )
            excluded.update({f"{sweep} {value} {name}": reason for name, reason in left.items()})
    text = "\n".join(_page(args, points)) + "\n"
    write_atomically(args.output.with_suffix(".json"), json.dumps(points, indent=1) + "\n")
    write_atomically(args.output.with_suffix(".md"), text)
    draw(points, args.output.with_suffix(".png"))
    sys.stdout.write(text)
    return report_excluded(excluded)


def sweeps(args: argparse.Namespace) -> Iterator[tuple[str, str, TrainingTask]]:
    """Yield (sweep, value, task) of each point. All other settings are constant in a sweep."""
    cores = get_device("cpu").count()
    longest = max(int(length) for length in args.sequences)

    def task(
        preset: str, layout: str = ONE, length: int = longest, batch: int = 8, micro: int | None = None
    ) -> TrainingTask:
        matrix = RunMatrix([OURS], [args.mode], [layout], ["none"], [1], "cpu", cores, batch, length, None)
        built = next(task for _, task in build_tasks(matrix, preset, args.precision))
        return built if micro is None else replace(built, micro_batch_size=micro)

    for preset in args.models:
        yield "model", preset, task(preset)
    for length in map(int, args.sequences):
        yield "sequence", str(length), task(args.base, length=length, batch=8 * longest // length)
    for number in map(int, args.micro_batches):
        for layout in (ONE, "pp2"):
            yield "micro batches", str(number), task(args.base, layout, micro=8 // number)
    for layout in args.layouts:
        yield "ranks", str(parse_layout(layout).ranks), task(args.base, layout)


def scaling_rows(points: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield rows of HEAD."""
    for point in points:
        yield [
            point["sweep"],
            point["value"],
            point["layout"],
            f"{1e6 / point['us_per_token']:,.0f}",
            f"{point['us_per_token']:,.0f}",
            f"{point['processor_us']:,.0f}",
            f"{point['peak_bytes'] / 2**20:,.0f}",
        ]


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot microseconds per token over the value, a panel per sweep and a line per layout."""
    names = list(dict.fromkeys(point["sweep"] for point in points))
    with figure(path, 1, len(SWEEPS), figsize=(4 * len(SWEEPS), 3.4)) as panels:
        for axes, name in zip(panels, names, strict=False):
            points = [point for point in points if point["sweep"] == name]
            for layout in dict.fromkeys(point["layout"] for point in points):
                line = [(p["value"].removeprefix("llama_"), p["us_per_token"]) for p in points if p["layout"] == layout]
                axes.plot(*zip(*line, strict=True), marker="o", label=layout)
            axes.set(xlabel=name, ylabel="us per token", yscale="log" if name == "model" else "linear")
            if name != "model":
                axes.set_ylim(0, 1.08 * max(point["us_per_token"] for point in points))  # space for the top marker
            axes.legend(fontsize=8)


def _page(args: argparse.Namespace, points: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from [f"# Time per token ({date.today()})", ""]
    yield f"Machine: {describe_machine('cpu')}. torch {torch_version()}, commit {commit()}."
    yield from ["", f"    {command_line()}", ""]
    yield f"In {args.precision}, {args.mode}. The sweeps of sequence length, micro batches and ranks use {args.base}."
    yield "A step has 8 sequences; the sequence sweep keeps the tokens per step. All ranks share the same cores, so"
    yield from ["more ranks show overhead, not speedup. Values are medians.", ""]
    yield from markdown_table(HEAD, scaling_rows(points))
    yield from ["", f"![us per token]({args.output.with_suffix('.png').name})"]
