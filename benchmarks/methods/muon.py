"""Compare Muon with AdamW: tokens until Muon's validation loss reaches AdamW's final one.

    OMP_NUM_THREADS=1 python -m benchmarks muon \\
        --input data/redpajama_mini --output runs/muon --models llama_15m:240 llama_56m:80

Trains a tokenizer of 384 tokens, and each model with both optimizers on four subsets. All runs of a model have the same
steps and schedule. The models have the vocabulary of the tokenizer, so that the blocks have most of the parameters.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Mapping

from benchmarks.methods import variants
from benchmarks.methods.variants import SUBSETS, Trained
from megatron_llama.system.tables import markdown_table

LENGTH, BATCH, VALIDATIONS, VOCABULARY = 256, 8, 24, 384
VARIANTS = {
    "adamw": "optim.name=adamw optim.lr={lr:g}",
    "adamw, lr x4": "optim.name=adamw optim.lr={four:g}",
    "muon": "optim.name=muon optim.lr={lr:g}",
    "muon, matrix_lr x4": "optim.name=muon optim.lr={lr:g} optim.matrix_lr={four:g}",
}
"""Settings by name. ``four`` is four times ``lr``."""
Runs = Mapping[str, Mapping[int, Trained]]
"""Runs by variant and seed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    variants.add_arguments(parser)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of both optimizers (default 1e-3)")
    parser.add_argument(
        "--models",
        type=_model_and_steps,
        nargs="+",
        default=[("llama_15m", 240)],
        metavar="MODEL:STEPS",
        help="models of conf/model and the steps of their runs (default llama_15m:240)",
    )
    parser.add_argument("--finished-only", action="store_true", help="train nothing: report the finished runs")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page."""
    folder = args.output.resolve()
    prefixes = [] if args.finished_only else variants.prepare(args.input.resolve(), folder)
    by_model: dict[str, Runs] = {}
    for model, steps in args.models:
        runs_by_name: dict[str, dict[int, Trained]] = {name: {} for name in VARIANTS}
        for seed in args.seeds:
            for name in VARIANTS:
                path = folder / variants.folder_name(model, name, args.lr, seed, steps)
                if args.finished_only and not (path / "done.json").exists():
                    continue
                words = [*_settings(model, name, args.lr), variants.blend(prefixes), f"trainer.seed={seed}"]
                words += [f"trainer.steps={steps}", f"trainer.val_every_steps={max(1, steps // VALIDATIONS)}"]
                runs_by_name[name][seed] = variants.train(path, words)
        if runs_by_name["adamw"]:
            by_model[f"{model}, {steps} steps"] = runs_by_name
    variants.publish(_page(by_model, args), args.write)
    return 0


def tokens_to(loss: float, run: Trained) -> float | None:
    """Return the tokens at which a run's validation loss reaches ``loss``; None: never.

    Interpolates between the first validation at or below ``loss`` and the validation before it.
    """
    before: tuple[float, float] | None = None
    for record in run.validations:
        tokens, reached = float(record["consumed_tokens"]), float(record["val_loss"])
        if reached <= loss:
            if before is None:
                return tokens
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] + share * (tokens - before[0])
        before = (tokens, reached)
    return None


def _settings(model: str, variant: str, lr: float) -> list[str]:
    """Return the overrides of a run, except its data, seed and steps."""
    recipe = [word for word in variants.recipe(LENGTH, BATCH) if not word.startswith(("model=", "optim.lr="))]
    chosen = VARIANTS[variant].format(lr=lr, four=4 * lr)
    return [*shlex.split(f"model={model} model.vocab_size={VOCABULARY} {chosen} trainer.precision=fp32"), *recipe]


def _rows(runs_by_name: Runs) -> list[tuple[str, ...]]:
    """Return a row for each variant of a model, from the seeds that AdamW finished too."""
    adamw, rows = runs_by_name["adamw"], list[tuple[str, ...]]()
    for name, runs in runs_by_name.items():
        pairs = [(run, adamw[seed]) for seed, run in runs.items() if seed in adamw]
        if not pairs:
            continue
        final, reference = ([_final(each[side]) for each in pairs] for side in (0, 1))
        tokens = [tokens_to(loss, run) for loss, (run, _) in zip(reference, pairs, strict=True)]
        whole = pairs[0][1].validations[-1]["consumed_tokens"]
        known = [reached / whole for reached in tokens if reached is not None]
        share = f"{statistics.fmean(known):.0%} ({min(known):.0%} to {max(known):.0%})" if known else "not reached"
        if known and len(known) < len(tokens):
            share += f", not reached by {len(tokens) - len(known)}"
        times = statistics.fmean(run.seconds / other.seconds for run, other in pairs)
        gap = "" if name == "adamw" else variants.gap(final, reference)
        row = (name, f"{len(pairs)}", f"{statistics.fmean(final):.4f}", gap, share if gap else "100%", f"{times:.2f}")
        rows.append(row)
    return rows


def _final(run: Trained) -> float:
    """Return the loss of the last validation."""
    return float(run.validations[-1]["val_loss"])


def _page(by_model: Mapping[str, Runs], args: argparse.Namespace) -> str:
    """Return the page in Markdown."""
    head = ("", "seeds", "final validation loss", "gap to adamw", "tokens to AdamW's final loss", "CPU s, adamw = 1")
    models = " ".join(f"{model}:{steps}" for model, steps in args.models)
    lines = [
        "# Muon compared with AdamW\n",
        f"{variants.conditions()}\n",
        f"Precision fp32, steps of {BATCH} sequences of {LENGTH} tokens, lr {args.lr:g}, cosine to a tenth.",
        f"Vocabulary of {VOCABULARY} tokens, equal parts of {', '.join(SUBSETS)}.",
        f"Validation on held-out documents, in nats per token, about {VALIDATIONS} times per run.",
        variants.describe_statistics(0),
        "Command:\n",
        f"    OMP_NUM_THREADS=1 python -m benchmarks muon --input REDPAJAMA_FOLDER --output DIR --models {models} "
        f"--lr {args.lr:g} --seeds {' '.join(map(str, args.seeds))}\n",
    ]
    for model, runs_by_name in by_model.items():
        lines += [f"{model}:\n", *markdown_table(head, _rows(runs_by_name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _model_and_steps(text: str) -> tuple[str, int]:
    """Parse MODEL:STEPS."""
    model, _, steps = text.partition(":")
    if not steps.isdigit() or int(steps) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a model of conf/model and its steps, such as llama_15m:240")
    return model, int(steps)
