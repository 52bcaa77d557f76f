"""What a curriculum gains: validation loss by tokens seen and processor time, beside plain training of as many tokens.

    python scripts/bench.py curriculum --input data/redpajama_mini --output runs/curriculum --write docs/results/NAME.md

A tokenizer of 384 pieces is trained on the text, four subsets are prepared and analyzed, and the demo's Llama trains on
them with each curriculum and each seed. A run that was killed goes on when this is started again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from megatron_llama.config import load_config
from megatron_llama.plan.batch_schedule import BatchSchedule
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics
from scripts.results import ROOT, commit, markdown_table, run_program

SUBSETS = ("arxiv", "c4", "github", "wikipedia")
LENGTH, BATCH, VALIDATIONS = 256, 8, 8
RECIPE = (
    f"model=llama_2m device=cpu trainer.dp=1 data.seq_length={LENGTH} trainer.global_batch_size={BATCH} "
    "trainer.micro_batch_size=4 optim.lr=1e-3 trainer.val_steps=12 logging.every_steps=50 logging.tensorboard=false "
    "logging.sample_prompts=[] data.tokenizer=null data.name=redpajama_mini checkpoint.save_last=false "
    "data.split='\"90,10,0\"'"
)
CURRICULA = {
    "none": "",
    "seqlen_truncate": "min_difficulty: 64, max_difficulty: 256, difficulty_step: 64",
    "seqlen_reshape": "min_difficulty: 64, max_difficulty: 256, difficulty_step: 64",
    "vocab_rarity": "difficulty_type: percentile, schedule_type: fixed_root, min_difficulty: 10, max_difficulty: 100, "
    "difficulty_step: 10",
}
"""By metric, without the total_curriculum_step, which is half of a plain run's steps."""


def describe(parser: argparse.ArgumentParser) -> None:
    """The sub-command's options."""
    parser.add_argument("--input", type=Path, required=True, help=f"folder with {', '.join(SUBSETS)} as .jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="keeps datasets and runs")
    parser.add_argument("--tokens", type=int, default=143_360, help="of each run (default 143360)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--write", type=Path, help="write the page here instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Prepares, trains, and prints or writes the page."""
    folder = args.output.resolve()
    prefixes = _prepare(args.input.resolve(), folder)
    found = {name: [_train(name, seed, args.tokens, folder, prefixes) for seed in args.seeds] for name in CURRICULA}
    page = _page(found, args)
    if args.write:
        write_atomically(args.write, page)
    else:
        sys.stdout.write(page)
    return 0


def _prepare(source: Path, folder: Path) -> list[str]:
    """Datasets and indexes; what is there already is left as it is."""
    tokenizer = folder / "pieces.model"
    if not tokenizer.exists():
        inputs = [source / subset for subset in SUBSETS]
        prefix = tokenizer.with_suffix("")
        words = ["--vocab-size", 384, "--model-prefix", prefix, "--sample-mib", 4]
        run_program("data_prep/train_tokenizer.py", "--input", *inputs, *words)
    for subset in SUBSETS:
        words = ["--tokenizer-model", tokenizer, "--append-eod", "--output-prefix", folder / subset]
        run_program("data_prep/preprocess.py", "--input", source / subset, *words)
        words = ["--metric", "vocab_rarity", "--seq-length", LENGTH]
        run_program("data_prep/analyze.py", folder / f"{subset}_text_document", *words)
    return [str(folder / f"{subset}_text_document") for subset in SUBSETS]


def _train(name: str, seed: int, tokens: int, folder: Path, prefixes: Sequence[str]) -> Mapping[str, list[float]]:
    """Trains, and returns tokens and loss of each validation, and the processor seconds and steps in lists of one."""
    total = tokens // (LENGTH * BATCH) // 2
    blend = ",".join(f"0.25,{prefix}" for prefix in prefixes)
    words = [*shlex.split(RECIPE), f"data.prefixes=[{blend}]", f"trainer.seed={seed}"]
    if name != "none":
        entry = f"{{metric: {name}, {CURRICULA[name]}, total_curriculum_step: {total}}}"
        words.append(f"data.curriculum=[{entry}]")
    schedule = BatchSchedule.of(load_config([*words, "trainer.steps=1000000"], ROOT / "conf"))
    steps = next(step for step in range(1, 10**6) if schedule.after(step).tokens >= tokens)
    where = folder / f"{name}-{seed}-{tokens}"
    done = where / "done.json"
    if not done.exists():
        words += [f"trainer.steps={steps}", f"trainer.val_every_steps={max(1, steps // VALIDATIONS)}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_program("train.py", *words, f"run.dir={where}", "checkpoint.resume=never")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        write_atomically(done, json.dumps(seconds))
    records = [record for record in read_metrics(where / METRICS_FILE) if record.get("val_loss")]
    return {
        "tokens": [float(record["consumed_tokens"]) for record in records],
        "loss": [float(record["val_loss"]) for record in records],
        "seconds": [float(read_json(done))],
        "steps": [float(steps)],
    }


def _page(found: Mapping[str, Sequence[Mapping[str, list[float]]]], args: argparse.Namespace) -> str:
    """The result in Markdown."""
    marks = [args.tokens * quarter // 4 for quarter in (1, 2, 3, 4)]
    plain = [np.interp(marks, seed["tokens"], seed["loss"]) for seed in found["none"]]
    rows = []
    for name, seeds in found.items():
        losses = [np.interp(marks, seed["tokens"], seed["loss"]) for seed in seeds]
        gaps = [float(own[-1] - other[-1]) for own, other in zip(losses, plain, strict=True)]
        means = [f"{statistics.fmean(float(loss[mark]) for loss in losses):.4f}" for mark in range(4)]
        gap = "" if name == "none" else f"{statistics.fmean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})"
        seconds = statistics.fmean(seed["seconds"][0] for seed in seeds)
        rows.append((name, f"{seeds[0]['steps'][0]:.0f}", *means, gap, f"{seconds:.0f}"))
    head = ("curriculum", "steps", *(f"at {mark:,} tokens" for mark in marks), "gap to none at the end", "CPU s a run")
    entries = [f"- {name}: {words}" for name, words in CURRICULA.items() if words]
    lines = [
        "# Curricula beside plain training\n",
        f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}, "
        f"commit {commit()}. llama_2m, {args.tokens:,} tokens a run, {len(args.seeds)} seeds, equal parts of "
        f"{', '.join(SUBSETS)}; validation on whole sequences of documents that are not trained on, in nats a token. "
        "Made by\n",
        f"    python scripts/bench.py curriculum --tokens {args.tokens} --seeds {' '.join(map(str, args.seeds))}\n",
        *markdown_table(head, rows),
        "\nThe difficulty rises over half of a plain run's steps:\n",
        *entries,
    ]
    return "\n".join(lines) + "\n"
