"""Work folder of a run: partial output files and a journal of checkpoints.

``<folder>/.<name>.partial/`` is in the output folder, so that finished files move by a rename. It holds the growing
.bin, the documents' lengths, the quarantined lines and a journal. A checkpoint is a line of the journal, written after
its data is on disk. The same command resumes there, with files truncated to it; other options are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from data_prep.lib.blocks import START, BlockPosition, TextBlock
from data_prep.lib.run_options import BlockResult, RunOptions
from megatron_llama.system.errors import MachineError, UserError
from megatron_llama.system.files import try_lock, unlock, write_atomically

JOURNAL = "journal.jsonl"
QUARANTINE = "quarantine.jsonl"
READ_BYTES = 1 << 20


class Locked(UserError):
    """The work folder is locked by another run."""


class Workspace:
    """Locked work folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        """Create and lock the folder. ``names`` are the outputs' names, one per JSON key.

        Raises:
            UserError: The folder cannot be created.
            Locked: Another run has locked it.
        """
        self.folder = folder
        self.names = names
        self._data_files = [*(f"{name}{suffix}" for name in names for suffix in (".bin", ".lengths")), QUARANTINE]
        self._lock = _lock_folder(folder)
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}

    def resume_or_begin(
        self, identity: dict[str, Any], options: RunOptions, report: Callable[[str], None], begin: BlockPosition = START
    ) -> Ledger:
        """Resume an unfinished run with the options ``identity``, or start a new one at ``begin``.

        Raises UserError for an unfinished run with other options, without ``--overwrite``.
        """
        begun, checkpoints = read_journal(self.folder)
        different = describe_differences(begun, identity) if begun is not None else []
        if different and not options.overwrite:
            same_but_for_content = begun is not None and {**begun, "input_state": ""} == {**identity, "input_state": ""}
            if not same_but_for_content:
                raise UserError(
                    f"{self.folder} has an unfinished run with other options: {'; '.join(different)}. "
                    "Rerun with its options, remove the folder, or write --overwrite to start over"
                )
            report("input files changed since the unfinished run: starting over")
        elif begun is not None and checkpoints and not different:
            if checkpoints[-1]["ledger"]["skipped"] and options.on_bad_line == "error":
                raise UserError(
                    f"the unfinished run in {self.folder} skipped bad lines: write --on-bad-line skip to resume"
                )
            ledger = self._resume(identity, checkpoints[-1])
            if ledger is not None:
                report(f"resuming after {ledger.documents_read:,} documents of an unfinished run")
                return ledger
            report("files of the unfinished run are damaged: starting over")
        self.begin(identity)
        return Ledger([KeyCounts() for _ in self.names], begin)

    def begin(self, identity: dict[str, Any]) -> None:
        """Start a new run; delete existing files."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()
        self._write_journal([{"identity": identity}])
        self._open_files("wb")

    def _resume(self, identity: dict[str, Any], checkpoint: dict[str, Any]) -> Ledger | None:
        """Truncate the files to a checkpoint; return None if they differ from it, e.g. after a power failure."""
        if not all(self._matches(name, checkpoint) for name in self._data_files):
            self._hashes.clear()
            return None
        for name in self._data_files:
            os.truncate(self.folder / name, checkpoint["sizes"][name])
        self._write_journal([{"identity": identity}, checkpoint])
        self._open_files("ab")
        return Ledger.from_json(checkpoint["ledger"])

    def _matches(self, name: str, checkpoint: dict[str, Any]) -> bool:
        """Return whether a file begins with the bytes of a checkpoint."""
        digest = self._hashes[name] = hashlib.sha256()
        for chunk in read_prefix(self.folder / name, checkpoint["sizes"][name]):
            digest.update(chunk)
        return (self.folder / name).exists() and digest.hexdigest() == checkpoint["sha256"][name]

    def _write_journal(self, entries: list[dict[str, Any]]) -> None:
        write_atomically(self.folder / JOURNAL, "".join(json.dumps(entry) + "\n" for entry in entries))

    def _open_files(self, mode: str) -> None:
        for name in self._data_files:
            self._files[name] = open(self.folder / name, mode, buffering=0)
            self._hashes.setdefault(name, hashlib.sha256())
        self._files[JOURNAL] = open(self.folder / JOURNAL, "ab", buffering=0)

    def append(self, name: str, data: bytes) -> None:
        """Append to one of the files. Raises MachineError if the write failed, e.g. because the disk is full."""
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
            f"cannot write to {self.folder}: {error.strerror}. Progress is saved there: "
            "fix the cause and rerun the same command"
        )

    def checkpoint(self, ledger: Ledger, **more: Any) -> None:
        """Write a checkpoint that survives a power failure."""
        entry = {
            "ledger": asdict(ledger),
            "sizes": {name: os.fstat(self._files[name].fileno()).st_size for name in self._data_files},
            "sha256": {name: self._hashes[name].hexdigest() for name in self._data_files},
            **more,
        }
        try:
            for name in self._data_files:
                getattr(os, "fdatasync", os.fsync)(self._files[name].fileno())  # macOS has no fdatasync
            self.append(JOURNAL, json.dumps(entry).encode() + b"\n")
            os.fsync(self._files[JOURNAL].fileno())
        except OSError as error:
            raise self._failed(error) from None

    def sha256(self, name: str) -> str:
        """Return the sha256 of a data file as written so far."""
        return str(self._hashes[name].hexdigest())

    def close(self) -> None:
        """Close the data files; the lock stays until ``remove`` or process exit."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def unlock(self) -> None:
        """Release the lock."""
        unlock(self._lock)
        self._lock.close()

    def remove(self) -> None:
        """Remove the folder and release the lock."""
        self.close()
        shutil.rmtree(self.folder)
        self.unlock()


