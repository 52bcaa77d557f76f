"""Train all pretraining recipes, scaled down by conf/scaled/laptop.yaml, on the demo's text; print a table of losses.

    make demo-data
    python -m benchmarks.verify.recipes --output runs/recipes

Recipes with pipeline parallelism run with two stages. Additional arguments are overrides for all runs. Finished runs
are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.help_format import HelpFormatter
from benchmarks.results import ROOT, commit, run_program
from megatron_llama.cli import CONF_DIR
from megatron_llama.config.load_config import from_yaml, load_config
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics


def trained(recipe: str, folder: Path, overrides: list[str]) -> Iterator[str]:
    """Train unless the run is finished; yield the cells of its row."""
    published = load_config([f"experiment={recipe}"], CONF_DIR).trainer
    pipeline = ["trainer.pp=2", f"trainer.vpp={min(2, published.vpp)}", "trainer.dp=1"] if published.pp > 1 else []
    run_program("train.py", f"experiment={recipe}", "scaled=laptop", f"run.dir={folder}", *pipeline, *overrides)
    steps = list(read_metrics(folder / METRICS_FILE))
    config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    trainer = config.trainer
    yield f"`{recipe}`"
    layout = f"tp {trainer.tp} pp {trainer.pp} x {trainer.vpp} dp {trainer.dp}"
    yield f"{layout}, zero {trainer.zero}, {trainer.precision}, recompute {trainer.recompute}"
    yield "within documents" if config.data.document_mask else "causal"
    yield str(len(steps))
    yield f"{steps[0]['reduced_train_loss']:.3f}"
    yield f"{steps[-1]['reduced_train_loss']:.3f}"
    yield f"{max(step['gradient_norm'] for step in steps):.2f}"
    yield ", ".join(f"{step['val_loss']:.3f}" for step in steps if step.get("val_loss") is not None)


def main() -> None:
    """Train all recipes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    args, overrides = parser.parse_known_args()
    recipes = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("pretrain_*.yaml"))
    rows = [tuple(trained(recipe, (args.output / recipe).absolute(), overrides)) for recipe in recipes]
    head = (
        "recipe",
        "scaled-down settings",
        "attention",
        "steps",
        "first loss",
        "last loss",
        "largest norm",
        "validation",
    )
    print(f"Commit {commit()}.\n")
    print("\n".join(markdown_table(head, rows)))


if __name__ == "__main__":
    main()
