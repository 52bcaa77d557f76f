"""What random-LTD gains: loss, FLOPs and processor time beside plain training of as many steps, or of equal work.

    OMP_NUM_THREADS=1 python -m benchmarks random_ltd --input data/redpajama_mini --output runs/random_ltd

Data, model and recipe are the same as in curriculum.py.
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
    """The sub-command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=140, help="of a plain run (default 140)")
    parser.add_argument("--min-value", type=int, default=64, help=f"tokens of {LENGTH} at first (default 64)")


def settings(kind: str, steps: int, min_value: int) -> list[str]:
    """The overrides of a run but for its data."""
    dropping = [f"trainer.random_ltd={{min_value: {min_value}}}"] if kind == DROPPING else []
    return [*variants.recipe(LENGTH, BATCH), f"trainer.steps={steps}", f"trainer.val_every_steps={steps}", *dropping]


@cache
def layer_tokens(kind: str, steps: int, min_value: int) -> int:
    """Tokens times the layers that see them in a run of so many steps."""
    words = [*settings(kind, steps, min_value), "data.mock=true", "data.prefixes=[]"]
    plan = resolve(load_config(words, ROOT / "conf"), 1)
    if plan.random_ltd is None:
        return plan.batches.after(steps).tokens * plan.model.num_hidden_layers
    return plan.random_ltd.layer_tokens(steps, plan.batches)


def steps_for(kind: str, tokens: int, min_value: int) -> int:
    """The fewest steps in which layers see so many tokens."""
    low, high = 0, 1
    while layer_tokens(kind, high, min_value) < tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layer_tokens(kind, middle, min_value) < tokens else (low, middle)
    return high


def ways(steps: int, min_value: int) -> dict[str, tuple[str, int]]:
    """(kind, steps) of what is trained, by its name in the table."""
    most, fewest = (layer_tokens(kind, steps, min_value) for kind in (PLAIN, DROPPING))
    return {
        PLAIN: (PLAIN, steps),
        "random-LTD, as many steps": (DROPPING, steps),
        "plain, the layer tokens of that": (PLAIN, steps_for(PLAIN, fewest, min_value)),
        "random-LTD, plain's layer tokens": (DROPPING, steps_for(DROPPING, most, min_value)),
    }


def run(args: argparse.Namespace) -> int:
    """Prepares, trains, and prints or writes the page."""
    folder = args.output.resolve()
    data = variants.blend(variants.prepare(args.input.resolve(), folder))
    asked = ways(args.steps, args.min_value)

    def trained(kind: str, steps: int, seed: int) -> Trained:
        where = folder / variants.folder_name(kind, args.min_value, steps, seed)
        return variants.train(where, [*settings(kind, steps, args.min_value), data, f"trainer.seed={seed}"])

    # A run of one step is nearly all start and validation, which every run has.
    start = trained(PLAIN, 1, args.seeds[0]).seconds
    found: dict[str, list[Trained]] = {name: [] for name in asked}
    for seed in args.seeds:
        for name, (kind, steps) in asked.items():
            found[name].append(trained(kind, steps, seed))
    variants.publish("\n".join(_page(found, asked, start, args)) + "\n", args.write)
    return 0


def _page(
    found: Mapping[str, Sequence[Trained]],
    asked: Mapping[str, tuple[str, int]],
    start: float,
    args: argparse.Namespace,
) -> Iterator[str]:
    """The result in Markdown."""
    yield "# Random-LTD beside plain training\n"
    yield (
        f"{variants.conditions()} llama_2m, sequences of {LENGTH}, {len(args.seeds)} seeds, equal parts of "
        f"{', '.join(SUBSETS)}; validation with all tokens, on documents that are not trained on, in nats a token, "
        f"after the last step. Layers 1 and 2 of 0 to 3 see {args.min_value} tokens at first, and all after two thirds "
        "of the steps. A layer token is a token that a layer sees. FLOPs are those of `metrics.jsonl`. "
        f"{variants.how_compared(start)} Made by\n"
    )
    yield (
        "    OMP_NUM_THREADS=1 python -m benchmarks random_ltd --input REDPAJAMA_FOLDER --output DIR "
        f"--steps {args.steps} --min-value {args.min_value} --seeds {' '.join(map(str, args.seeds))}\n"
    )
    tokens = {name: layer_tokens(kind, steps, args.min_value) for name, (kind, steps) in asked.items()}
    told = {name: (f"{steps}", f"{tokens[name] / 1e6:.2f} M") for name, (_, steps) in asked.items()}
    yield from variants.comparison(("steps", "layer tokens"), told, found, start)
