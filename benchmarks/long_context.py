"""Measure tokens/s over the sequence length for cp 1, 2 and 4 on the same cores; write a table and a plot.

A step has one sequence. The layouts of a length alternate, so that other load on the machine affects all of them.
Ratios to one process are therefore more reliable than tokens/s. Lengths above --longest-full use a sliding window,
because the FLOPs of full attention grow with the square of the length. The measured share of attention assumes that
the other work of a token takes the same time at all lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import load_preset
from benchmarks.results import ROOT, command_line, conditions, figure, run_program
from megatron_llama.arch.flops import flops_per_token
from megatron_llama.arch.pattern import Pattern
from megatron_llama.config.settings import ModelConfig
from megatron_llama.system.files import write_atomically
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

HEAD = ("tokens", "attention", "cp", "tokens/s", "ratio to cp 1", "attention, formula", "attention, measured")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--model", default="llama_15m", help="preset (default %(default)s)")
    add("--lengths", type=int, nargs="+", default=[1024 << n for n in range(8)], help="tokens of a sequence")
    add("--cp", type=int, nargs="+", default=[1, 2, 4], help="context-parallel ranks, all on the same cores")
    add("--longest-full", type=int, default=16384, help="longest length with full attention (default %(default)s)")
    add("--window", type=int, default=4096, help="sliding window of longer sequences (default %(default)s)")
    add("--rounds", type=int, default=2, help="runs of each point (default %(default)s)")
    add("--steps", type=int, default=2, help="steps of a run; the first is not counted (default %(default)s)")
    add("--output", type=Path, default=ROOT / "runs/benchmarks/long_context", help="path of the page, without suffix")


def run(args: argparse.Namespace) -> int:
    """Measure, print, draw and write."""
    points = [point for length in args.lengths for point in measure(args, length)]
    text = "\n".join(_page(args, points)) + "\n"
    write_atomically(args.output.with_suffix(".md"), text)
    draw(points, args.output.with_suffix(".png"))
    sys.stdout.write(text)
    return 0


def measure(args: argparse.Namespace, length: int) -> Iterator[dict[str, Any]]:
    """Yield the points of one length, after alternate runs of all layouts."""
    window = args.window if length > args.longest_full else 0
    seconds: dict[int, list[float]] = {cp: [] for cp in args.cp}
    for _ in range(args.rounds):
        for cp in args.cp:
            with tempfile.TemporaryDirectory() as folder:
                run_program("train.py", *_settings(args, length, window, cp), f"run.dir={folder}")
                records = read_metrics(Path(folder) / METRICS_FILE)
            seconds[cp] += [record["step_time_s"] for record in records[1:]]
    for cp, times in seconds.items():
        sys.stderr.write(f"{length} tokens, cp {cp}: {times} s, load {os.getloadavg()[0]:.1f}\n")
        yield {"length": length, "window": window, "cp": cp, "seconds": statistics.median(times), "times": times}


def _settings(args: argparse.Namespace, length: int, window: int, cp: int) -> list[str]:
    return [
        f"model={args.model}",
        "data=mock",
        "device=cpu",
        f"data.seq_length={length}",
        f"model.max_position_embeddings={max(args.lengths)}",
        f"model.sliding_window={window or 'null'}",
        f"trainer.cp={cp}",
        f"trainer.steps={args.steps}",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=1",
        "trainer.recompute=full",
        "logging.tensorboard=false",
        "checkpoint.save_last=false",
    ]


def formula_share(model: ModelConfig, length: int, window: int) -> float:
    """Return attention's share of a token's FLOPs, counted without masked scores, with full recomputation.

    Recomputation repeats the forward pass of the blocks, but not of the head: a third of the blocks' FLOPs.
    """
    head = 6 * model.vocab_size * model.hidden_size
    all_matmuls = flops_per_token(model, 0).causal
    attention = flops_per_token(model, Pattern(window=window).span(length)).causal - all_matmuls
    attention, matmuls = 4 / 3 * attention, 4 / 3 * (all_matmuls - head) + head
    return attention / (attention + matmuls)


def measured_shares(model: ModelConfig, points: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return attention's share of the time of each point.

    The other work takes the same time per token as at the shortest length of the same cp, where the formula is used.
    """
    shares = []
    for point in points:
        same = [other for other in points if other["cp"] == point["cp"]]
        shortest = min(same, key=lambda other: int(other["length"]))
        other_work = shortest["seconds"] / shortest["length"]
        other_work *= 1 - formula_share(model, shortest["length"], shortest["window"])
        shares.append(1 - other_work * point["length"] / point["seconds"])
    return shares


def long_context_rows(model: ModelConfig, points: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield rows of HEAD."""
    alone = {point["length"]: point["seconds"] for point in points if point["cp"] == 1}
    for point, share in zip(points, measured_shares(model, points), strict=True):
        length, seconds = point["length"], point["seconds"]
        yield [
            f"{length:,}",
            f"window {point['window']:,}" if point["window"] else "full",
            str(point["cp"]),
            f"{length / seconds:,.0f}",
            f"{alone[length] / seconds:.2f}" if length in alone else "",
            f"{formula_share(model, length, point['window']):.0%}",
            f"{share:.0%}",
        ]


def draw(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot tokens/s over the length, and its ratio to one process."""
    alone = {point["length"]: point["seconds"] for point in points if point["cp"] == 1}
    with figure(path, 1, 2, figsize=(9, 3.4)) as (rates, ratios):
        for cp in dict.fromkeys(point["cp"] for point in points):
            line = [point for point in points if point["cp"] == cp]
            lengths = [point["length"] for point in line]
            rates.plot(lengths, [p["length"] / p["seconds"] for p in line], marker="o", label=f"cp {cp}")
            common = [point for point in line if point["length"] in alone]
            values = [alone[p["length"]] / p["seconds"] for p in common]
            ratios.plot([p["length"] for p in common], values, marker="o", label=f"cp {cp}")
        rates.set(xlabel="tokens of a sequence", ylabel="tokens/s", xscale="log", ylim=(0, None))
        ratios.set(xlabel="tokens of a sequence", ylabel="ratio to cp 1", xscale="log", ylim=(0, None))
        rates.legend(fontsize=8)
        ratios.legend(fontsize=8)


def _page(args: argparse.Namespace, points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    model = load_preset(args.model, None).model
    yield from ["# Tokens per second over the sequence length", "", conditions()]
    yield from ["", f"    {command_line()}", ""]
    yield f"{args.model} in fp32, full recomputation, a step has one sequence. All ranks share the same cores."
    yield f"Values are medians of {args.rounds} alternate runs with {args.steps - 1} counted steps each."
    if missing := [length for length in (1024 << n for n in range(8)) if length not in args.lengths]:
        yield f"Not run for lack of time: {', '.join(f'{length:,}' for length in missing)} tokens."
    yield from ["", *markdown_table(HEAD, long_context_rows(model, points)), ""]
    times = {f"{p['length']} cp {p['cp']}": [round(t, 2) for t in p["times"]] for p in points}
    yield from [
        f"![tokens/s]({args.output.with_suffix('.png').name})",
        "",
        f"Seconds of each step: `{json.dumps(times)}`",
    ]
