"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that replaces `path` when the block ends, and leaves no trace where it raises.

    A file that holds the same already is left as it is.

    Raises:
        OSError: the folder can't be made or written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and filecmp.cmp(draft, path, shallow=False):
            return  # what is made from it, and checked by its time of change, stays valid
        os.replace(draft, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """The file's sha256 in hexadecimal, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
