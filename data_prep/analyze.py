"""Compute the difficulty of each sample of a dataset, for data.curriculum.

    python data_prep/analyze.py corpora/book_text_document \\
        --metric vocab_rarity --seq-length 2048
    python data_prep/analyze.py corpora/chat --metric length
    python data_prep/analyze.py corpora/chat --metric my_module.questions

The last line calls questions(ids: np.ndarray) -> float. Writes the folder
PREFIX_metrics/NAME-2048 (NAME for a fine-tuning set) with the metric of each
sample and the order from easy to difficult. Rerun the same command to resume;
--part K/N divides the work between machines.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: keep inspect.py in this folder from hiding the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    import megatron_llama  # noqa: F401  (ends the program at Ctrl-C while it imports the rest)

import argparse
import importlib
import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.pool import Pool
from data_prep.lib.run_options import PrepareProgress, RunOptions, cores
from megatron_llama.config.data_settings import MASK_SUFFIX
from megatron_llama.corpus.difficulty_index import MANIFEST, documents_of, index_folder, read_unit, unit_count
from megatron_llama.corpus.indexed_format import IndexedDataset, dataset_facts, same_dataset
from megatron_llama.system import files
from megatron_llama.system.errors import Stopped, UserError, run_main
from megatron_llama.system.programs import name_commands
from megatron_llama.system.rerun_command import ArgumentParser
from megatron_llama.system.signals import handle_signals

RARITY, LENGTH = "vocab_rarity", "length"
SHARD_TOKENS = 1 << 22
"""Tokens per shard: the unit of work between checkpoints. Results do not depend on the process."""
WORK = ".partial"
VALUES, COUNTS = "values", "counts"
TABLE = "rarity.npy"


@dataclass(frozen=True)
class Analysis:
    """A metric, the samples to measure and the output folder."""

    prefix: str
    metric: str
    """vocab_rarity, length, or the dotted path of a function."""
    name: str
    seq_length: int | None
    """None for a fine-tuning set, whose samples are its examples."""
    folder: Path
    units: int
    shard: int
    """Units (samples) per shard."""

    def identity(self) -> dict[str, Any]:
        """Return the options that must match to resume an analysis."""
        options = {"metric": self.metric, "seq_length": self.seq_length, "units": self.units, "shard": self.shard}
        return {**options, "dataset": dataset_facts(self.prefix)}

    @property
    def work(self) -> Path:
        """Folder of finished shards."""
        return self.folder / WORK

    @property
    def shards(self) -> int:
        return -(-self.units // self.shard)

    def file(self, kind: str, shard: int) -> Path:
        """Return the path of a shard's result."""
        return self.work / f"{kind}-{shard:07d}.npy"

    def missing(self, kind: str) -> list[int]:
        """Return the unfinished shards."""
        done = {*self.work.glob(f"{kind}-*.npy")}
        return [shard for shard in range(self.shards) if self.file(kind, shard) not in done]


def open_analysis(prefix: str, metric: str, name: str | None, seq_length: int | None, output: str | None) -> Analysis:
    """Build the analysis from the flags. Raises UserError."""
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    dataset, is_sft = IndexedDataset(prefix), files.path_exists(prefix + MASK_SUFFIX + ".idx")
    if is_sft and seq_length is not None:
        raise UserError(f"{prefix} is a fine-tuning dataset, measured per example: remove --seq-length")
    if not is_sft and seq_length is None:
        raise UserError(f"{prefix} is a pretraining dataset: write --seq-length N, the data.seq_length of your runs")
    if seq_length is not None and seq_length < 1:
        raise UserError(f"--seq-length must be at least 1, not {seq_length}")
    name = name or metric.rpartition(".")[2]
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"--name {name}: use letters, digits, _ and - only")
    units = unit_count(dataset.index, seq_length)
    if not units:
        raise UserError(
            f"{prefix} has {dataset.index.tokens():,} tokens, fewer than one sequence: write a smaller --seq-length"
        )
    shard = max(1, int(SHARD_TOKENS / (dataset.index.tokens() / units)))
    return Analysis(prefix, metric, name, seq_length, index_folder(prefix, name, seq_length, output), units, shard)


