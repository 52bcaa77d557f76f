"""The order of one epoch of one dataset, in files that are made once and mapped into memory.

Documents are shuffled, follow each other, and are cut every ``seq_length`` tokens; the sequences are shuffled again:
step for step what megatron-core's GPTDataset does for one epoch (tests/data/test_epoch_index.py compares them), so
epoch 0 is the order that it gives a run of at most one epoch. Each later epoch has a seed of its own.

Memory and time are those of one epoch of one dataset, whatever the length of the run: 12 bytes a document and as many a
sequence on disk, about three times as much while the files are made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.files import sync_folder, wait_for_lock

VERSION = 1
"""Of the files; in their folder's name."""
TOLD_DOCUMENTS = 2_000_000
"""From so many on, about half a second, the terminal hears of it."""


@dataclass(frozen=True)
class Epoch:
    """An epoch's sequences, as arrays that may be mapped files."""

    documents: np.ndarray
    """int32 [documents], numbers of the .idx file's sequences as they follow each other."""
    borders: np.ndarray
    """int32 [samples + 1, 2], where each stretch begins: place in ``documents``, token of that document. It ends with
    the first token of the next, which is its last label."""
    order: np.ndarray
    """uint32 [samples], the stretches in the order in which they are trained on."""

    def text(self, dataset: IndexedDataset, sample: int) -> tuple[np.ndarray, list[int]]:
        """The seq_length + 1 tokens of a sample, int64, and how many of them come from each document."""
        stretch = int(self.order[sample])
        (first, start), (last, end) = self.borders[stretch : stretch + 2].tolist()
        parts = [dataset.sequence(document) for document in self.documents[first : last + 1]]
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][start:]
        return np.concatenate(parts, dtype=np.int64), [len(part) for part in parts]

    def place(self, dataset: IndexedDataset, sample: int, position: int) -> tuple[int, int]:
        """(document, token of it) of a position in a sample's text."""
        place, token = self.borders[int(self.order[sample])].tolist()
        token += position
        while token >= (length := int(dataset.index.lengths[self.documents[place]])):
            place, token = place + 1, token - length
        return int(self.documents[place]), token


def make_epoch(lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, epoch: int) -> Epoch:
    """The order of documents ``first`` to ``last`` (exclusive), whose tokens ``lengths`` gives, [documents] int32."""
    # RandomState, because numpy promises that its numbers never change.
    random = np.random.RandomState([seed, epoch] if epoch else seed)
    documents = np.arange(first, last, dtype=np.int32)
    random.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    samples = max(0, int(ends[-1]) - 1) // seq_length if len(ends) else 0
    tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, tokens, side="right")[: samples + 1]
    borders = np.empty((samples + 1, 2), dtype=np.int32)
    if samples:
        borders[:, 0] = places
        borders[:, 1] = tokens - ends[places] + lengths[documents[places]]
    order = np.arange(samples, dtype=np.uint32)
    random.shuffle(order)
    return Epoch(documents, borders, order)


def open_epoch(
    dataset: IndexedDataset, span: tuple[int, int], seq_length: int, seed: int, epoch: int, cache: Path
) -> Epoch:
    """The order of an epoch of documents ``span`` (first, last), from ``cache``; made there by whoever needs it first.

    Any process and thread may call it at any time. Processes of one machine, and those that share the folder, wait for
    the one that makes it; where a file system has no locks, each makes it, and one of them is kept.

    Raises:
        OSError: the files are not there and can't be written.
    """
    stat = dataset.idx_path.stat()
    made_of = (VERSION, stat.st_size, stat.st_mtime_ns, *span, seq_length, seed, epoch)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = cache / f"{Path(dataset.prefix).name}-epoch{epoch}-{digest}"
    found = _load(folder)
    if found is not None:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if (found := _load(folder)) is not None:  # made while we waited
            return found
        count, start = span[1] - span[0], time.monotonic()
        if count >= TOLD_DOCUMENTS:
            sys.stderr.write(f"data: shuffling epoch {epoch} of {dataset.prefix}, {count:,} documents\n")
        _publish(make_epoch(dataset.index.lengths, *span, seq_length, seed, epoch), folder)
        if count >= TOLD_DOCUMENTS:
            sys.stderr.write(f"data: shuffled in {time.monotonic() - start:.1f} s\n")
    found = _load(folder)
    assert found is not None, f"{folder} was there a moment ago"
    return found


def _load(folder: Path) -> Epoch | None:
    """The files of an epoch, mapped; None where they are not there, or not whole after a disk's failure."""
    try:
        epoch = Epoch(*(np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in fields(Epoch)))
    except (OSError, ValueError, EOFError):
        return None
    return epoch if len(epoch.borders) == len(epoch.order) + 1 else None


def _publish(epoch: Epoch, folder: Path) -> None:
    """Writes the files of an epoch into a folder that appears whole."""
    draft = folder.with_name(f".{folder.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.draft")
    try:
        draft.mkdir()
        for field in fields(Epoch):
            with open(draft / f"{field.name}.npy", "wb") as file:
                np.save(file, getattr(epoch, field.name))
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # files that are not whole
        try:
            draft.rename(folder)
        except OSError:  # without locks another process may have been quicker, with the same files
            if _load(folder) is None:
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, where the file system has locks."""
    with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
        with contextlib.suppress(OSError):
            wait_for_lock(lock)
        yield
