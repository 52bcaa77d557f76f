"""Shuffle order of one epoch of a dataset, in cached files that are mapped into memory.

Documents are shuffled, concatenated and cut every ``seq_length`` tokens. Then the sequences are shuffled. These are the
steps of megatron-core's GPTDataset for one epoch (tests/data/test_pretraining_samples.py compares them), so epoch 0 has
the order of a megatron-core run of at most one epoch. Each later epoch has a separate seed.

Memory and time depend on one epoch of one dataset, not on the length of the run. The files take 12 bytes per document
and 12 per sequence. Creating them takes about three times as much memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.system.files import file_lock, sync_folder

VERSION = 1
"""Version of the files, part of the folder's name."""
LOGGED_DOCUMENTS = 2_000_000
"""Shuffling this many documents (about half a second) is logged."""
_FILES = {"documents": "documents", "boundaries": "borders", "order": "order"}
"""File names by field; fixed, so that existing caches stay valid."""


@dataclass(frozen=True)
class Epoch:
    """Sequences of an epoch. The arrays may be mapped files."""

    documents: np.ndarray
    """int32 [documents], shuffled numbers of the .idx file's sequences."""
    boundaries: np.ndarray
    """int32 [samples + 1, 2], start of each sequence: (index in ``documents``, token of that document). A sequence
    includes the first token of the next one as its last label."""
    order: np.ndarray
    """uint32 [samples], the sequences in training order."""

    def text(self, dataset: IndexedDataset, sample: int) -> tuple[np.ndarray, list[int]]:
        """Return the seq_length + 1 tokens of a sample, int64, and the number of tokens from each document."""
        sequence = int(self.order[sample])
        (first, start), (last, end) = self.boundaries[sequence : sequence + 2].tolist()
        parts = [dataset.sequence(document) for document in self.documents[first : last + 1]]
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][start:]
        return np.concatenate(parts, dtype=np.int64), [len(part) for part in parts]

    def place(self, dataset: IndexedDataset, sample: int, position: int) -> tuple[int, int]:
        """Return (document, token of the document) of a position in a sample."""
        index, token = self.boundaries[int(self.order[sample])].tolist()
        token += position
        while token >= (length := int(dataset.index.lengths[self.documents[index]])):
            index, token = index + 1, token - length
        return int(self.documents[index]), token


def make_epoch(lengths: np.ndarray, first: int, last: int, seq_length: int, seed: int, epoch: int) -> Epoch:
    """Shuffle documents ``first`` to ``last`` (exclusive). ``lengths``: tokens of each document, int32 [documents]."""
    # RandomState, because numpy guarantees that its numbers never change.
    random = np.random.RandomState([seed, epoch] if epoch else seed)
    documents = np.arange(first, last, dtype=np.int32)
    random.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    samples = max(0, int(ends[-1]) - 1) // seq_length if len(ends) else 0
    tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, tokens, side="right")[: samples + 1]
    boundaries = np.empty((samples + 1, 2), dtype=np.int32)
    if samples:
        boundaries[:, 0] = places
        boundaries[:, 1] = tokens - ends[places] + lengths[documents[places]]
    order = np.arange(samples, dtype=np.uint32)
    random.shuffle(order)
    return Epoch(documents, boundaries, order)


def open_epoch(
    dataset: IndexedDataset, span: tuple[int, int], seq_length: int, seed: int, epoch: int, cache: Path
) -> Epoch:
    """Open the order of an epoch of documents ``span`` (first, last) in the folder ``cache``. Create missing files.

    Processes and threads may call it concurrently: one creates the files while the others wait. On a file system
    without locks each creates them, and one copy is used.

    Raises:
        OSError: the files do not exist and cannot be written.
    """
    stat = dataset.idx_path.stat()
    # Each host of a run has a local copy of an object; they share the order by the object's version.
    made_of = (VERSION, stat.st_size, dataset.version or stat.st_mtime_ns, *span, seq_length, seed, epoch)
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = cache / f"{Path(dataset.prefix).name}-epoch{epoch}-{digest}"
    loaded = _load(folder)
    if loaded is not None:
        return loaded
    with file_lock(folder.with_name(f"{folder.name}.lock")):
        if (loaded := _load(folder)) is not None:  # created by another process meanwhile
            return loaded
        count, start = span[1] - span[0], time.monotonic()
        if count >= LOGGED_DOCUMENTS:
            sys.stderr.write(f"data: shuffling epoch {epoch} of {dataset.prefix}, {count:,} documents\n")
        made = make_epoch(dataset.index.lengths, *span, seq_length, seed, epoch)
        _publish(made, folder)
        if count >= LOGGED_DOCUMENTS:
            sys.stderr.write(f"data: shuffled in {time.monotonic() - start:.1f} s\n")
    loaded = _load(folder)
    return made if loaded is None else loaded  # without locks another process may be replacing incomplete files


def _load(folder: Path) -> Epoch | None:
    """Map the files of an epoch. Returns None if they are missing or incomplete. Raises OSError."""
    try:
        epoch = Epoch(*(np.load(folder / f"{_FILES[field.name]}.npy", mmap_mode="r") for field in fields(Epoch)))
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return epoch if len(epoch.boundaries) == len(epoch.order) + 1 else None


def _publish(epoch: Epoch, folder: Path) -> None:
    """Write the files of an epoch to a folder, atomically."""
    draft = folder.with_name(f".{folder.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.draft")
    try:
        draft.mkdir()
        for field in fields(Epoch):
            with open(draft / f"{_FILES[field.name]}.npy", "wb") as file:
                np.save(file, getattr(epoch, field.name))
                file.flush()
                os.fsync(file.fileno())
        try:
            draft.rename(folder)
        except OSError:  # incomplete files, or without locks the same files of another process
            if _load(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
                draft.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
