"""Measures how difficult each sample of an indexed dataset is, for data.curriculum.

    python data_prep/analyze.py datasets/book_text_document --metric vocab_rarity --seq-length 2048
    python data_prep/analyze.py datasets/chat --metric length              (a fine-tuning set: its examples)
    python data_prep/analyze.py datasets/chat --metric mine.questions      (def questions(ids: np.ndarray) -> float)

Writes PREFIX_metrics/NAME-2048/ (a fine-tuning set's NAME/): the metric of each sample, and the samples from easy to
difficult. Killed at any moment, the same command goes on where it was; with --part K/N several machines share the work.
"""

import os
import sys

if __package__ in (None, ""):  # run as a script: this folder holds inspect.py, which must not hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from megatron_llama.system.installed import report_missing_packages

    report_missing_packages()

import argparse
import importlib
import json
import math
import multiprocessing
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.lib.job import ProgressBar, RunOptions, cores
from megatron_llama.config.data_settings import MASK_SUFFIX
from megatron_llama.corpus.difficulty_index import MANIFEST, documents_of, index_folder, read_unit, unit_count
from megatron_llama.corpus.indexed_format import IndexedDataset, dataset_facts, same_dataset
from megatron_llama.system.errors import MachineError, Stopped, UserError, run_main
from megatron_llama.system.files import atomic_open, read_json, write_atomically
from megatron_llama.system.signals import exit_with_parent, handle_signals

RARITY, LENGTH = "vocab_rarity", "length"
SHARD_TOKENS = 1 << 22
"""About so many tokens are measured at a time, and may be lost by a kill: a shard. Whoever does it, it is the same."""
WORK = ".partial"
VALUES, COUNTS = "values", "counts"
TABLE = "rarity.npy"


@dataclass(frozen=True)
class Analysis:
    """What is measured, and where the answer goes."""

    prefix: str
    metric: str
    """vocab_rarity, length, or the dotted path of a function."""
    name: str
    seq_length: int | None
    """None for a fine-tuning set, whose samples are its examples."""
    folder: Path
    units: int
    shard: int
    """Units of a shard."""

    def identity(self) -> dict[str, Any]:
        """By what it is known that work goes on with the same analysis."""
        facts = dataset_facts(self.prefix)
        found = {"metric": self.metric, "seq_length": self.seq_length, "units": self.units, "shard": self.shard}
        return {**found, "dataset": facts}

    @property
    def work(self) -> Path:
        """The folder of what is done so far."""
        return self.folder / WORK

    @property
    def shards(self) -> int:
        return -(-self.units // self.shard)

    def file(self, kind: str, shard: int) -> Path:
        """What came of a shard."""
        return self.work / f"{kind}-{shard:07d}.npy"

    def missing(self, kind: str) -> list[int]:
        """The shards that nobody has done."""
        done = {path.name for path in self.work.glob(f"{kind}-*.npy")}
        return [shard for shard in range(self.shards) if self.file(kind, shard).name not in done]


def open_analysis(prefix: str, metric: str, name: str | None, seq_length: int | None, output: str | None) -> Analysis:
    """The analysis that the flags ask for. Raises UserError."""
    prefix = prefix.removesuffix(".bin").removesuffix(".idx")
    dataset, is_sft = IndexedDataset(prefix), os.path.exists(prefix + MASK_SUFFIX + ".idx")
    if is_sft and seq_length is not None:
        raise UserError(f"{prefix} is a fine-tuning set, whose examples are measured whole: leave out --seq-length")
    if not is_sft and seq_length is None:
        raise UserError(f"{prefix} is cut into sequences: write --seq-length, data.seq_length of the runs to come")
    if seq_length is not None and seq_length < 1:
        raise UserError(f"--seq-length must be at least 1, not {seq_length}")
    name = name or metric.rpartition(".")[2]
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"--name {name}: write letters, digits, _ and - only; it names a folder and a metric")
    units = unit_count(dataset.index, seq_length)
    if not units:
        raise UserError(f"{prefix} has {dataset.index.tokens():,} tokens, which is less than a sequence")
    tokens = dataset.index.tokens() / units
    shard = max(1, int(SHARD_TOKENS / tokens))
    return Analysis(prefix, metric, name, seq_length, index_folder(prefix, name, seq_length, output), units, shard)