def load_function(path: str) -> Callable[[np.ndarray], float]:
    """Import a function by its dotted path, also from the working directory. Raises UserError."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(f"--metric {path}: write {RARITY}, {LENGTH}, or package.module.function")
    sys.path.append(os.getcwd())
    try:
        function: Callable[[np.ndarray], float] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--metric {path} cannot be imported: {error}") from None
    if not callable(function):
        raise UserError(f"--metric {path} is not a function")
    return function


def document_length(dataset: IndexedDataset, unit: int, seq_length: int | None) -> float:
    """Return the tokens of an example, or the document length averaged over a pretraining sample's tokens."""
    if seq_length is None:
        return float(dataset.index.lengths[unit])
    first, last, start = documents_of(dataset.index, unit, seq_length)
    lengths = dataset.index.lengths[first : last + 1].astype(np.int64)
    inside = np.diff(np.minimum(np.cumsum(lengths) - start, seq_length + 1), prepend=0)
    return float((inside * lengths).sum() / inside.sum())


def rarity(table: np.ndarray, ids: np.ndarray) -> float:
    """Return the rounded-down sum of the tokens' rarities, -log(frequency), as DeepSpeed's vocab_rarity."""
    return float(int(table[ids].sum()))


def count_shard(analysis: Analysis, shard: int) -> None:
    """Count the ids in a shard."""
    dataset, units = IndexedDataset(analysis.prefix), _units(analysis, shard)
    if analysis.seq_length is not None:
        tokens = dataset.tokens[units[0] * analysis.seq_length : (units[-1] + 1) * analysis.seq_length]
    else:
        tokens = np.concatenate([dataset.sequence(unit) for unit in units])
    _save(analysis.file(COUNTS, shard), np.bincount(tokens))


def measure_shard(analysis: Analysis, shard: int) -> None:
    """Compute the metric of each unit of a shard."""
    dataset, length, metric = IndexedDataset(analysis.prefix), analysis.seq_length, analysis.metric
    if metric == LENGTH:
        values = [document_length(dataset, unit, length) for unit in _units(analysis, shard)]
    else:
        function = partial(rarity, np.load(analysis.work / TABLE)) if metric == RARITY else load_function(metric)
        units = _units(analysis, shard)
        values = [_checked(function(read_unit(dataset, unit, length)), metric, unit) for unit in units]
    _save(analysis.file(VALUES, shard), np.array(values, dtype=np.float64))


def _checked(value: Any, metric: str, unit: int) -> float:
    """Return a metric's value as a float. Raises UserError if it is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"--metric {metric} returned {value!r} for sample {unit:,}: return a number") from None
    if not math.isfinite(number):
        raise UserError(f"--metric {metric} returned {value} for sample {unit:,}: return a finite number")
    return number


def _units(analysis: Analysis, shard: int) -> range:
    return range(shard * analysis.shard, min((shard + 1) * analysis.shard, analysis.units))


def _save(path: Path, values: np.ndarray) -> None:
    with files.atomic_open(path) as file:
        np.save(file, values)


def begin(analysis: Analysis, overwrite: bool) -> bool:
    """Create or reopen the work folder; return whether work remains. Raises UserError."""
    identity = json.loads(json.dumps(analysis.identity()))
    for path in (analysis.folder / MANIFEST, analysis.work / MANIFEST):
        try:
            saved = files.read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            saved = {}
        known = same_dataset(saved.get("dataset", {}), identity["dataset"])
        if known and all(saved.get(key) == identity[key] for key in identity if key != "dataset"):
            if path.parent == analysis.folder:
                return False
        elif not overwrite:
            contents = f"of {saved.get('metric')}" if known else f"of another version of {analysis.prefix}"
            raise UserError(f"{path.parent} has an analysis {contents}: write --overwrite, or another --name")
        else:
            with _locked(analysis.folder):
                files.remove_contents(analysis.folder)
    files.write_atomically(analysis.work / MANIFEST, json.dumps(identity, indent=1))
    return True


@contextmanager
def _locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock the folder of an analysis. Processes of its parts share it. Raises UserError."""
    try:
        with files.locked_folder(folder, shared=shared):
            yield
    except files.FolderTaken:
        raise UserError(f"another process writes {folder}: wait for its end, or write another --name") from None


