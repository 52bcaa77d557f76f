"""Train a small model to retrieve values from long sequences, with and without context parallelism and YaRN.

    OMP_NUM_THREADS=1 python -m benchmarks retrieval --output runs/retrieval

An example has 32 notes at random positions among filler tokens. A note is one token that stands for a key and a value.
At the end, the keys follow in another order, each with its value. Only the values have loss, so chance is ln 16 nats.

Each seed trains a model of two layers on short sequences, for a sixteenth of --length. Part 1 trains it further at
--length, in one process and with trainer.cp=2. Part 2 trains it at a quarter of the length, evaluates it at --length,
and trains it there for a few steps, with and without YaRN's frequencies.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.methods import variants
from benchmarks.results import command_line, figure, run_program
from megatron_llama.config.data_settings import MASK_SUFFIX
from megatron_llama.corpus.indexed_format import MASK_DTYPE, token_dtype, write_index
from megatron_llama.system.tables import markdown_table

KEYS, VALUES, FILLER = 32, 16, 32
NOTES = KEYS * VALUES
VOCABULARY = NOTES + KEYS + VALUES + FILLER
"""Ids in this order: notes (key * VALUES + value), keys, values, filler."""
CHANCE = math.log(VALUES)
FACTOR = 4
"""Quotient of the two lengths, and YaRN's factor."""
VALIDATION, ROWS = 32, 4
"""Validation examples, and sequences per step at the full length."""
LAYOUTS = {"one process": [], "cp 2": ["trainer.cp=2"]}
YARN = f"model.rope_scaling={{rope_type: yarn, factor: {FACTOR}}}"
EXTENSIONS = {"no scaling": [], "yarn": [YARN]}
UNCHANGED = ["trainer.steps=1", "optim.lr=1e-12", "optim.min_lr=1e-12"]
"""Settings of a run that only validates: its update is below the precision of the weights."""
MODEL = (
    f"model=llama_2m model.name=retrieval model.vocab_size={VOCABULARY} model.hidden_size=64 "
    "model.intermediate_size=128 model.num_hidden_layers=2 model.num_attention_heads=2 model.num_key_value_heads=2 "
    "model.initializer_range=0.1"
).split()
COMMON = (
    "data.kind=sft data.name=retrieval data.tokenizer=null device=cpu trainer.dp=1 trainer.precision=fp32 "
    "optim.lr=5e-3 optim.min_lr=1e-3 optim.weight_decay=0 logging.tensorboard=false logging.sample_prompts=[] "
    "logging.every_steps=50"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of datasets and runs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the long sequences (default 4096)")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        default=[300, 80, 40],
        metavar=("SHORT", "LONG", "EXTENDED"),
        help="steps at a sixteenth of the length, at the length (or a quarter), after the extension (300 80 40)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (default 1 2 3)")
    parser.add_argument("--write", type=Path, help="write the page and its figure here instead of printing the page")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page."""
    study = Study(args.output.resolve(), args.length, *args.steps)
    layouts: Curves = {name: [] for name in LAYOUTS}
    extensions: Curves = {name: [] for name in EXTENSIONS}
    short = []
    for seed in args.seeds:
        first = study.train(f"first-{seed}", args.length // 16, study.short, seed, MODEL)
        for name, words in LAYOUTS.items():
            run = study.train(f"{name}-{seed}", args.length, study.long, seed, first.further(args.length), *words)
            layouts[name].append(run.losses)
        base = study.train(
            f"base-{seed}", args.length // FACTOR, study.long, seed, first.further(args.length // FACTOR)
        )
        short.append(base.losses[-1])
        for name, words in EXTENSIONS.items():
            start = [*base.further(None if words else args.length), *words]
            unchanged = study.train(f"before-{name}-{seed}", args.length, 1, seed, start, *UNCHANGED)
            extended = study.train(f"{name}-{seed}", args.length, study.extended, seed, start)
            extensions[name].append([unchanged.losses[-1], *extended.losses])
    variants.publish("\n".join(_page(args, layouts, short, extensions)) + "\n", args.write)
    if args.write is not None:
        draw(args.write.with_suffix(".png"), study, layouts, extensions)
    return 0


# Data.


def make_example(draw: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, loss mask) of an example with ``length`` inputs, each [length + 1]."""
    keys, values = draw.permutation(KEYS), draw.integers(VALUES, size=KEYS)
    hay = draw.integers(FILLER, size=length - 2 * KEYS) + NOTES + KEYS + VALUES
    hay[draw.permutation(len(hay))[:KEYS]] = keys * VALUES + values
    order = draw.permutation(KEYS)
    answers = np.stack([NOTES + keys[order], NOTES + KEYS + values[order]], axis=1).ravel()
    mask = np.zeros(length + 1, MASK_DTYPE)
    mask[len(hay) + 1 : length : 2] = 1
    return np.concatenate([hay, answers, hay[-1:]]), mask


