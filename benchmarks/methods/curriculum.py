"""Compare curricula with plain training of the same number of tokens: validation loss and CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks curriculum \\
        --input data/redpajama_mini --output runs/curriculum

Trains a tokenizer of 384 tokens, prepares and analyzes four subsets, and trains the demo's Llama on them with each
curriculum and seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.methods import variants
from benchmarks.methods.variants import SUBSETS, Trained
from benchmarks.results import ROOT, run_program
from megatron_llama.config import load_config
from megatron_llama.plan.schedules import BatchSchedule
from megatron_llama.system.tables import markdown_table

LENGTH, BATCH, VALIDATIONS = 256, 8, 4
CURRICULA = {
    "none": "",
    "seqlen_truncate": "min_difficulty: 64, max_difficulty: 256, difficulty_step: 64",
    "seqlen_reshape": "min_difficulty: 64, max_difficulty: 256, difficulty_step: 64",
    "vocab_rarity": "difficulty_type: percentile, schedule_type: fixed_root, min_difficulty: 10, max_difficulty: 100, "
    "difficulty_step: 10",
}
"""Settings by metric, without total_curriculum_step, which is half of a plain run's steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=143_360, help="tokens of each run (default 143360)")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page."""
    folder = args.output.resolve()
    prefixes = variants.prepare(args.input.resolve(), folder)
    for prefix in prefixes:
        run_program("data_prep/analyze.py", prefix, "--metric", "vocab_rarity", "--seq-length", LENGTH)
    runs_by_name: dict[str, list[Trained]] = {name: [] for name in CURRICULA}
    for seed in args.seeds:
        for name, runs in runs_by_name.items():
            runs.append(_train(name, seed, args.tokens, folder, prefixes))
    variants.publish(_page(runs_by_name, args), args.write)
    return 0


def _train(name: str, seed: int, tokens: int, folder: Path, prefixes: Sequence[Path]) -> Trained:
    """Train until the first step in which ``tokens`` tokens are consumed."""
    total = tokens // (LENGTH * BATCH) // 2
    words = [*variants.recipe(LENGTH, BATCH), variants.blend(prefixes), f"trainer.seed={seed}"]
    if name != "none":
        entry = f"{{metric: {name}, {CURRICULA[name]}, total_curriculum_step: {total}}}"
        words.append(f"data.curriculum=[{entry}]")
    schedule = BatchSchedule.of(load_config([*words, "trainer.steps=1000000"], ROOT / "conf"))
    steps = next(step for step in range(1, 10**6) if schedule.after(step).tokens >= tokens)
    words += [f"trainer.steps={steps}", f"trainer.val_every_steps={max(1, steps // VALIDATIONS)}"]
    return variants.train(folder / variants.folder_name(name, seed, tokens), words)


def _page(runs_by_name: Mapping[str, Sequence[Trained]], args: argparse.Namespace) -> str:
    """Return the page in Markdown."""
    marks = [args.tokens * quarter // 4 for quarter in (1, 2, 3, 4)]

    def at_marks(run: Trained) -> list[float]:
        tokens, losses = zip(*((r["consumed_tokens"], r["val_loss"]) for r in run.validations), strict=True)
        return [float(loss) for loss in np.interp(marks, tokens, losses)]

    losses = {name: [at_marks(run) for run in runs] for name, runs in runs_by_name.items()}
    at_the_end = {name: [loss[-1] for loss in of] for name, of in losses.items()}
    rows = []
    for name, runs in runs_by_name.items():
        means = [f"{statistics.fmean(column):.4f}" for column in zip(*losses[name], strict=True)]
        gap = "" if name == "none" else variants.gap(at_the_end[name], at_the_end["none"])
        seconds = statistics.fmean(run.seconds for run in runs)
        rows.append((name, f"{len(runs[0].records)}", *means, gap, f"{seconds:.0f}"))
    head = (
        "curriculum",
        "steps",
        *(f"at {mark:,} tokens" for mark in marks),
        "gap to none at the end",
        "CPU s per run",
    )
    entries = [f"- {name}: {words}" for name, words in CURRICULA.items() if words]
    lines = [
        "# Curricula compared with plain training\n",
        f"{variants.conditions()} llama_2m, {args.tokens:,} tokens per run, {len(args.seeds)} seeds, equal parts of "
        f"{', '.join(SUBSETS)}; validation on full sequences of held-out documents, in nats per token. "
        f"{variants.describe_statistics(0)} Command:\n",
        "    OMP_NUM_THREADS=1 python -m benchmarks curriculum --input REDPAJAMA_FOLDER --output DIR "
        f"--tokens {args.tokens} --seeds {' '.join(map(str, args.seeds))}\n",
        *markdown_table(head, rows),
        "\nThe difficulty increases over half of a plain run's steps:\n",
        *entries,
    ]
    return "\n".join(lines) + "\n"
