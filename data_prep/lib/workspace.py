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
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from data_prep.lib.ledger import Ledger
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
        self._open("wb")

    def resume(self, identity: dict[str, Any], checkpoint: dict[str, Any]) -> Ledger | None:
        """Cuts the files back to a checkpoint; None where they don't agree with it (after a power cut, say)."""
        for name in self._data_files:
            if self._hash_prefix(name, checkpoint["sizes"][name]) != checkpoint["sha256"][name]:
                self._hashes.clear()
                return None
        for name in self._data_files:
            os.truncate(self.folder / name, checkpoint["sizes"][name])
        self._write_journal([{"identity": identity}, checkpoint])
        self._open("ab")
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

    def _open(self, mode: str) -> None:
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
