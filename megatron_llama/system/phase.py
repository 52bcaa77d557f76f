"""Where this process is: the one phase of its work, for whoever watches that it gets on.

A rank's phase stands in a small file in memory that its starter reads, so that it can be read also when the rank is
stopped, holds the interpreter's lock, or has not imported torch yet. The attempt of its start is here too.
"""
from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import IO

# Reading, writing and compiling may take long without a fault: big models load for many minutes, and compilers have
# taken more than an hour.
PATIENT = 8.0
UNWATCHED = float("inf")
_RECORD_BYTES, _WAIT_BYTES = 200, 56


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
        os.ftruncate(self.file.fileno(), _RECORD_BYTES + _WAIT_BYTES)
        _write(self.file.fileno(), Phase(0, "the start of its process", PATIENT))

    def read(self) -> Phase:
        """The phase that the process is in."""
        number, patience, name = os.pread(self.file.fileno(), _RECORD_BYTES, 0).decode(errors="replace").split(" ", 2)
        return Phase(int(number), name.rstrip(), float(patience))

    @property
    def awaited(self) -> str:
        """The collective in which the process waits for others; empty where it does not."""
        return os.pread(self.file.fileno(), _WAIT_BYTES, _RECORD_BYTES).rstrip(b"\0").decode(errors="replace")


_current = Phase(0, "the start of its process", PATIENT)
_descriptor: int | None = None
_awaited = ""
_shared_wait: mmap.mmap | None = None


def share(descriptor: int) -> None:
    """From now on this process writes its phases to its starter's PhaseFile, open under ``descriptor``."""
    global _descriptor, _shared_wait
    _descriptor, _shared_wait = descriptor, mmap.mmap(descriptor, _RECORD_BYTES + _WAIT_BYTES)


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


def wait_for(collective: str) -> None:
    """From now on this process waits for others in a collective, such as "tp all_reduce"; for "" it does not. Memory,
    and no call of the system: a step has hundreds of them."""
    global _awaited
    _awaited = collective
    if _shared_wait is not None:
        _shared_wait[_RECORD_BYTES:] = collective.encode()[:_WAIT_BYTES].ljust(_WAIT_BYTES, b"\0")


def awaited() -> str:
    """What this process waits for; empty where it does not."""
    return _awaited


def _write(descriptor: int, phase: Phase) -> None:
    text = f"{phase.number} {phase.patience} {phase.name}".encode()[:_RECORD_BYTES]
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES), 0)  # one call: a reader sees the old record or the new one


# The attempt of its start that a rank belongs to. torchrun starts ranks again in the store where earlier ones met,
# whose entries must not count.

ATTEMPT = "MEGATRON_LLAMA_ATTEMPT"
"""The variable with a word that the ranks of one attempt share, and no others have."""
