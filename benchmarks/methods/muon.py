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
from collections.abc import Mapping, Sequence

from benchmarks.methods import variants
from benchmarks.methods.variants import SUBSETS, Trained
from megatron_llama.system.tables import markdown_table

LENGTH, BATCH, VALIDATIONS, VOCABULARY = 256, 8, 24, 384
OPTIMIZERS = ("adamw", "muon")
Runs = Mapping[str, Sequence[Trained]]


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
        runs_by_name: dict[str, list[Trained]] = {name: [] for name in OPTIMIZERS}
        for seed in args.seeds:
            folders = {name: folder / variants.folder_name(model, name, args.lr, seed, steps) for name in OPTIMIZERS}
            if args.finished_only and not all((path / "done.json").exists() for path in folders.values()):
                continue
            for name, path in folders.items():
                words = [*_settings(model, name, args.lr), variants.blend(prefixes), f"trainer.seed={seed}"]
                words += [f"trainer.steps={steps}", f"trainer.val_every_steps={max(1, steps // VALIDATIONS)}"]
                runs_by_name[name].append(variants.train(path, words))
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


def _settings(model: str, optimizer: str, lr: float) -> list[str]:
    """Return the overrides of a run, except its data, seed and steps."""
    recipe = [word for word in variants.recipe(LENGTH, BATCH) if not word.startswith(("model=", "optim.lr="))]
    own = f"model={model} model.vocab_size={VOCABULARY} optim.name={optimizer} optim.lr={lr} trainer.precision=fp32"
    return [*shlex.split(own), *recipe]


def _rows(runs_by_name: Runs) -> list[tuple[str, ...]]:
    """Return a row for each optimizer of a model."""
    adamw = runs_by_name["adamw"]
    final = {name: [run.records[-1]["val_loss"] for run in runs] for name, runs in runs_by_name.items()}
    rows = list[tuple[str, ...]]()
    for name, runs in runs_by_name.items():
        whole = [float(run.records[-1]["consumed_tokens"]) for run in runs]
        reached = [tokens_to(loss, run) for loss, run in zip(final["adamw"], runs, strict=True)]
        known = [tokens / all_ for tokens, all_ in zip(reached, whole, strict=True) if tokens is not None]
        spread = f"{statistics.fmean(known):.0%} ({min(known):.0%} to {max(known):.0%})" if known else "never"
        missing = f", {len(reached) - len(known)} never" if known and len(known) < len(reached) else ""
        times = [run.seconds / other.seconds for run, other in zip(runs, adamw, strict=True)]
        losses = f"{statistics.fmean(final[name]):.4f}"
        gap = "" if name == "adamw" else variants.gap(final[name], final["adamw"])
        tokens = "100%" if name == "adamw" else spread + missing
        rows.append((name, f"{whole[0]:,.0f}", losses, gap, tokens, f"{statistics.fmean(times):.2f}"))
    return rows


def _page(by_model: Mapping[str, Runs], args: argparse.Namespace) -> str:
    """Return the page in Markdown."""
    head = ("", "tokens", "final validation loss", "gap to adamw", "tokens to AdamW's final loss", "CPU s, adamw = 1")
    models = " ".join(f"{model}:{steps}" for model, steps in args.models)
    lines = [
        "# Muon compared with AdamW\n",
        f"{variants.conditions()} Precision fp32, steps of {BATCH} sequences of {LENGTH} tokens, lr {args.lr:g} for "
        f"both, cosine to a tenth, vocabulary of {VOCABULARY} tokens; equal parts of {', '.join(SUBSETS)}; validation "
        f"on held-out documents, in nats per token, {VALIDATIONS} times per run. {variants.describe_statistics(0)} "
        "Command:\n",
        f"    OMP_NUM_THREADS=1 python -m benchmarks muon --input REDPAJAMA_FOLDER --output DIR --models {models} "
        f"--lr {args.lr:g} --seeds {' '.join(map(str, args.seeds))}\n",
    ]
    for model, runs_by_name in by_model.items():
        lines += [f"{model}, {len(runs_by_name['adamw'])} seeds:\n", *markdown_table(head, _rows(runs_by_name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _model_and_steps(text: str) -> tuple[str, int]:
    """Parse MODEL:STEPS."""
    model, _, steps = text.partition(":")
    if not steps.isdigit() or int(steps) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a model of conf/model and its steps, such as llama_15m:240")
    return model, int(steps)
