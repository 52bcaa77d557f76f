"""Compare sliding-window and block-sparse attention with dense attention: validation loss and CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks patterns \\
        --input data/redpajama_mini --output runs/patterns

Sequences have 1,024 tokens; data, model and recipe equal curriculum.py's. `python -m benchmarks attention` measures
attention alone by sequence length.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.methods import variants
from benchmarks.methods.variants import SUBSETS, Trained
from megatron_llama.arch.pattern import Pattern

LENGTH, BATCH = 1024, 2
PATTERNS: dict[str, tuple[list[str], Pattern]] = {
    "dense": ([], Pattern()),
    "window of 128": (["model.sliding_window=128"], Pattern(window=128)),
    "blocks of 32, 4 local, 1 global": (
        ["model.sparse_attention={block: 32, num_local_blocks: 4, num_global_blocks: 1}"],
        Pattern(block=32, local_blocks=4, global_blocks=1),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=140, help="steps of each run (default 140)")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page."""
    folder = args.output.resolve()
    data = variants.blend(variants.prepare(args.input.resolve(), folder))

    def trained(name: str, steps: int, seed: int) -> Trained:
        words = [*variants.recipe(LENGTH, BATCH), data, f"trainer.steps={steps}", f"trainer.val_every_steps={steps}"]
        words += [f"trainer.seed={seed}", *PATTERNS[name][0]]
        return variants.train(folder / variants.folder_name(name, steps, seed), words)

    # A run of one step measures the time of startup and validation.
    start = trained("dense", 1, args.seeds[0]).seconds
    runs_by_name: dict[str, list[Trained]] = {name: [] for name in PATTERNS}
    for seed in args.seeds:
        for name, runs in runs_by_name.items():
            runs.append(trained(name, args.steps, seed))
    variants.publish("\n".join(_page(runs_by_name, start, args)) + "\n", args.write)
    return 0


def _page(runs_by_name: Mapping[str, Sequence[Trained]], start: float, args: argparse.Namespace) -> Iterator[str]:
    """Yield the page in Markdown."""
    yield "# Sliding-window and block-sparse attention compared with dense attention\n"
    yield (
        f"{variants.conditions()} llama_2m, {args.steps} steps of {BATCH} sequences of {LENGTH}, {len(args.seeds)} "
        f"seeds, equal parts of {', '.join(SUBSETS)}; validation on held-out documents, with the pattern, in nats per "
        "token, after the last step. The share is the computed share of a sequence's causal pairs. FLOPs are from "
        f"`metrics.jsonl`. {variants.describe_statistics(start)} Command:\n"
    )
    yield (
        "    OMP_NUM_THREADS=1 python -m benchmarks patterns --input REDPAJAMA_FOLDER --output DIR "
        f"--steps {args.steps} --seeds {' '.join(map(str, args.seeds))}\n"
    )
    shares = {name: (f"{pattern.span(LENGTH) / LENGTH:.0%}",) for name, (_, pattern) in PATTERNS.items()}
    yield from variants.comparison(("share computed",), shares, runs_by_name, start)