def run(analysis: Analysis, part: tuple[int, int], workers: int) -> bool:
    """Compute the missing shards of part K of N; join all parts if none is missing.

    Returns whether the index is complete. Raises UserError, MachineError, Stopped.
    """
    if analysis.metric == RARITY and not (analysis.work / TABLE).exists():
        if not _map(analysis, COUNTS, count_shard, part, workers):
            return False
        counts = [np.load(analysis.file(COUNTS, shard)) for shard in range(analysis.shards)]
        total = np.zeros(max(map(len, counts)), dtype=np.int64)
        for one in counts:
            total[: len(one)] += one
        _save(analysis.work / TABLE, -np.log(np.maximum(total, 1) / total.sum()))
    if not _map(analysis, VALUES, measure_shard, part, workers):
        return False
    try:
        values = np.concatenate([np.load(analysis.file(VALUES, shard)) for shard in range(analysis.shards)])
    except FileNotFoundError:  # another process joined the parts
        return (analysis.folder / MANIFEST).exists()
    _save(analysis.folder / "values.npy", values)
    _save(analysis.folder / "order.npy", np.argsort(values, kind="stable"))
    files.write_atomically(analysis.folder / MANIFEST, json.dumps(analysis.identity(), indent=1))
    shutil.rmtree(analysis.work, ignore_errors=True)
    return True


def _map(
    analysis: Analysis, kind: str, work: Callable[[Analysis, int], None], part: tuple[int, int], workers: int
) -> bool:
    """Compute a part's missing shards; return whether all shards of all parts are done."""
    number, count = part
    missing = [shard for shard in analysis.missing(kind) if shard % count == number - 1]
    index = IndexedDataset(analysis.prefix).index
    share = index.tokens() * index.dtype.itemsize / analysis.shards
    shards = len(range(number - 1, analysis.shards, count))
    with PrepareProgress(int(shards * share), int((shards - len(missing)) * share)) as progress:
        for done, _ in enumerate(_results(partial(work, analysis), missing, workers), start=1):
            size = int(done * share)
            progress.update(int((shards - len(missing)) * share) + size, size, size // index.dtype.itemsize)
    return not analysis.missing(kind)


def _results(work: Callable[[int], None], shards: Sequence[int], workers: int) -> Iterator[None]:
    """Yield as forked workers finish each shard."""
    if workers == 1 or len(shards) < 2:
        yield from map(work, shards)
        return
    with Pool(min(workers, len(shards)), work) as pool:
        for _ in pool.run(iter(shards), lambda: None):
            yield


def _stop(number: int, frame: object) -> None:
    raise Stopped("finished shards are saved: rerun the same command to resume")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = ArgumentParser(
        description=name_commands(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="docs/guides/methods/curriculum.md",
    )
    add = parser.add_argument
    add("prefix", help="dataset path, with or without .bin or .idx")
    add("--metric", required=True, help=f"{RARITY}, {LENGTH} or a dotted path to a function of token ids")
    add("--seq-length", type=int, metavar="N", help="data.seq_length of your runs; not for fine-tuning datasets")
    add("--name", help="name in data.curriculum (default: last component of --metric)")
    text = "output folder (default: PREFIX_metrics); write it as index in data.curriculum"
    add("--output", metavar="FOLDER", help=text)
    add("--workers", type=int, default=cores(), help="processes (default: one per core)")
    add("--part", metavar="K/N", help="process part K of N; the last finished part joins all parts")
    add("--overwrite", action="store_true", help="replace an analysis of another metric or dataset")
    args = parser.parse_args(arguments)
    RunOptions(output_prefix=args.prefix, workers=args.workers, part=args.part)
    number, _, count = (args.part or "1/1").partition("/")
    analysis = open_analysis(args.prefix, args.metric, args.name, args.seq_length, args.output)
    if args.metric not in (RARITY, LENGTH):
        load_function(args.metric)
    if begin(analysis, args.overwrite):
        parts = _locked(analysis.folder, shared=True)
        with parts, handle_signals((signal.SIGTERM, signal.SIGUSR1), _stop):
            if not run(analysis, (int(number), int(count)), args.workers):
                rest = "other parts are unfinished. Rerun when they are done"
                print(f"{analysis.folder}: part {args.part} is done; {rest}")
                return 0
    values = np.load(analysis.folder / "values.npy", mmap_mode="r")
    percentiles = ", ".join(f"{np.percentile(values, q):g}" for q in (0, 10, 50, 90, 100))
    print(
        f"{analysis.folder}: {analysis.units:,} samples\n{analysis.name} percentiles 0, 10, 50, 90, 100: {percentiles}"
    )
    return 0


if __name__ == "__main__":
    run_main(main)
