"""Train a small Llama with a method and without it: validation loss, FLOPs, processor time and bytes over seeds.

    OMP_NUM_THREADS=1 python -m benchmarks muon --input data/redpajama_mini --output runs/muon

Each study of studies.toml is a command. The runs of a seed follow each other, so that other load on the machine affects
all of them. A finished run is stored and not repeated. An interrupted run restarts from scratch, as its time is
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, command_line, conditions, publish, read_studies, run_program
from megatron_llama.config import load_config
from megatron_llama.plan import Plan, resolve
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.tables import markdown_table
from megatron_llama.tools.forecast.traffic import step_operations, totals, wire_bytes
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

SUBSETS = ("arxiv", "c4", "github", "wikipedia")
RECIPE = (
    "device=cpu trainer.val_steps=12 logging.every_steps=50 logging.tensorboard=false logging.sample_prompts=[] "
    "data.tokenizer=null data.name=redpajama_mini checkpoint.save_last=false data.split='\"90,10,0\"' model=llama_2m "
    "optim.lr=1e-3"
)
VALIDATIONS = 8
"""Validations in a run."""


@dataclass(frozen=True)
class Study:
    """A study of studies.toml."""

    title: str
    variants: Mapping[str, str]
    recipe: str = "trainer.dp=1 data.seq_length=256 trainer.global_batch_size=8 trainer.micro_batch_size=4"
    steps: int = 140
    work_of: Mapping[str, str] = field(default_factory=dict)


STUDIES = {name: Study(**study) for name, study in read_studies().items()}


@dataclass(frozen=True)
class Trained:
    """Results of a finished run."""

    seconds: float
    """CPU seconds of all processes of the run."""
    records: Sequence[dict[str, Any]]
    """Records of metrics.jsonl, one per step."""

    @property
    def flops(self) -> float:
        """FLOPs of all steps, from the logged TFLOP/s and step times."""
        return sum(1e12 * record["tflops_per_device"] * record["step_time_s"] for record in self.records)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Records of the steps with a validation."""
        return [record for record in self.records if record.get("val_loss") is not None]

    @property
    def loss(self) -> float:
        """Last validation loss; NaN if the run diverged before one."""
        return float(self.validations[-1]["val_loss"]) if self.validations else math.nan

    def tokens_to(self, loss: float) -> float | None:
        """Return the tokens at which the validation loss reaches ``loss``, interpolated; None: never."""
        before: tuple[float, float] | None = None
        for record in self.validations:
            tokens, reached = float(record["consumed_tokens"]), float(record["val_loss"])
            if reached <= loss:
                if before is None:
                    return tokens
                return before[0] + (before[1] - loss) / (before[1] - reached) * (tokens - before[0])
            before = (tokens, reached)
        return None


def settings(study: Study, variant: str, steps: int) -> list[str]:
    """Return the overrides of a run of a variant, given by its overrides; without data and seed."""
    words = shlex.split(f"{RECIPE} {study.recipe} {variant}")
    return [*words, f"trainer.steps={steps}", f"trainer.val_every_steps={max(1, steps // VALIDATIONS)}"]


@cache
def _resolve(words: tuple[str, ...]) -> Plan:
    config = load_config([*words, "data.mock=true", "data.prefixes=[]"], ROOT / "conf")
    return resolve(config, config.trainer.dp or 1)


def _plan(study: Study, variant: str, steps: int) -> Plan:
    """Return the plan on mock data, which has no vocab_rarity; a step has the same tokens with and without it."""
    return _resolve(tuple(settings(study, "" if "vocab_rarity" in variant else variant, steps)))


def layer_tokens(study: Study, variant: str, steps: int) -> int:
    """Return the sum over layers of the tokens that they process in a run."""
    plan = _plan(study, variant, steps)
    if plan.random_ltd is None:
        return plan.batches.after(steps).tokens * plan.model.num_hidden_layers
    return plan.random_ltd.layer_tokens(steps, plan.batches)


def steps_of(study: Study, name: str) -> int:
    """Return the steps of a variant: the study's, or the fewest with the layer tokens of ``work_of``."""
    if name not in study.work_of:
        return study.steps
    variant = study.variants[name]
    tokens, low, high = layer_tokens(study, study.variants[study.work_of[name]], study.steps), 0, 1
    while layer_tokens(study, variant, high) < tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layer_tokens(study, variant, middle) < tokens else (low, middle)
    return high


