"""What windows and block-sparse attention cost in loss and save in time, beside training with dense attention.

    OMP_NUM_THREADS=1 python -m benchmarks patterns --input data/redpajama_mini --output runs/patterns

Sequences of 1,024 tokens; data, model and recipe are the same as in curriculum.py. `python -m benchmarks attention`
measures the time of attention alone over the length of sequences.
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
    """The sub-command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=140, help="of each run (default 140)")


def run(args: argparse.Namespace) -> int:
    """Prepares, trains, and prints or writes the page."""
    folder = args.output.resolve()
    data = variants.blend(variants.prepare(args.input.resolve(), folder))

    def trained(name: str, steps: int, seed: int) -> Trained:
        words = [*variants.recipe(LENGTH, BATCH), data, f"trainer.steps={steps}", f"trainer.val_every_steps={steps}"]
        words += [f"trainer.seed={seed}", *PATTERNS[name][0]]
        return variants.train(folder / variants.folder_name(name, steps, seed), words)

    # A run of one step is nearly all start and validation, which every run has.
    start = trained("dense", 1, args.seeds[0]).seconds
    found: dict[str, list[Trained]] = {name: [] for name in PATTERNS}
    for seed in args.seeds:
        for name, runs in found.items():
            runs.append(trained(name, args.steps, seed))
    variants.publish("\n".join(_page(found, start, args)) + "\n", args.write)
    return 0


def _page(found: Mapping[str, Sequence[Trained]], start: float, args: argparse.Namespace) -> Iterator[str]:
    """The result in Markdown."""
    yield "# Windows and block-sparse attention beside dense training\n"
    yield (
        f"{variants.conditions()} llama_2m, {args.steps} steps of {BATCH} sequences of {LENGTH}, {len(args.seeds)} "
        f"seeds, equal parts of {', '.join(SUBSETS)}; validation on documents that are not trained on, with the "
        "pattern, in nats a token, after the last step. The share is that of the causal pairs of a sequence that are "
        f"computed. FLOPs are those of `metrics.jsonl`. {variants.how_compared(start)} Made by\n"
    )
    yield (
        "    OMP_NUM_THREADS=1 python -m benchmarks patterns --input REDPAJAMA_FOLDER --output DIR "
        f"--steps {args.steps} --seeds {' '.join(map(str, args.seeds))}\n"
    )
    told = {name: (f"{pattern.span(LENGTH) / LENGTH:.0%}",) for name, (_, pattern) in PATTERNS.items()}
    yield from variants.comparison(("share seen",), told, found, start)
