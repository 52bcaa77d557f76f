"""Measure how equally context-parallel ranks share the attention work of packed documents.

    python -m benchmarks context_balance corpora/*_text_document.idx

Documents of the datasets follow each other in a shuffled order and are cut into sequences, as with
data.document_mask=true. A rank's work is the number of visible keys of its queries. The largest work over the mean is
the factor by which attention is slower than with equal work. The command compares the zig-zag order with
megatron_llama.topology.divide.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from benchmarks.methods import variants
from benchmarks.results import command_line
from megatron_llama.arch.pattern import CAUSAL
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.tables import markdown_table
from megatron_llama.topology import chunk_work, divide, zigzags

Chunks = Sequence[Sequence[range]]
"""Positions of each rank's tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("datasets", nargs="+", help="indexed datasets, with or without .bin or .idx")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens of a sequence")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8], help="context-parallel ranks")
    parser.add_argument("--sequences", type=int, default=100, help="largest number of sequences (default 100)")
    parser.add_argument("--write", type=Path, help="write the page to this file instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Measure, and print or write the page."""
    documents = np.concatenate([IndexedDataset(each).index.lengths for each in args.datasets])
    np.random.default_rng(1).shuffle(documents)
    rows = []
    for length in args.lengths:
        sequences = list(cut(documents, length))[: args.sequences]
        for cp in args.cp:
            before = [imbalance(row, length, zigzags(cp, length)) for row in sequences]
            after = [imbalance(row, length, divide(cp, length, (row,))) for row in sequences]
            rows.append((f"{length:,}", str(cp), str(len(sequences)), *_cells(before), *_cells(after)))
    hard = []
    for name, row in difficult(args.lengths[-1]).items():
        for cp in args.cp:
            divisions = (zigzags(cp, args.lengths[-1]), divide(cp, args.lengths[-1], (row,)))
            hard.append((name, str(cp), *(f"{imbalance(row, args.lengths[-1], each):.2f}" for each in divisions)))
    variants.publish("\n".join(_page(documents, rows, hard, args.lengths[-1])) + "\n", args.write)
    return 0


def cut(documents: np.ndarray, length: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the documents in each sequence of ``length`` tokens."""
    ends = np.cumsum(documents[documents > 0], dtype=np.int64)
    for start in range(0, int(ends[-1]) - length + 1, length):
        inside = ends[(ends > start) & (ends < start + length)] - start
        yield tuple(np.diff(np.concatenate([[0], inside, [length]])).tolist())


def imbalance(row: tuple[int, ...], length: int, division: Chunks) -> float:
    """Return the largest work of a rank over the mean, for one sequence of documents."""
    size = min(len(chunk) for chunks in division for chunk in chunks)
    before = [0, *accumulate(chunk_work(length, length // size, (row,), CAUSAL))]
    loads = [sum(before[chunk.stop // size] - before[chunk.start // size] for chunk in chunks) for chunks in division]
    return max(loads) * len(loads) / sum(loads)


def difficult(length: int) -> dict[str, tuple[int, ...]]:
    """Return sequences with uneven documents, by name."""
    short = length // 512
    half = length // 2
    return {
        "one long document, then short ones": (half, *[short] * 256),
        "short documents, then a long one": (*[short] * 256, half),
        "long document in the middle": (*[short] * 128, half, *[short] * 128),
        "two documents": (half, half),
        "documents of one token, then a long one": (*[1] * half, half),
    }


def _cells(factors: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.fmean(factors):.2f}", f"{max(factors):.2f}"


def _page(
    documents: np.ndarray, rows: Sequence[Sequence[str]], hard: Sequence[Sequence[str]], length: int
) -> Iterator[str]:
    """Yield the lines of the page in Markdown."""
    yield "# Balance of attention work over context-parallel ranks\n"
    yield f"{variants.conditions()} Command:\n"
    yield f"    {command_line()}\n"
    yield (
        f"{len(documents):,} documents with {int(documents.sum()):,} tokens, median {int(np.median(documents)):,}, "
        f"longest {int(documents.max()):,}. They follow each other in a shuffled order and are cut into sequences, as "
        "with `data.document_mask=true`. Numbers are the largest attention work of a rank over the mean. "
        "Zig-zag is the order without documents; `topology.divide` is the order of "
        "`trainer.cp_comm=all_gather` with documents. Ulysses has equal work on all ranks.\n"
    )
    head = ("tokens", "cp", "sequences", "zig-zag, mean", "zig-zag, worst", "by work, mean", "by work, worst")
    yield from markdown_table(head, rows)
    yield f"\n## Difficult sequences of {length:,} tokens\n"
    yield from markdown_table(("documents", "cp", "zig-zag", "by work"), hard)
