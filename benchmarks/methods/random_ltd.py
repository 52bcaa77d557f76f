"""Compare random-LTD with plain training of equal steps and of equal work: validation loss, FLOPs and CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks random_ltd \\
        --input data/redpajama_mini --output runs/random_ltd

Data, model and recipe equal curriculum.py's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from benchmarks.methods import variants
from benchmarks.methods.variants import SUBSETS, Trained
from benchmarks.results import ROOT
from megatron_llama.config import load_config
from megatron_llama.plan import resolve

LENGTH, BATCH = 256, 8
PLAIN, DROPPING = "plain", "random-LTD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=140, help="steps of a plain run (default 140)")
    parser.add_argument("--min-value", type=int, default=64, help=f"initial tokens of {LENGTH} (default 64)")


def settings(kind: str, steps: int, min_value: int) -> list[str]:
    """Return the overrides of a run, without its data."""
    dropping = [f"trainer.random_ltd={{min_value: {min_value}}}"] if kind == DROPPING else []
    return [*variants.recipe(LENGTH, BATCH), f"trainer.steps={steps}", f"trainer.val_every_steps={steps}", *dropping]


@cache
def layer_tokens(kind: str, steps: int, min_value: int) -> int:
    """Return the layer tokens of a run: the sum over layers of the tokens they process."""
    words = [*settings(kind, steps, min_value), "data.mock=true", "data.prefixes=[]"]
    plan = resolve(load_config(words, ROOT / "conf"), 1)
    if plan.random_ltd is None:
        return plan.batches.after(steps).tokens * plan.model.num_hidden_layers
    return plan.random_ltd.layer_tokens(steps, plan.batches)


def steps_for(kind: str, tokens: int, min_value: int) -> int:
    """Return the smallest number of steps with at least ``tokens`` layer tokens."""
    low, high = 0, 1
    while layer_tokens(kind, high, min_value) < tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layer_tokens(kind, middle, min_value) < tokens else (low, middle)
    return high


def build_variants(steps: int, min_value: int) -> dict[str, tuple[str, int]]:
    """Return (kind, steps) of the runs, by name in the table."""
    most, fewest = (layer_tokens(kind, steps, min_value) for kind in (PLAIN, DROPPING))
    return {
        PLAIN: (PLAIN, steps),
        "random-LTD, equal steps": (DROPPING, steps),
        "plain, random-LTD's layer tokens": (PLAIN, steps_for(PLAIN, fewest, min_value)),
        "random-LTD, plain's layer tokens": (DROPPING, steps_for(DROPPING, most, min_value)),
    }


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page."""
    folder = args.output.resolve()
    data = variants.blend(variants.prepare(args.input.resolve(), folder))
    variants_by_name = build_variants(args.steps, args.min_value)

    def trained(kind: str, steps: int, seed: int) -> Trained:
        where = folder / variants.folder_name(kind, args.min_value, steps, seed)
        return variants.train(where, [*settings(kind, steps, args.min_value), data, f"trainer.seed={seed}"])

    # A run of one step measures the time of startup and validation.
    start = trained(PLAIN, 1, args.seeds[0]).seconds
    runs_by_name: dict[str, list[Trained]] = {name: [] for name in variants_by_name}
    for seed in args.seeds:
        for name, (kind, steps) in variants_by_name.items():
            runs_by_name[name].append(trained(kind, steps, seed))
    variants.publish("\n".join(_page(runs_by_name, variants_by_name, start, args)) + "\n", args.write)
    return 0


def _page(
    runs_by_name: Mapping[str, Sequence[Trained]],
    variants_by_name: Mapping[str, tuple[str, int]],
    start: float,
    args: argparse.Namespace,
) -> Iterator[str]:
    """Yield the page in Markdown."""
    yield "# Random-LTD compared with plain training\n"
    yield (
        f"{variants.conditions()} llama_2m, sequences of {LENGTH}, {len(args.seeds)} seeds, equal parts of "
        f"{', '.join(SUBSETS)}; validation with all tokens, on held-out documents, in nats per token, after the last "
        f"step. Layers 1 and 2 of 0 to 3 process {args.min_value} tokens at first, and all tokens after two thirds of "
        "the steps. Layer tokens are the sum over layers of the tokens they process. FLOPs are from `metrics.jsonl`. "
        f"{variants.describe_statistics(start)} Command:\n"
    )
    yield (
        "    OMP_NUM_THREADS=1 python -m benchmarks random_ltd --input REDPAJAMA_FOLDER --output DIR "
        f"--steps {args.steps} --min-value {args.min_value} --seeds {' '.join(map(str, args.seeds))}\n"
    )
    tokens = {name: layer_tokens(kind, steps, args.min_value) for name, (kind, steps) in variants_by_name.items()}
    columns = {name: (f"{steps}", f"{tokens[name] / 1e6:.2f} M") for name, (_, steps) in variants_by_name.items()}
    yield from variants.comparison(("steps", "layer tokens"), columns, runs_by_name, start)
