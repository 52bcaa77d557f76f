"""Shared by the studies of methods: runs with their processor time, gaps over seeds, tables.

The variants of a seed are trained one after the other, so that other load on the machine meets them alike. A run that
is done is kept below the output folder and not repeated; one that was killed begins anew, as its time is to be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results import commit, run_program
from megatron_llama.devices.processor import processor
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.system.tables import markdown_table
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics

SUBSETS = ("arxiv", "c4", "github", "wikipedia")


def recipe(length: int, batch: int) -> list[str]:
    """Overrides: the demo's Llama in one process on equal parts of SUBSETS, ``batch`` sequences of ``length`` tokens a
    step; validation on documents that are not trained on, 96 sequences of 256 or as many tokens."""
    return shlex.split(
        f"model=llama_2m device=cpu trainer.dp=1 data.seq_length={length} trainer.global_batch_size={batch} "
        f"trainer.micro_batch_size={batch // 2} optim.lr=1e-3 trainer.val_steps=12 logging.every_steps=50 "
        "logging.tensorboard=false logging.sample_prompts=[] data.tokenizer=null data.name=redpajama_mini "
        "checkpoint.save_last=false data.split='\"90,10,0\"'"
    )


@dataclass(frozen=True)
class Trained:
    """What a run has left."""

    seconds: float
    """Processor seconds of all its processes, from the start of the first."""
    records: Sequence[dict[str, Any]]
    """Of metrics.jsonl, one for each step."""

    @property
    def flops(self) -> float:
        """What the steps have computed, as they count it."""
        return sum(1e12 * record["tflops_per_device"] * record["step_time_s"] for record in self.records)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The records of the steps that validated."""
        return [record for record in self.records if record.get("val_loss") is not None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a sub-command that trains on SUBSETS."""
    parser.add_argument("--input", type=Path, required=True, help=f"folder with {', '.join(SUBSETS)} as .jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="keeps datasets and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--write", type=Path, help="write the page here instead of printing it")


def prepare(source: Path, folder: Path) -> list[Path]:
    """Prefixes of the datasets of SUBSETS, with a tokenizer of 384 pieces; what is there already is left as it is."""
    tokenizer = folder / "pieces.model"
    if not tokenizer.exists():
        inputs = [source / subset for subset in SUBSETS]
        words = ["--vocab-size", 384, "--model-prefix", tokenizer.with_suffix(""), "--sample-mib", 4]
        run_program("data_prep/train_tokenizer.py", "--input", *inputs, *words)
    for subset in SUBSETS:
        words = ["--tokenizer-model", tokenizer, "--append-eod", "--output-prefix", folder / subset]
        run_program("data_prep/preprocess.py", "--input", source / subset, *words)
    return [folder / f"{subset}_text_document" for subset in SUBSETS]


def blend(prefixes: Sequence[Path]) -> str:
    """data.prefixes with equal weights."""
    return f"data.prefixes=[{','.join(f'{1 / len(prefixes)},{prefix}' for prefix in prefixes)}]"


def train(folder: Path, words: Sequence[str], may_diverge: bool = False) -> Trained:
    """Trains, unless ``folder`` has the run. Raises CalledProcessError where it fails, but for one that
    ``may_diverge``: how far it came is a result."""
    done = folder / "done.json"
    if not done.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            run_program("train.py", *words, f"run.dir={folder}", "checkpoint.resume=never")
        except subprocess.CalledProcessError:
            if not may_diverge:
                raise
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        write_atomically(done, json.dumps(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return Trained(float(read_json(done)), read_metrics(folder / METRICS_FILE))


def folder_name(*parts: object) -> str:
    """A name without blanks for what has been asked for."""
    return "-".join(re.sub("[^a-z0-9]+", "_", str(part).lower()) for part in parts)


def gap(own: Iterable[float], plain: Iterable[float]) -> str:
    """The mean of the differences by seed, the smallest and the largest."""
    gaps = [one - other for one, other in zip(own, plain, strict=True)]
    spread = f" ({min(gaps):+.4f} to {max(gaps):+.4f})" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.4f}{spread}"


def how_compared(start: float) -> str:
    """What the gaps and seconds of a page are."""
    less = f"less the {start:.0f} of a run of one step, which starts and validates" if start else "start and all"
    return (
        "Gaps and shares are those of a seed to the plain run of the same seed: their mean, the smallest and the "
        f"largest. Processor seconds are those of one thread, {less}."
    )


def comparison(
    head: Sequence[str], told: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[Trained]], start: float
) -> Iterator[str]:
    """The lines of a table of variants, the first of which is the plain one: what is ``told`` of each under ``head``,
    FLOPs, losses after the last step, and processor seconds without those of a start."""
    losses = {name: [run.records[-1]["val_loss"] for run in runs] for name, runs in found.items()}
    flops = {name: runs[0].flops for name, runs in found.items()}
    seconds = {name: [run.seconds - start for run in runs] for name, runs in found.items()}
    plain, *_ = found
    rows = []
    for name in found:
        shares = [own / other for own, other in zip(seconds[name], seconds[plain], strict=True)]
        row = [name, *told[name], f"{flops[name] / 1e12:.2f} ({flops[name] / flops[plain]:.0%})"]
        row += [f"{statistics.fmean(losses[name]):.4f}", gap(losses[name], losses[plain]) if name != plain else ""]
        row.append(f"{statistics.fmean(seconds[name]):.0f}")
        row.append(f"{statistics.fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if name != plain else "")
        rows.append(row)
    columns = ("TFLOP", "validation loss", f"gap to {plain}", "CPU s", f"of {plain}'s")
    yield from markdown_table(("", *head, *columns), rows)


def conditions() -> str:
    """Date, machine, versions and commit, for a page of results."""
    name = processor().get("model name", platform.machine())
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core"))
    return (
        f"{date.today()}, commit {commit()}, {os.cpu_count()} cores of {name}, shared with other work (load "
        f"{os.getloadavg()[0]:.0f} at the end); Python {platform.python_version()}, {versions}."
    )


def publish(page: str, path: Path | None) -> None:
    """Writes the page, or prints it."""
    if path is None:
        sys.stdout.write(page)
    else:
        write_atomically(path, page)
