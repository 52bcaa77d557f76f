"""Reading an indexed dataset without megatron-core, and checking that it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_llama.data.indexed_format import CODES, HEADER, MAGIC
from megatron_llama.system.errors import UserError
from megatron_llama.system.files import sha256_file

CHUNK = 1 << 20


class IndexedDataset:
    """The documents of PREFIX.bin and PREFIX.idx, memory-mapped."""

    def __init__(self, prefix: str) -> None:
        """Opens both files and checks the header and the sizes that follow from it.

        Raises:
            UserError: a file is missing, is no index, or has another size than the header says.
        """
        self.prefix = prefix.removesuffix(".bin").removesuffix(".idx")
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise UserError(f"there is no {path}")
        with open(self.idx_path, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise UserError(f"{self.idx_path} is no Megatron index: it does not start with {MAGIC!r}")
        _, version, code, sequences, indices = HEADER.unpack(head)
        if version != 1 or code not in CODES:
            raise UserError(f"{self.idx_path}: version {version} and token type {code} are not known")
        size, expected = self.idx_path.stat().st_size, HEADER.size + 12 * sequences + 8 * indices
        if size != expected:
            raise UserError(f"{self.idx_path} has {size:,} bytes; its header speaks of {expected:,}")
        self.dtype = np.dtype(CODES[code])
        self.lengths = self._section("<i4", sequences, HEADER.size)
        self.pointers = self._section("<i8", sequences, HEADER.size + 4 * sequences)
        self.document_indices = self._section("<i8", indices, HEADER.size + 12 * sequences)
        tokens = self.bin_path.stat().st_size // self.dtype.itemsize
        self.tokens: np.ndarray = np.memmap(self.bin_path, self.dtype, "r") if tokens else np.zeros(0, self.dtype)

    def _section(self, kind: str, count: int, offset: int) -> np.ndarray:
        if not count:
            return np.zeros(0, kind)
        return np.memmap(self.idx_path, dtype=kind, mode="r", offset=offset, shape=(count,))

    def __len__(self) -> int:
        """Documents, empty ones too."""
        return max(0, len(self.document_indices) - 1)

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document; its sequences joined.

        Raises:
            UserError: there is no such document.
        """
        if not 0 <= number < len(self):
            raise UserError(f"there is no document {number}; there are {len(self):,}, counted from 0")
        first, last = int(self.document_indices[number]), int(self.document_indices[number + 1])
        if first == last:
            return np.zeros(0, self.dtype)
        start = int(self.pointers[first]) // self.dtype.itemsize
        return np.asarray(self.tokens[start : start + int(self.lengths[first:last].sum(dtype=np.int64))])

    def manifest(self) -> dict[str, Any] | None:
        """What preprocess.py wrote beside it; None where another program made the dataset."""
        try:
            return dict(json.loads(Path(self.prefix + ".json").read_bytes()))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{self.prefix}.json is damaged: {error}") from None


def problems(dataset: IndexedDataset, vocab_size: int | None, check_hashes: bool) -> Iterator[str]:
    """Everything that is wrong with a dataset, one sentence each. Reads all of it once, in chunks."""
    itemsize = dataset.dtype.itemsize
    end = 0
    for start in range(0, len(dataset.lengths), CHUNK):
        lengths = dataset.lengths[start : start + CHUNK].astype(np.int64)
        if (lengths <= 0).any():
            yield f"sequence {start + int(np.argmax(lengths <= 0))} has no tokens"
        sizes = lengths * itemsize
        wrong = dataset.pointers[start : start + CHUNK] != end + np.cumsum(sizes) - sizes
        if wrong.any():
            yield f"sequence {start + int(np.argmax(wrong))} does not begin where the one before it ends"
        end += int(sizes.sum())
    size = dataset.bin_path.stat().st_size
    if end != size:
        yield f"{dataset.bin_path.name} has {size:,} bytes; the index speaks of {end:,}"
    indices = dataset.document_indices
    if not len(indices) or indices[0] != 0 or indices[-1] != len(dataset.lengths):
        yield "the document indices do not run from 0 to the number of sequences"
    for start in range(0, len(indices) - 1, CHUNK):
        if (np.diff(indices[start : start + CHUNK + 1]) < 0).any():
            yield "the document indices fall"
            break
    if vocab_size is not None:
        for start in range(0, len(dataset.tokens), CHUNK):
            part = dataset.tokens[start : start + CHUNK]
            if int(part.max()) >= vocab_size or int(part.min()) < 0:
                where = start + int(np.argmax((part >= vocab_size) | (part < 0)))
                yield f"token {where} is {int(dataset.tokens[where])}; the vocabulary has {vocab_size}"
                break
    yield from _against_manifest(dataset, check_hashes)


def _against_manifest(dataset: IndexedDataset, check_hashes: bool) -> Iterator[str]:
    manifest = dataset.manifest()
    if manifest is None:
        return
    found = {
        "documents_written": int(np.count_nonzero(np.diff(dataset.document_indices))),
        "documents_empty": int(np.count_nonzero(np.diff(dataset.document_indices) == 0)),
        "tokens": len(dataset.tokens),
    }
    for key, value in found.items():
        if manifest.get(key) != value:
            yield f"{key} is {value:,}; the manifest says {manifest.get(key)}"
    if manifest.get("eod") is not None and len(dataset.lengths):
        ends = dataset.pointers // dataset.dtype.itemsize + dataset.lengths - 1
        last = dataset.tokens[np.minimum(ends, len(dataset.tokens) - 1)]
        if (last != manifest["eod"]).any():
            yield f"document {int(np.argmax(last != manifest['eod']))} of those with tokens does not end with EOD"
    for suffix, path in ((".bin", dataset.bin_path), (".idx", dataset.idx_path)):
        expected = manifest.get("sha256", {}).get(suffix)
        if check_hashes and expected and sha256_file(path) != expected:
            yield f"{path.name} is not the file that was written: its sha256 differs from the manifest's"