def load_function(path: str) -> Callable[[np.ndarray], float]:
    """The function of a dotted path; modules in the working folder are found too. Raises UserError."""
    module, _, name = path.rpartition(".")
    if not module:
        raise UserError(f"--metric {path}: write {RARITY}, {LENGTH}, or package.module.function")
    sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--metric {path} can't be imported: {error}") from None
    if not callable(function):
        raise UserError(f"--metric {path} is no function")
    found: Callable[[np.ndarray], float] = function
    return found


def document_length(dataset: IndexedDataset, unit: int, seq_length: int | None) -> float:
    """Tokens of an example; of a pretraining sample, those of its tokens' documents, averaged over its tokens."""
    if seq_length is None:
        return float(dataset.index.lengths[unit])
    first, last, start = documents_of(dataset.index, unit, seq_length)
    lengths = dataset.index.lengths[first : last + 1].astype(np.int64)
    ends = np.minimum(np.cumsum(lengths) - start, seq_length + 1)
    inside = np.diff(ends, prepend=0)
    return float((inside * lengths).sum() / inside.sum())


def rarity_table(counts: np.ndarray) -> np.ndarray:
    """The rarity of each id from how often it occurs: minus the logarithm of its frequency, float64 [ids]."""
    return -np.log(np.maximum(counts, 1) / counts.sum())


def rarity(table: np.ndarray, ids: np.ndarray) -> float:
    """The sum of the tokens' rarities, rounded down, as DeepSpeed's vocab_rarity."""
    return float(int(table[ids].sum()))


def count_shard(analysis: Analysis, shard: int) -> int:
    """Counts the ids of a shard's tokens, each once; returns its tokens."""
    dataset, units = IndexedDataset(analysis.prefix), _units(analysis, shard)
    if analysis.seq_length is not None:
        tokens = dataset.tokens[units[0] * analysis.seq_length : (units[-1] + 1) * analysis.seq_length]
    else:
        tokens = np.concatenate([dataset.sequence(unit) for unit in units])
    _save(analysis.file(COUNTS, shard), np.bincount(tokens))
    return len(tokens)


def measure_shard(analysis: Analysis, shard: int) -> int:
    """Measures the units of a shard; returns its tokens."""
    dataset, length = IndexedDataset(analysis.prefix), analysis.seq_length
    if analysis.metric == LENGTH:
        values = [document_length(dataset, unit, length) for unit in _units(analysis, shard)]
    else:
        if analysis.metric == RARITY:
            function: Callable[[np.ndarray], float] = partial(rarity, np.load(analysis.work / TABLE))
        else:
            function = load_function(analysis.metric)
        values = []
        for unit in _units(analysis, shard):
            value = function(read_unit(dataset, unit, length))
            try:
                values.append(float(value))
            except (TypeError, ValueError):
                raise UserError(f"{analysis.metric} gave {value!r} for sample {unit:,}, which is no number") from None
            if not math.isfinite(values[-1]):
                raise UserError(f"{analysis.metric} gave {value} for sample {unit:,}")
    _save(analysis.file(VALUES, shard), np.array(values, dtype=np.float64))
    return len(values) * (length or 1)


def _units(analysis: Analysis, shard: int) -> range:
    return range(shard * analysis.shard, min((shard + 1) * analysis.shard, analysis.units))


def _save(path: Path, values: np.ndarray) -> None:
    with atomic_open(path) as file:
        np.save(file, values)


