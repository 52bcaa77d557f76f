"""Train the demo's Llama on the demo's data in several precisions; plot the losses and the gaps to the first.

    python -m benchmarks.verify.precision --steps 600 --seeds 1234 1235
    python -m benchmarks.verify.precision --output runs/state_bits \\
        --precisions fp32 "fp32 optim.state_bits=8"

A precision may include overrides: the second command compares 8-bit optimizer states with fp32 states. Runs with the
same seed have the same data and initial weights (rounded to bf16 if weights are bf16). Run folders are in --output;
scripts/compare.py reads them. The same command resumes killed runs.

bf16_pure is the negative control and must have a higher loss: with the recipe's learning rate, most updates are smaller
than half a unit in the last place of a bf16 weight.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.help_format import HelpFormatter
from benchmarks.methods import variants
from benchmarks.results import ROOT, figure, run_program
from megatron_llama.system.errors import run_main
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.loss_curve import Floats, moving_average
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

PRECISIONS = ("fp32", "bf16", "bf16_sr", "bf16_pure")
# Constant batches and a small model: a precision takes a few minutes on two cores with bf16 instructions.
RECIPE = (
    "model=llama_2m data=python_stdlib device=cpu trainer.dp=1 trainer.micro_batch_size=4 trainer.global_batch_size=4 "
    "optim.lr=3e-4 logging.every_steps=50 checkpoint.every_steps=100 checkpoint.keep=1"
).split()
WINDOW = 0.1  # length of the moving average, as a share of the run
COLOURS = ("#1f2933", "#2563eb", "#0d9488", "#ea580c", "#7c3aed", "#be123c")

Runs = Mapping[str, Sequence[Sequence[float]]]
"""Losses of each step, or of each validation, by seed and precision."""


def smoothed(losses: Sequence[float]) -> Floats:
    """Return the moving average over WINDOW of the run: [steps] to [steps - window + 1]."""
    return moving_average(losses, max(1, int(len(losses) * WINDOW)))


def gaps(runs: Runs, precision: str) -> list[Floats]:
    """Return, for each seed, the smoothed loss minus the first precision's."""
    pairs = zip(runs[precision], next(iter(runs.values())), strict=True)
    return [smoothed(losses) - smoothed(reference) for losses, reference in pairs]


def table(runs: Runs, validated: Runs) -> list[str]:
    """Return a Markdown table of final losses, gaps to the first precision by seed, and the range over seeds.

    Training losses are smoothed; validation losses are not.
    """
    first = next(iter(runs))
    rows = []
    for precision in runs:
        trained = {name: [smoothed(seed)[-1] for seed in runs[name]] for name in (first, precision)}
        last = {name: [seed[-1] for seed in validated[name]] for name in (first, precision) if all(validated[name])}
        row = [precision]
        for losses in (trained, last):
            if precision in losses:
                gap = variants.gap(losses[precision], losses[first]) if precision != first else ""
                row += [f"{statistics.fmean(losses[precision]):.4f}{_spread(losses[precision])}", gap]
        rows.append(row)
    head = ["precision", "last loss, smoothed", f"gap to {first}"]
    if len(rows[0]) > len(head):
        head += ["validation loss", f"gap to {first}"]
    return list(markdown_table(head, rows))


def _spread(losses: Sequence[float]) -> str:
    return f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""


def draw(runs: Runs, path: Path, title: str) -> None:
    """Plot losses (top) and gaps to the first precision (bottom), one line per seed."""
    with figure(path, 2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2)) as (above, below):
        for colour, (precision, losses) in zip(COLOURS * len(runs), runs.items(), strict=False):
            for number, (seed, gap) in enumerate(zip(losses, gaps(runs, precision), strict=True)):
                middles = smoothed(range(1, len(seed) + 1))
                above.plot(middles, smoothed(seed), color=colour, linewidth=1.2, label=None if number else precision)
                below.plot(middles, gap, color=colour, linewidth=1.2)
        above.set(title=title, ylabel="loss, nats per token")
        above.legend(frameon=False)
        below.set(xlabel="step", ylabel=f"gap to {next(iter(runs))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draw and print; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run (default 600)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="seeds of each precision")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "precision", help="folder of runs and results")
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=PRECISIONS,
        help="precisions, each with optional overrides; all are compared with the first",
    )
    parser.add_argument("overrides", nargs="*", help="changes of the recipe, as for train.py")
    args = parser.parse_args(argv)
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    records: dict[str, list[list[dict[str, Any]]]] = {precision: [] for precision in args.precisions}
    recipe = [*RECIPE, *args.overrides, f"trainer.steps={args.steps}"]
    try:
        for seed in args.seeds:
            for precision in args.precisions:
                folder = output / variants.folder_name(precision, seed)
                dtypes, *changes = shlex.split(precision)
                settings = [f"trainer.precision={dtypes}", *changes, f"trainer.seed={seed}", f"run.dir={folder}"]
                run_program("train.py", *recipe, *settings)
                records[precision].append(read_metrics(folder / METRICS_FILE))
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{folder}: train.py ended with status {error.returncode}\n")
        return 1
    runs, validated = (_of_each_run(records, name) for name in ("reduced_train_loss", "val_loss"))
    seeds = f"seeds {', '.join(map(str, args.seeds))}" if len(args.seeds) > 1 else f"seed {args.seeds[0]}"
    head = [variants.conditions(), "", f"{seeds}; `{' '.join(recipe)}`", ""]
    page = "\n".join([*head, *table(runs, validated)]) + "\n"
    (output / "precision.md").write_text(page, encoding="utf-8")
    draw(runs, output / "precision.png", f"{len(args.seeds)} seed(s), {args.steps} steps")
    print(page)
    return 0


def _of_each_run(records: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], name: str) -> Runs:
    """Return the metric ``name`` of the steps that logged it."""
    return {
        precision: [[float(record[name]) for record in run if record.get(name) is not None] for run in of]
        for precision, of in records.items()
    }


if __name__ == "__main__":
    run_main(main)
