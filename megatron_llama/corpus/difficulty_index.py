"""Difficulty indices: files with the difficulty of each sample, which data_prep/analyze.py writes and training maps.

The measured *unit* depends on dataset and sequence length, not on seed or split. In pretraining, unit n is the
seq_length + 1 tokens from token n · seq_length on, over all documents in file order; its last token is only a label,
and the first of the next unit. In a fine-tuning dataset, a unit is an example.

    PREFIX_metrics/NAME-SEQ_LENGTH/      for pretraining; PREFIX_metrics/NAME/ for a fine-tuning dataset
        values.npy                       float64 [units], metric of each unit
        order.npy                        int64 [units], units from easy to difficult; ties in file order
        index.json                       metric, options and dataset; written last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_llama.corpus.indexed_format import Index, IndexedDataset, dataset_facts, same_dataset
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json
from megatron_llama.system.object_store import is_url

MANIFEST = "index.json"
FOLDER_SUFFIX = "_metrics"


def index_folder(prefix: str, metric: str, seq_length: int | None, root: str | None = None) -> Path:
    """Return the folder of a dataset's index.

    Args:
        seq_length: Sequence length; None for a fine-tuning dataset.
        root: Parent folder, if not the dataset's folder.

    Raises UserError for an object store without ``root``.
    """
    path = Path(prefix + FOLDER_SUFFIX)
    if root is None and is_url(prefix):
        raise UserError(f"the index of {prefix} needs a local folder: write --output, and index in data.curriculum")
    name = metric if seq_length is None else f"{metric}-{seq_length}"
    return (Path(root) / path.name if root else path) / name


def unit_count(index: Index, seq_length: int | None) -> int:
    """Return the number of units of a dataset; ``seq_length`` is None for a fine-tuning dataset."""
    return len(index) if seq_length is None else max(0, index.tokens() - 1) // seq_length


def unit_range(index: Index, first: int, last: int, seq_length: int | None) -> tuple[int, int]:
    """Return the range of units that are completely in documents ``first`` to ``last`` (both ends exclusive)."""
    if seq_length is None or first >= last:
        return first, last
    begin, end = index.tokens(0, first), index.tokens(0, last)
    start = -(-begin // seq_length)
    return start, max(start, (end - 1) // seq_length)


def read_unit(dataset: IndexedDataset, unit: int, seq_length: int | None) -> np.ndarray:
    """Return a unit's tokens, a view of the mapped file."""
    if seq_length is None:
        return dataset.sequence(unit)
    return dataset.tokens[unit * seq_length : (unit + 1) * seq_length + 1]


def documents_of(index: Index, unit: int, seq_length: int) -> tuple[int, int, int]:
    """Return (first document, last document, first token in the first document) of a pretraining unit."""
    begin, width = unit * seq_length, index.dtype.itemsize
    ends = np.array([begin, begin + seq_length]) * width
    first, last = (int(place) - 1 for place in np.searchsorted(index.pointers, ends, side="right"))
    return first, last, begin - int(index.pointers[first]) // width


@dataclass(frozen=True)
class DifficultyIndex:
    """Difficulty of units."""

    values: np.ndarray
    """Metric of each unit, float64 [units]."""
    order: np.ndarray
    """Units from easy to difficult, int64 [units]."""

    def part(self, first: int, last: int) -> DifficultyIndex:
        """Return the index of units ``first`` to ``last`` (exclusive), renumbered from 0."""
        inside = self.order[(self.order >= first) & (self.order < last)] - first
        return DifficultyIndex(self.values[first:last], inside)

    @property
    def ranks(self) -> np.ndarray:
        """Rank of each unit from easy to difficult, int64 [units]."""
        ranks = np.empty(len(self.order), dtype=np.int64)
        ranks[self.order] = np.arange(len(self.order))
        return ranks


def concatenate(parts: Sequence[DifficultyIndex]) -> DifficultyIndex:
    """Concatenate the indices of several datasets, with consecutive unit numbers."""
    values = np.concatenate([part.values for part in parts])
    return DifficultyIndex(values, np.argsort(values, kind="stable"))


def open_difficulty_index(folder: Path, prefix: str) -> DifficultyIndex:
    """Open the index of a dataset, memory-mapped.

    Raises:
        UserError: The index is missing, incomplete, or of another dataset.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        measured = DifficultyIndex(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("values", "order")))
        units, facts = manifest["units"], manifest["dataset"]
    except FileNotFoundError:
        raise UserError(f"there is no index in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the index in {folder} cannot be read: {error}") from None
    if not len(measured.values) == len(measured.order) == units:
        raise UserError(f"the index in {folder} is incomplete")
    if not same_dataset(facts, dataset_facts(prefix)):
        raise UserError(f"the index in {folder} was made from another dataset than {prefix}")
    return measured