def write_set(prefix: Path, count: int, length: int, seed: int) -> None:
    """Write a fine-tuning set of ``count`` examples, unless it exists."""
    if prefix.with_name(f"{prefix.name}{MASK_SUFFIX}.idx").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    examples = [make_example(draw, length) for _ in range(count)]
    kinds = {"": token_dtype(VOCABULARY), MASK_SUFFIX: np.dtype(MASK_DTYPE)}
    for (suffix, dtype), rows in zip(kinds.items(), zip(*examples, strict=True), strict=True):
        path, lengths = prefix.with_name(prefix.name + suffix), prefix.with_name("lengths")
        np.concatenate(rows).astype(dtype).tofile(path.with_name(path.name + ".bin"))
        np.full(count, length + 1, "<i4").tofile(lengths)
        with path.with_name(path.name + ".idx").open("wb") as file:
            write_index(file, lengths, dtype)
        lengths.unlink()


# Runs.


Curves = dict[str, list[Sequence[float]]]
"""Validation losses of the runs of each seed, by variant."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    losses: Sequence[float]
    """Validation losses, nats per value."""

    def further(self, positions: int | None) -> list[str]:
        """Return the overrides that start from the weights, with ``positions`` positions, or as stored."""
        words = ["model=from_hf", f"init_from={self.folder / 'hf'}"]
        return words if positions is None else [*words, f"model.max_position_embeddings={positions}"]


@dataclass(frozen=True)
class Study:
    """Folder, lengths and steps."""

    folder: Path
    length: int
    short: int
    """Steps at a sixteenth of the length."""
    long: int
    """Steps at the length or at a quarter of it."""
    extended: int
    """Steps after the extension."""

    def train(self, name: str, length: int, steps: int, seed: int, start: Sequence[str], *more: str) -> Run:
        """Train at ``length`` tokens and export the weights, unless the run is finished."""
        rows = max(ROWS, min(32, ROWS * self.length // length))
        train, validation = self.folder / f"train-{length}", self.folder / f"validation-{length}"
        write_set(train, max(self.short, self.long, self.extended) * rows, length, seed=1)
        write_set(validation, VALIDATION, length, seed=2)
        target = self.folder / variants.folder_name(name)
        words = [
            *COMMON,
            *start,
            f"data.prefixes=[{train}]",
            f"data.validation_prefixes=[{validation}]",
            f"data.seq_length={length}",
            f"trainer.steps={steps}",
            f"trainer.seed={seed}",
            f"trainer.global_batch_size={rows}",
            f"trainer.micro_batch_size={rows}",
            f"trainer.val_every_steps={self.every(steps)}",
            f"trainer.val_steps={VALIDATION // rows}",
        ]
        words = [word for word in words if word.partition("=")[0] not in {one.partition("=")[0] for one in more}]
        trained = variants.train(target, [*words, *more])
        if not (target / "hf").exists():
            run_program("scripts/export_hf.py", target, target / "hf")
        return Run(target, [record["val_loss"] for record in trained.validations])

    @staticmethod
    def every(steps: int) -> int:
        """Return the steps between validations: about eight per run."""
        return max(1, steps // 8)


# The page.


def _spread(losses: Sequence[float]) -> str:
    """Format mean, minimum and maximum over the seeds."""
    return f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


def _table(curves: Curves, every: int, first: int) -> Iterator[str]:
    """Yield the table of losses by step, a column per variant; ``first``: step of the first loss."""
    columns = [list(zip(*runs, strict=True)) for runs in curves.values()]
    rows = [(f"{first + every * n}", *map(_spread, losses)) for n, losses in enumerate(zip(*columns, strict=True))]
    yield from markdown_table(("step", *curves), rows)


def _page(args: argparse.Namespace, layouts: Curves, short: Sequence[float], extensions: Curves) -> Iterator[str]:
    """Yield the lines of the page in Markdown."""
    one, two = layouts.values()
    gaps = [abs(a - b) for runs in zip(one, two, strict=True) for a, b in zip(*runs, strict=True)]
    seeds = [max(losses) - min(losses) for losses in zip(*one, strict=True)]
    yield "# Retrieval with context parallelism and YaRN\n"
    yield f"{variants.conditions()} Command:\n"
    yield f"    {command_line()}\n"
    yield (
        f"A model of two layers (width 64, two heads) retrieves the values of {KEYS} keys from {args.length:,} tokens "
        f"(`benchmarks/methods/retrieval.py`). Losses are validation losses in nats per value, over {VALIDATION} "
        f"examples: mean (minimum to maximum) of {len(args.seeds)} seeds. Chance is ln {VALUES} = {CHANCE:.3f}.\n"
    )
    if args.write is not None:
        yield f"![Validation losses]({args.write.with_suffix('.png').name})\n"
    yield "## Context parallelism\n"
    yield (
        f"Each seed trains {args.steps[0]} steps at {args.length // 16} tokens, then {args.steps[1]} steps at "
        f"{args.length:,} tokens, in one process and with `trainer.cp=2`. The largest difference between both runs of "
        f"a seed is {max(gaps):.1e} nats. Seeds differ by up to {max(seeds):.3f} nats.\n"
    )
    yield from _table(layouts, Study.every(args.steps[1]), Study.every(args.steps[1]))
    yield f"\n## Extension from {args.length // FACTOR:,} to {args.length:,} tokens\n"
    yield (
        f"Each seed trains {args.steps[1]} more steps at {args.length // FACTOR:,} tokens. Its loss there is "
        f"{_spread(short)}. At {args.length:,} tokens, step 0 is the loss without training. `{YARN}` compares with "
        "unscaled frequencies and the same steps.\n"
    )
    yield from _table(extensions, Study.every(args.steps[2]), 0)


def draw(path: Path, study: Study, layouts: Curves, extensions: Curves) -> None:
    """Plot the validation losses of each seed; a panel per part."""
    parts = ((layouts, study.long, 1), (extensions, study.extended, 0))
    titles = (f"from {study.length // 16} to {study.length} tokens", f"from {study.length // FACTOR} to {study.length}")
    with figure(path, 1, 2, figsize=(11, 4.2)) as panels:
        for axes, (curves, steps, first), title in zip(panels, parts, titles, strict=True):
            for (name, runs), style in zip(curves.items(), ("-", "--"), strict=True):
                for number, losses in enumerate(runs):
                    steps_of = [study.every(steps) * (first + n) for n in range(len(losses))]
                    axes.plot(steps_of, losses, style, color=f"C{number}", label=f"{name}, seed {number + 1}")
            axes.axhline(CHANCE, color="gray", linewidth=0.8)
            axes.set(title=title, xlabel="step", ylabel="validation loss, nats per value")
            axes.legend(frameon=False, fontsize=8)