def read_journal(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return (options, checkpoints) of the run in a work folder; ignore an incomplete last line."""
    entries = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for line in (folder / JOURNAL).read_bytes().split(b"\n")[:-1]:
            entries.append(json.loads(line))
    return (entries[0]["identity"], entries[1:]) if entries else (None, [])


# Options that are digests, which name nothing to users.
_CONTENTS = {
    "input_state": "the size or time of an input file",
    "tokenizer_sha256": "the tokenizer",
    "chat_template_sha256": "the chat template",
    "chat_template_source": "the chat template",
}


def describe_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Format the differences between two runs' options, one string each."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            before, now = json.dumps(old.get(key)), json.dumps(new.get(key))
            if key in _CONTENTS:
                changes.append(f"{_CONTENTS[key]} changed")
                continue
            long = len(before) + len(now) > 200
            changes.append(f"{key} differs" if long else f"{key} was {before} and is now {now}")
    return changes


def read_prefix(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first ``size`` bytes of a file in chunks; fewer if it is shorter or missing."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while size and (chunk := file.read(min(size, READ_BYTES))):
            size -= len(chunk)
            yield chunk


def _close(file: Callable[[], IO[bytes] | None]) -> None:
    """Close a lock in a worker, which would hold it after its parent was killed."""
    if (lock := file()) is not None:
        lock.close()


def _lock_folder(folder: Path) -> IO[bytes]:
    """Lock the folder for this process."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / "lock", "wb")
        except OSError as error:
            raise UserError(f"cannot write to the output folder {folder.parent}: {error.strerror}") from None
        if try_lock(lock) is False:
            lock.close()
            raise Locked(f"another run is writing this output: {folder} is locked")
        # Another run may have removed the folder between open and lock.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(folder / "lock").st_ino == os.fstat(lock.fileno()).st_ino:
                os.register_at_fork(after_in_child=partial(_close, weakref.ref(lock)))
                return lock
        lock.close()


# Counts of a run. Each document read is written, empty or skipped; the sum is checked.


@dataclass
class KeyCounts:
    """Document and token counts of one JSON key."""

    written: int = 0
    empty: int = 0
    tokens: int = 0


@dataclass
class Ledger:
    """Counts up to a position in the input."""

    keys: list[KeyCounts]
    position: BlockPosition = field(default_factory=BlockPosition)
    line: int = 0
    """Lines of the current source before the position."""
    documents_read: int = 0
    text_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Skipped documents by reason."""
    notes: dict[str, int] = field(default_factory=dict)
    """Modified examples of a fine-tuning dataset by kind of modification."""
    learned: int = 0
    """Tokens with loss, of a fine-tuning dataset."""

    def add(self, block: TextBlock, result: BlockResult) -> None:
        """Add the counts of a block."""
        for segment, lines in zip(block.segments, result.lines, strict=True):
            self.line = lines + (self.line if segment.source == self.position.source else 0)
            self.position = BlockPosition(segment.source, segment.end)
        keys = []
        for data in result.lengths:
            lengths = np.frombuffer(data, dtype="<i4")
            filled = int(np.count_nonzero(lengths))
            keys.append(KeyCounts(filled, len(lengths) - filled, int(lengths.sum(dtype=np.int64))))
        skipped = Counter(record.reason for record in result.bad)
        read, size = result.documents_read, result.text_bytes
        self.add_ledger(Ledger(keys, self.position, self.line, read, size, skipped, result.notes, result.learned))

    def add_ledger(self, other: Ledger) -> None:
        """Add the counts of another part of the input; keep position and line."""
        self.documents_read += other.documents_read
        self.text_bytes += other.text_bytes
        self.learned += other.learned
        self.skipped = dict(Counter(self.skipped) + Counter(other.skipped))
        self.notes = dict(Counter(self.notes) + Counter(other.notes))
        for counts, more in zip(self.keys, other.keys, strict=True):
            counts.written += more.written
            counts.empty += more.empty
            counts.tokens += more.tokens
        self.check()

    def line_before(self, block: TextBlock, index: int, result: BlockResult) -> int:
        """Return the lines of a source before a segment of a block that is not yet added."""
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
        """Tokens of all keys."""
        return sum(counts.tokens for counts in self.keys)

    def check(self) -> None:
        """Assert that each document is counted once."""
        for counts in self.keys:
            accounted = counts.written + counts.empty + self.documents_skipped
            assert self.documents_read == accounted, f"{self.documents_read} documents read, {accounted} accounted for"

    @staticmethod
    def from_json(data: dict[str, Any]) -> Ledger:
        """Build a ledger from its ``dataclasses.asdict`` in the journal."""
        keys = [KeyCounts(**counts) for counts in data["keys"]]
        return Ledger(**{**data, "keys": keys, "position": BlockPosition(**data["position"])})
