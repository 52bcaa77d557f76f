"""The work folder of a run: what it has written so far, and how far that goes.

`<folder>/.<name>.partial/` is in the folder of the output, so that finished files move by a rename. It holds the
growing .bin, the documents' lengths, the quarantined lines and a journal. A checkpoint is a line of the journal,
written after the data that it covers is on disk; what was written after the last checkpoint is cut
off at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from data_prep.lib.blocks import BlockPosition, TextBlock
from data_prep.lib.job import BlockResult
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import write_atomically

JOURNAL = "journal.jsonl"
QUARANTINE = "quarantine.jsonl"


class Locked(UserError):
    """Another run holds the work folder."""


class Workspace:
    """A locked work folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        """Makes and locks the folder. `names` are the outputs' names, one per JSON key.

        Raises:
            UserError: the folder can't be made; Locked: another run holds it.
        """
        self.folder = folder
        self.names = names
        self._data_files = [*(f"{name}{suffix}" for name in names for suffix in (".bin", ".lengths")), QUARANTINE]
        self._lock = _lock_folder(folder)
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}

    def read_journal(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """As ``read_journal`` of this folder."""
        return read_journal(self.folder)

    def begin(self, identity: dict[str, Any]) -> None:
        """Starts from nothing."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()
        self._write_journal([{"identity": identity}])
        self._open_files("wb")

    def resume(self, identity: dict[str, Any], checkpoint: dict[str, Any]) -> Ledger | None:
        """Cuts the files back to a checkpoint; None where they don't agree with it (after a power cut, say)."""
        for name in self._data_files:
            if self._hash_prefix(name, checkpoint["sizes"][name]) != checkpoint["sha256"][name]:
                self._hashes.clear()
                return None
        for name in self._data_files:
            os.truncate(self.folder / name, checkpoint["sizes"][name])
        self._write_journal([{"identity": identity}, checkpoint])
        self._open_files("ab")
        return Ledger.from_json(checkpoint["ledger"])

    def _hash_prefix(self, name: str, size: int) -> str | None:
        digest = hashlib.sha256()
        left = size
        with contextlib.suppress(FileNotFoundError), open(self.folder / name, "rb") as file:
            while left and (piece := file.read(min(left, 1 << 20))):
                digest.update(piece)
                left -= len(piece)
            self._hashes[name] = digest
            return None if left else digest.hexdigest()
        return None

    def _write_journal(self, entries: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_atomically(self.folder / JOURNAL, lines)

    def _open_files(self, mode: str) -> None:
        for name in self._data_files:
            self._files[name] = open(self.folder / name, mode, buffering=0)
            self._hashes.setdefault(name, hashlib.sha256())
        self._files[JOURNAL] = open(self.folder / JOURNAL, "ab", buffering=0)

    def append(self, name: str, data: bytes) -> None:
        """Appends to one of the files.

        Raises:
            MachineError: it can't be written, the disk is full, say.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[self._files[name].write(view) :]
        except OSError as error:
            raise self._failed(error) from None
        if name != JOURNAL:
            self._hashes[name].update(data)

    def _failed(self, error: OSError) -> MachineError:
        return MachineError(
            f"can't write below {self.folder}: {error.strerror}. What was done is kept there: "
            "once that is mended, the same command goes on"
        )

    def checkpoint(self, ledger: Ledger, **more: Any) -> None:
        """Makes everything up to here survive, a power cut included."""
        entry = {
            "ledger": asdict(ledger),
            "sizes": {name: os.fstat(self._files[name].fileno()).st_size for name in self._data_files},
            "sha256": {name: self._hashes[name].hexdigest() for name in self._data_files},
            **more,
        }
        try:
            for name in self._data_files:
                os.fdatasync(self._files[name].fileno())
            self.append(JOURNAL, json.dumps(entry).encode() + b"\n")
            os.fsync(self._files[JOURNAL].fileno())
        except OSError as error:
            raise self._failed(error) from None

    def sha256(self, name: str) -> str:
        """Of one of the data files, as far as it is written."""
        return str(self._hashes[name].hexdigest())

    def close(self) -> None:
        """Closes the data files; the lock stays until `remove` or the process's end."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def unlock(self) -> None:
        """Gives up the lock."""
        self._lock.close()

    def remove(self) -> None:
        """Removes the folder and gives up the lock."""
        self.close()
        shutil.rmtree(self.folder)
        self.unlock()


def read_journal(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """(the options of the run that was begun in a work folder, its checkpoints); a half-written last line does not
    count."""
    entries = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in (folder / JOURNAL).read_bytes().split(b"\n")[:-1]:
            entries.append(json.loads(line))
    return (entries[0]["identity"], entries[1:]) if entries else (None, [])


def _lock_folder(folder: Path) -> IO[bytes]:
    """A lock of this process alone: forked workers don't inherit it, and it is gone when we are."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / "lock", "wb")
        except OSError as error:
            raise UserError(f"can't write the output: {folder.parent}: {error.strerror}") from None
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise Locked(f"another run is writing this output (it holds {folder})") from None
        # the folder may have been removed, by the run that held it, between our open and our lock
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder / "lock").st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        lock.close()


# The account of a run: every document read is written, empty or skipped, and the sum is checked.


@dataclass
class KeyCounts:
    """Of one JSON key."""

    written: int = 0
    empty: int = 0
    tokens: int = 0


@dataclass
class Ledger:
    """Counts up to a position in the input."""

    keys: list[KeyCounts]
    position: BlockPosition = field(default_factory=BlockPosition)
    line: int = 0
    """lines of the current source before the position"""
    documents_read: int = 0
    text_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """by reason"""
    notes: dict[str, int] = field(default_factory=dict)
    """of a fine-tuning set: examples that were taken, but changed, by how"""
    learned: int = 0
    """of a fine-tuning set: tokens with loss"""

    def add(self, block: TextBlock, result: BlockResult) -> None:
        """Takes a block's account in; bad lines have been seen to already."""
        for segment, lines in zip(block.segments, result.lines, strict=True):
            self.line = lines + (self.line if segment.source == self.position.source else 0)
            self.position = BlockPosition(segment.source, segment.end)
        self.documents_read += result.documents_read
        self.text_bytes += result.text_bytes
        for record in result.bad:
            self.skipped[record.reason] = self.skipped.get(record.reason, 0) + 1
        for note, count in result.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count
        self.learned += result.learned
        for counts, lengths_bytes in zip(self.keys, result.lengths, strict=True):
            lengths = np.frombuffer(lengths_bytes, dtype="<i4")
            filled = int(np.count_nonzero(lengths))
            counts.written += filled
            counts.empty += len(lengths) - filled
            counts.tokens += int(lengths.sum(dtype=np.int64))
        self.check()

    def add_ledger(self, other: Ledger) -> None:
        """Takes the account of another part of the same input in; position and lines stay."""
        self.documents_read += other.documents_read
        self.text_bytes += other.text_bytes
        self.learned += other.learned
        for mine, theirs in ((self.skipped, other.skipped), (self.notes, other.notes)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        for counts, more in zip(self.keys, other.keys, strict=True):
            counts.written += more.written
            counts.empty += more.empty
            counts.tokens += more.tokens
        self.check()

    def line_before(self, block: TextBlock, index: int, result: BlockResult) -> int:
        """Lines of a segment's source before that segment of a block not yet added."""
        source = block.segments[index].source
        before = self.line if source == self.position.source else 0
        return before + sum(
            lines
            for segment, lines in zip(block.segments[:index], result.lines[:index], strict=True)
            if segment.source == source
        )

    @property
    def documents_skipped(self) -> int:
        return sum(self.skipped.values())

    @property
    def tokens(self) -> int:
        """Of all keys."""
        return sum(counts.tokens for counts in self.keys)

    def check(self) -> None:
        """No document may be lost."""
        for counts in self.keys:
            accounted = counts.written + counts.empty + self.documents_skipped
            assert self.documents_read == accounted, f"{self.documents_read} documents read, {accounted} accounted for"

    @staticmethod
    def from_json(data: dict[str, Any]) -> Ledger:
        """From the journal, which holds it as ``dataclasses.asdict`` does."""
        keys = [KeyCounts(**counts) for counts in data["keys"]]
        return Ledger(**{**data, "keys": keys, "position": BlockPosition(**data["position"])})
