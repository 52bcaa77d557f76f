"""Runs, statistics and tables shared by the studies of methods.

All variants of a seed train one after another, so that other load on the machine affects all of them. Finished runs are
stored in the output folder and are not repeated. An interrupted run restarts from scratch, as its CPU time is measured.
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
    """Return overrides that train the demo's Llama in one process, on equal parts of SUBSETS.

    A step has ``batch`` sequences of ``length`` tokens. Validation uses 24,576 tokens of held-out documents.
    """
    return shlex.split(
        f"model=llama_2m device=cpu trainer.dp=1 data.seq_length={length} trainer.global_batch_size={batch} "
        f"trainer.micro_batch_size={batch // 2} optim.lr=1e-3 trainer.val_steps=12 logging.every_steps=50 "
        "logging.tensorboard=false logging.sample_prompts=[] data.tokenizer=null data.name=redpajama_mini "
        "checkpoint.save_last=false data.split='\"90,10,0\"'"
    )


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that trains on SUBSETS."""
    parser.add_argument("--input", type=Path, required=True, help=f"folder with {', '.join(SUBSETS)} as .jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of datasets and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (default 1 2 3)")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")


def prepare(source: Path, folder: Path) -> list[Path]:
    """Prepare a tokenizer of 384 tokens and the datasets of SUBSETS, unless they exist; return their prefixes."""
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
    """Return the override of data.prefixes with equal weights."""
    return f"data.prefixes=[{','.join(f'{1 / len(prefixes)},{prefix}' for prefix in prefixes)}]"


def train(folder: Path, words: Sequence[str], may_diverge: bool = False) -> Trained:
    """Train unless ``folder`` has a finished run; return its results.

    Raises:
        CalledProcessError: if the run fails, unless ``may_diverge``.
    """
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
    """Join the parts to a folder name of lowercase letters, digits, ``_`` and ``-``."""
    return "-".join(re.sub("[^a-z0-9]+", "_", str(part).lower()) for part in parts)


def gap(losses: Iterable[float], plain: Iterable[float]) -> str:
    """Format mean, minimum and maximum of the differences by seed."""
    gaps = [loss - reference for loss, reference in zip(losses, plain, strict=True)]
    spread = f" ({min(gaps):+.4f} to {max(gaps):+.4f})" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.4f}{spread}"


def describe_statistics(start: float) -> str:
    """Return the explanation of a page's gaps and CPU seconds."""
    startup = f"minus the {start:.0f} s of a run of one step (startup and validation)" if start else "with startup"
    return (
        "Gaps and shares compare with the plain run of the same seed: mean, minimum and maximum over seeds. CPU "
        f"seconds are measured with one thread, {startup}."
    )


def comparison(
    head: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    runs_by_name: Mapping[str, Sequence[Trained]],
    start: float,
) -> Iterator[str]:
    """Yield the lines of a table of variants with FLOPs, final losses and CPU seconds.

    Args:
        head: titles of additional columns.
        columns: cells of the additional columns, by variant.
        found: runs of each variant by seed; the first variant is the plain one.
        start: CPU seconds of startup and validation, to subtract.
    """
    losses = {name: [run.records[-1]["val_loss"] for run in runs] for name, runs in runs_by_name.items()}
    flops = {name: runs[0].flops for name, runs in runs_by_name.items()}
    seconds = {name: [run.seconds - start for run in runs] for name, runs in runs_by_name.items()}
    plain, *_ = runs_by_name
    rows = []
    for name in runs_by_name:
        shares = [time / other for time, other in zip(seconds[name], seconds[plain], strict=True)]
        row = [name, *columns[name], f"{flops[name] / 1e12:.2f} ({flops[name] / flops[plain]:.0%})"]
        row += [f"{statistics.fmean(losses[name]):.4f}", gap(losses[name], losses[plain]) if name != plain else ""]
        row.append(f"{statistics.fmean(seconds[name]):.0f}")
        row.append(f"{statistics.fmean(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})" if name != plain else "")
        rows.append(row)
    titles = ("TFLOP", "validation loss", f"gap to {plain}", "CPU s", f"share of {plain}'s")
    yield from markdown_table(("", *head, *titles), rows)


def conditions() -> str:
    """Return date, machine, versions and commit, for a page of results."""
    name = processor().get("model name", platform.machine())
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core"))
    return (
        f"{date.today()}, commit {commit()}, {os.cpu_count()} cores of {name}, shared with other work (load "
        f"{os.getloadavg()[0]:.0f} at the end); Python {platform.python_version()}, {versions}."
    )


def publish(page: str, path: Path | None) -> None:
    """Write the page to ``path``, or print it."""
    if path is None:
        sys.stdout.write(page)
    else:
        write_atomically(path, page)