def begin(analysis: Analysis, overwrite: bool) -> bool:
    """Makes the folder, or finds what was done in it; whether there is anything to do. Raises UserError."""
    identity = json.loads(json.dumps(analysis.identity()))
    for path in (analysis.folder / MANIFEST, analysis.work / MANIFEST):
        try:
            found = read_json(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            found = {}
        known = same_dataset(found.get("dataset", {}), identity["dataset"])
        if known and all(found.get(key) == identity[key] for key in identity if key != "dataset"):
            if path.parent == analysis.folder:
                return False
        elif not overwrite:
            what = f"of {found.get('metric')}" if known else f"of another dataset than {analysis.prefix} is now"
            raise UserError(f"{path.parent} holds an analysis {what}: --overwrite replaces it, --name names another")
        else:
            shutil.rmtree(analysis.folder)
    write_atomically(analysis.work / MANIFEST, json.dumps(identity, indent=1))
    return True


def run(analysis: Analysis, part: tuple[int, int], workers: int) -> bool:
    """Does the missing work of part K of N, and joins all parts where nothing is missing any more.

    Returns whether the index is whole now. Raises UserError, MachineError, Stopped.
    """
    if analysis.metric == RARITY and not (analysis.work / TABLE).exists():
        if not _map(analysis, COUNTS, count_shard, part, workers):
            return False
        counts = [np.load(analysis.file(COUNTS, shard)) for shard in range(analysis.shards)]
        total = np.zeros(max(map(len, counts)), dtype=np.int64)
        for one in counts:
            total[: len(one)] += one
        _save(analysis.work / TABLE, rarity_table(total))
    if not _map(analysis, VALUES, measure_shard, part, workers):
        return False
    try:
        values = np.concatenate([np.load(analysis.file(VALUES, shard)) for shard in range(analysis.shards)])
    except FileNotFoundError:  # another part was quicker
        return (analysis.folder / MANIFEST).exists()
    _save(analysis.folder / "values.npy", values)
    _save(analysis.folder / "order.npy", np.argsort(values, kind="stable"))
    write_atomically(analysis.folder / MANIFEST, json.dumps(analysis.identity(), indent=1))
    shutil.rmtree(analysis.work, ignore_errors=True)
    return True


def _map(
    analysis: Analysis, kind: str, work: Callable[[Analysis, int], int], part: tuple[int, int], workers: int
) -> bool:
    """Does a part's missing shards; returns whether all shards of all parts are done."""
    number, count = part
    mine = [shard for shard in analysis.missing(kind) if shard % count == number - 1]
    size = IndexedDataset(analysis.prefix).index.dtype.itemsize
    total = IndexedDataset(analysis.prefix).index.tokens() * size
    share = total / analysis.shards
    of_part = len(range(number - 1, analysis.shards, count))
    progress, tokens = ProgressBar(int(of_part * share), int((of_part - len(mine)) * share)), 0
    for done, fresh in enumerate(_results(analysis, work, mine, workers), start=1):
        tokens += fresh
        progress.update(int((of_part - len(mine) + done) * share), int(done * share), int(done * share / size))
    progress.finish()
    return not analysis.missing(kind)


def _results(
    analysis: Analysis, work: Callable[[Analysis, int], int], shards: Sequence[int], workers: int
) -> Iterator[int]:
    """What each shard gives, from forked workers."""
    if workers == 1 or len(shards) < 2:
        yield from (work(analysis, shard) for shard in shards)
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(shards)), context, _start_worker, (os.getpid(),))
    try:
        yield from pool.map(partial(work, analysis), shards)
    except BrokenProcessPool:
        raise MachineError("a worker was killed. What was done is kept: the same command goes on") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_with_parent(parent)


def _stop(number: int, frame: object) -> None:
    raise Stopped("what was done is kept: the same command goes on")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="docs/guides/methods/curriculum.md",
    )
    parser.add_argument("prefix", help="the dataset's path, with or without .bin or .idx")
    parser.add_argument("--metric", required=True, help=f"{RARITY}, {LENGTH}, or package.module.function of token ids")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="data.seq_length of the runs; not of fine-tuning sets"
    )
    parser.add_argument("--name", help="the metric's name in data.curriculum (default: the last word of --metric)")
    parser.add_argument("--output", metavar="FOLDER", help="instead of beside the dataset; index: FOLDER in the config")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: one a core)")
    parser.add_argument("--part", metavar="K/N", help="do the K-th of N parts; the last to be done joins them")
    parser.add_argument("--overwrite", action="store_true", help="replace an analysis of something else")
    args = parser.parse_args(arguments)
    # These flags mean what they mean to the other programs of this folder.
    RunOptions(output_prefix=args.prefix, workers=args.workers, part=args.part)
    number, _, count = (args.part or "1/1").partition("/")
    analysis = open_analysis(args.prefix, args.metric, args.name, args.seq_length, args.output)
    if args.metric not in (RARITY, LENGTH):
        load_function(args.metric)
    if begin(analysis, args.overwrite):
        with handle_signals((signal.SIGTERM, signal.SIGUSR1), _stop):
            if not run(analysis, (int(number), int(count)), args.workers):
                told = "the other parts are not done; where a metric is measured in two passes, so is each part"
                print(f"{analysis.folder}: part {args.part} is done; {told}: the same command goes on")
                return 0
    values = np.load(analysis.folder / "values.npy", mmap_mode="r")
    shares = ", ".join(f"{q} % up to {np.percentile(values, q):g}" for q in (0, 10, 50, 90, 100))
    print(f"{analysis.folder}: {analysis.name} of {analysis.units:,} samples: {shares}")
    return 0


if __name__ == "__main__":
    run_main(main)
