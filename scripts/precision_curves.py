"""Train the demo's Llama on the demo's data in several precisions and draw their losses and the gaps to the first.

    python scripts/precision_curves.py --steps 600 --seeds 1234 1235 --output runs/precision

Runs with the same seed have the same data and the same initial weights (rounded to bf16 where weights are bf16). Each
is a run folder under --output: scripts/compare.py can read it, and a run that was killed continues when this script is
started again. bf16_pure is the control: unless it falls behind, the agreement of the others shows little.

The recipe makes the control fail: at this learning rate most updates are smaller than half a unit in the last place of
a bf16 weight.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics  # noqa: E402
from megatron_llama.train.smoothing import Floats, moving_average  # noqa: E402
from scripts.results import figure, markdown_table, run_program  # noqa: E402

PRECISIONS = ("fp32", "bf16", "bf16_sr", "bf16_pure")
# Constant batches and a small model: a precision needs a few minutes on two cores that know bf16.
RECIPE = (
    "model=llama_2m data=python_stdlib device=cpu trainer.dp=1 trainer.micro_batch_size=4 trainer.global_batch_size=4 "
    "optim.lr=3e-4 logging.every_steps=50 checkpoint.every_steps=100 checkpoint.keep=1"
).split()
WINDOW = 0.1  # share of the run that a loss is averaged over
COLOURS = ("#1f2933", "#2563eb", "#0d9488", "#ea580c", "#7c3aed", "#be123c")

Runs = Mapping[str, Sequence[Sequence[float]]]
"""For each precision its runs, one for each seed: the loss of each step."""


def smoothed(losses: Sequence[float]) -> Floats:
    """Means over WINDOW of the run: [steps] to [steps - window + 1]."""
    return moving_average(losses, max(1, int(len(losses) * WINDOW)))


def gaps(runs: Runs, precision: str) -> list[Floats]:
    """For each seed: how much higher the smoothed loss is than that of the first precision."""
    pairs = zip(runs[precision], next(iter(runs.values())), strict=True)
    return [smoothed(losses) - smoothed(reference) for losses, reference in pairs]


def table(runs: Runs, recipe: str) -> str:
    """Markdown: the last loss of each precision, and its gap to the first over the seeds."""
    first = next(iter(runs))
    rows = []
    for precision, losses in runs.items():
        last = statistics.fmean(smoothed(seed)[-1] for seed in losses)
        ends = [gap[-1] for gap in gaps(runs, precision)]
        rows.append((precision, f"{last:.4f}", f"{statistics.fmean(ends):+.4f}", f"{min(ends):+.4f}, {max(ends):+.4f}"))
    head = ("precision", "last loss", f"gap to {first}", "smallest and largest, by seed")
    return "\n".join([f"`{recipe}`", "", *markdown_table(head, rows)]) + "\n"


def draw(runs: Runs, path: Path, title: str) -> None:
    """Losses above, gaps to the first precision below; one line for each seed."""
    with figure(path, 2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2)) as (above, below):
        for colour, (precision, losses) in zip(COLOURS * len(runs), runs.items(), strict=False):
            for number, (seed, gap) in enumerate(zip(losses, gaps(runs, precision), strict=True)):
                middles = smoothed(range(1, len(seed) + 1))
                above.plot(middles, smoothed(seed), color=colour, linewidth=1.2, label=None if number else precision)
                below.plot(middles, gap, color=colour, linewidth=1.2)
        above.set(title=title, ylabel="loss, nats per token")
        above.legend(frameon=False)
        below.set(xlabel="step", ylabel=f"loss above {next(iter(runs))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draw and print; status 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run (default: 600)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="one run of each precision for each seed")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "precision", help="folder for runs and results")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, help="the first is what others are held to")
    parser.add_argument("overrides", nargs="*", help="changes to the recipe, as train.py takes them")
    args = parser.parse_args(argv)
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[float]]] = {precision: [] for precision in args.precisions}
    try:
        for seed in args.seeds:
            for precision in args.precisions:
                folder = output / f"{precision}-{seed}"
                trainer = [f"trainer.precision={precision}", f"trainer.seed={seed}", f"trainer.steps={args.steps}"]
                run_program("train.py", *RECIPE, *args.overrides, *trainer, f"run.dir={folder}")
                records = read_metrics(folder / METRICS_FILE)
                runs[precision].append([record["reduced_train_loss"] for record in records])
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{folder}: train.py ended with status {error.returncode}\n")
        return 1
    recipe = " ".join([*RECIPE, *args.overrides, f"trainer.steps={args.steps}"])
    (output / "precision.md").write_text(table(runs, recipe), encoding="utf-8")
    draw(runs, output / "precision.png", f"{len(args.seeds)} seed(s), {args.steps} steps")
    print(table(runs, recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
