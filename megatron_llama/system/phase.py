"""Where this process is: the one phase of its work, for whoever watches that it gets on.

A rank's phase stands in a small file in memory that its starter reads, so that it can be read also when the rank is
stopped, holds the interpreter's lock, or has not imported torch yet.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import IO

# Reading, writing and compiling may take long without a fault: big models load for many minutes, and compilers have
# taken more than an hour.
PATIENT = 8.0
UNWATCHED = float("inf")
_RECORD_BYTES = 200


@dataclass(frozen=True)
class Phase:
    """A part of a process's work. Processes that do the same work count it the same."""

    number: int
    """Phases that the process has entered before."""
    name: str
    patience: float = 1.0
    """It may take so many times the limit of a step; infinite: any time."""


class PhaseFile:
    """The record of one process's phase, shared between it and its starter."""

    def __init__(self) -> None:
        # Memory, not a disk: a full one must not look like a hang.
        self.file: IO[bytes] = (
            os.fdopen(os.memfd_create("phase"), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
        )
        _write(self.file.fileno(), Phase(0, "the start of its process", PATIENT))

    def read(self) -> Phase:
        """The phase that the process is in."""
        number, patience, name = os.pread(self.file.fileno(), _RECORD_BYTES, 0).decode(errors="replace").split(" ", 2)
        return Phase(int(number), name.rstrip(), float(patience))


_current = Phase(0, "the start of its process", PATIENT)
_descriptor: int | None = None


def share(descriptor: int) -> None:
    """From now on this process writes its phases to its starter's PhaseFile, open under ``descriptor``."""
    global _descriptor
    _descriptor = descriptor


def current() -> Phase:
    """The phase that this process is in."""
    return _current


def enter(name: str, patience: float = 1.0) -> None:
    """The phase ``name`` begins now. Ranks of one run must enter the same phases in the same order."""
    global _current
    _current = Phase(_current.number + 1, name, patience)
    if _descriptor is not None:
        _write(_descriptor, _current)


def advance(detail: str) -> None:
    """Progress inside a phase: its time begins anew. ``detail`` replaces an earlier one."""
    enter(f"{_current.name.partition(': ')[0]}: {detail}", _current.patience)


def _write(descriptor: int, phase: Phase) -> None:
    text = f"{phase.number} {phase.patience} {phase.name}".encode()[:_RECORD_BYTES]
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES), 0)  # one call: a reader sees the old record or the new one