def sent(study: Study, variant: str) -> float:
    """Return the MB that a rank sends along dp in a step."""
    operations = step_operations(_plan(study, variant, study.steps), 0, 0)
    amounts = totals(each for each in operations if each.axis == "dp")
    return sum(wire_bytes(key, amount.payload) for key, amount in amounts.items()) / 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a study."""
    parser.add_argument("--input", type=Path, required=True, help=f"folder with {', '.join(SUBSETS)} as .jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of datasets and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (default 1 2 3)")
    parser.add_argument("--steps", type=int, help="steps of the first variant (default: the study's)")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")
    parser.add_argument("overrides", nargs="*", help="changes of the recipe, as for train.py")


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print or write the page; return 1 if a program failed."""
    study, folder = STUDIES[args.command], args.output.resolve()
    recipe = shlex.join([*shlex.split(study.recipe), *args.overrides])
    study = replace(study, recipe=recipe, steps=args.steps or study.steps)
    runs: dict[str, list[Trained]] = {name: [] for name in study.variants}
    try:
        data = prepare(args.input.resolve(), folder)
        for seed in args.seeds:
            for name, variant in study.variants.items():
                steps = steps_of(study, name)
                words = [*settings(study, variant, steps), data, f"trainer.seed={seed}"]
                runs[name].append(train(folder / folder_name(name, steps, seed), words))
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{shlex.join(map(str, error.cmd[1:]))} ended with status {error.returncode}\n")
        return 1
    page = "\n".join([f"# {study.title}\n", f"{conditions()}\n", f"    {command_line()}\n", *table(study, runs)]) + "\n"
    publish(page, args.write)
    return 0


def prepare(source: Path, folder: Path) -> str:
    """Prepare a tokenizer of 384 tokens and the datasets of SUBSETS, unless they exist; return data.prefixes."""
    tokenizer = folder / "pieces.model"
    if not tokenizer.exists():
        inputs = [source / subset for subset in SUBSETS]
        words = ["--vocab-size", 384, "--model-prefix", tokenizer.with_suffix(""), "--sample-mib", 4]
        run_program("data_prep/train_tokenizer.py", "--input", *inputs, *words)
    for subset in SUBSETS:
        words = ["--tokenizer-model", tokenizer, "--append-eod", "--output-prefix", folder / subset]
        run_program("data_prep/preprocess.py", "--input", source / subset, *words)
        prefix = folder / f"{subset}_text_document"
        run_program("data_prep/analyze.py", prefix, "--metric", "vocab_rarity", "--seq-length", 256)
    return f"data.prefixes=[{','.join(f'{1 / len(SUBSETS)},{folder / each}_text_document' for each in SUBSETS)}]"


def train(folder: Path, words: Sequence[str]) -> Trained:
    """Train unless ``folder`` has a finished run; return its results. Raises CalledProcessError."""
    done = folder / "done.json"
    if not done.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_program("train.py", *words, f"run.dir={folder}", "checkpoint.resume=never")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        write_atomically(done, json.dumps(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return Trained(float(read_json(done)), read_metrics(folder / METRICS_FILE))


def folder_name(*parts: object) -> str:
    """Join the parts to a folder name of lowercase letters, digits, ``_`` and ``-``."""
    return "-".join(re.sub("[^a-z0-9]+", "_", str(part).lower()) for part in parts)


def gap(losses: Iterable[float], plain: Iterable[float]) -> str:
    """Format mean, minimum and maximum of the differences by seed."""
    gaps = [loss - reference for loss, reference in zip(losses, plain, strict=True)]
    spread = f" ({min(gaps):+.4f} to {max(gaps):+.4f})" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.4f}{spread}"


def table(study: Study, runs_by_name: Mapping[str, Sequence[Trained]]) -> Iterator[str]:
    """Yield the lines of the table; gaps and shares compare with the first variant's run of the same seed."""
    first, plain = next(iter(runs_by_name.items()))
    rows = []
    for name, runs in runs_by_name.items():
        losses, flops = [run.loss for run in runs], runs[0].flops
        pairs = list(zip(runs, plain, strict=True))
        tokens = [run.tokens_to(other.loss) for run, other in pairs]
        reached = [each / pairs[0][1].records[-1]["consumed_tokens"] for each in tokens if each is not None]
        shares = [run.seconds / other.seconds for run, other in pairs]
        row = [name, f"{len(runs[0].records)}", f"{flops / 1e12:.2f} ({flops / plain[0].flops:.0%})"]
        row += [f"{statistics.fmean(losses):.4f}", gap(losses, [run.loss for run in plain]) if name != first else ""]
        row += [f"{statistics.fmean(reached):.0%} of {len(reached)} seeds" if reached else "not reached"]
        row += [f"{sent(study, study.variants[name]):.2f}", f"{statistics.fmean(run.seconds for run in runs):.0f}"]
        row += [f"{statistics.fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if name != first else ""]
        rows.append(row)
    head = ("", "steps", "TFLOP", "validation loss", f"gap to {first}", f"tokens to {first}'s loss", "MB sent per step")
    yield from markdown_table((*head, "CPU s", f"share of {first}'s"), rows)
