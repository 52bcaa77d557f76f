"""How difficult each sample of a dataset is: files that data_prep/analyze.py writes once and training maps.

What is measured is a *unit*, which depends on the dataset and the sequence length alone, on no seed and no split:
pretraining's unit n is the seq_length + 1 tokens from token n · seq_length on of all documents in the order of the file
(the last one is only a label, and the next unit's first); a fine-tuning set's unit is an example.

    PREFIX_metrics/NAME-SEQ_LENGTH/      of pretraining; PREFIX_metrics/NAME/ of a fine-tuning set
        values.npy                       float64 [units], the metric of each
        order.npy                        int64 [units], the units from easy to difficult, equal ones as they stand
        index.json                       what was measured, how, and of which dataset; written last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_llama.corpus.indexed_format import Index, IndexedDataset, dataset_facts, same_dataset
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import read_json

MANIFEST = "index.json"
FOLDER_SUFFIX = "_metrics"


def index_folder(prefix: str, metric: str, seq_length: int | None, root: str | None = None) -> Path:
    """Where the index of a dataset lies. ``seq_length`` is None for a fine-tuning set; ``root`` is a folder instead of
    the dataset's own."""
    path = Path(prefix + FOLDER_SUFFIX)
    name = metric if seq_length is None else f"{metric}-{seq_length}"
    return (Path(root) / path.name if root else path) / name


def unit_count(index: Index, seq_length: int | None) -> int:
    """Units of a dataset; those of a fine-tuning set, its examples, with None."""
    return len(index) if seq_length is None else max(0, index.tokens() - 1) // seq_length


def unit_range(index: Index, first: int, last: int, seq_length: int | None) -> tuple[int, int]:
    """First and last (exclusive) of the units that lie wholly in documents ``first`` to ``last`` (exclusive)."""
    if seq_length is None or first >= last:
        return first, last
    begin, end = index.tokens(0, first), index.tokens(0, last)
    start = -(-begin // seq_length)
    return start, max(start, (end - 1) // seq_length)


def read_unit(dataset: IndexedDataset, unit: int, seq_length: int | None) -> np.ndarray:
    """A unit's tokens, a view of the mapped file."""
    if seq_length is None:
        return dataset.sequence(unit)
    return dataset.tokens[unit * seq_length : (unit + 1) * seq_length + 1]


def documents_of(index: Index, unit: int, seq_length: int) -> tuple[int, int, int]:
    """(first document, last document, token of the first one with which the unit begins) of a unit of pretraining."""
    begin, width = unit * seq_length, index.dtype.itemsize
    ends = np.array([begin, begin + seq_length]) * width
    first, last = (int(place) - 1 for place in np.searchsorted(index.pointers, ends, side="right"))
    return first, last, begin - int(index.pointers[first]) // width


@dataclass(frozen=True)
class DifficultyIndex:
    """The metric of some units."""

    values: np.ndarray
    """float64 [units]."""
    order: np.ndarray
    """int64 [units], from easy to difficult."""

    def part(self, first: int, last: int) -> DifficultyIndex:
        """Of units ``first`` to ``last`` (exclusive), numbered from 0."""
        inside = self.order[(self.order >= first) & (self.order < last)] - first
        return DifficultyIndex(self.values[first:last], inside)

    @property
    def ranks(self) -> np.ndarray:
        """int64 [units], the place of each among all, from easy to difficult."""
        ranks = np.empty(len(self.order), dtype=np.int64)
        ranks[self.order] = np.arange(len(self.order))
        return ranks


def concatenate(parts: Sequence[DifficultyIndex]) -> DifficultyIndex:
    """The units of several datasets, numbered on from one to the next."""
    values = np.concatenate([part.values for part in parts])
    return DifficultyIndex(values, np.argsort(values, kind="stable"))


def open_difficulty_index(folder: Path, prefix: str) -> DifficultyIndex:
    """The index of a dataset, mapped.

    Raises:
        UserError: it is not there, not whole, or of another dataset.
    """
    try:
        made_of = read_json(folder / MANIFEST)
        measured = DifficultyIndex(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("values", "order")))
        units, facts = made_of["units"], made_of["dataset"]
    except FileNotFoundError:
        raise UserError(f"there is no index in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the index in {folder} can't be read: {error}") from None
    if not len(measured.values) == len(measured.order) == units:
        raise UserError(f"the index in {folder} is not whole")
    if not same_dataset(facts, dataset_facts(prefix)):
        raise UserError(f"the index in {folder} is of another dataset than {prefix} is now")
    return measured
