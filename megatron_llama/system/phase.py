"""The current phase of a process's work, which the watchdog reads to detect hangs.

A rank writes its phase to a small file in memory that the launcher reads. This works while the rank is stopped, holds
the GIL or has not imported torch yet. The variable that identifies the attempt of a start is here too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import IO

PATIENT = 8.0
"""Factor on the step's time limit for phases that may be slow without a fault: loading, saving and compiling."""
UNWATCHED = float("inf")
"""Factor of a phase without a time limit."""
FINISHING = "finishing the save"
"""Begin of the name of a failed rank's last phase, in which its launcher does not end it."""
_RECORD_BYTES, _WAIT_BYTES = 200, 56


@dataclass(frozen=True)
class Phase:
    """A part of a process's work. Processes that do the same work give it the same number."""

    number: int
    """Number of phases that the process entered earlier."""
    name: str
    patience: float = 1.0
    """Factor on the step's time limit (``trainer.hang_timeout_seconds``); infinite: no limit."""


class PhaseFile:
    """Record of one process's phase, shared with its launcher."""

    def __init__(self) -> None:
        # In memory: a full disk must not look like a hang.
        self.file: IO[bytes] = (
            os.fdopen(os.memfd_create("phase"), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
        )
        os.ftruncate(self.file.fileno(), _RECORD_BYTES + _WAIT_BYTES)
        _write(self.file.fileno(), Phase(0, "the start of its process", PATIENT))

    def read(self) -> Phase:
        """Return the process's current phase."""
        return read_phase(self.file.fileno())

    @property
    def awaited(self) -> str:
        """Collective in which the process waits for others; empty if it does not wait."""
        return os.pread(self.file.fileno(), _WAIT_BYTES, _RECORD_BYTES).rstrip(b"\0").decode(errors="replace")


_current = Phase(0, "the start of its process", PATIENT)
_descriptor: int | None = None
_awaited = ""
_shared_wait: mmap.mmap | None = None


def share(descriptor: int) -> None:
    """Write the phases of this process to the launcher's PhaseFile, which is open under ``descriptor``."""
    global _descriptor, _shared_wait
    _descriptor, _shared_wait = descriptor, mmap.mmap(descriptor, _RECORD_BYTES + _WAIT_BYTES)


def is_shared() -> bool:
    """Return whether a launcher of this project started the process and reads its phases."""
    return _descriptor is not None


def current() -> Phase:
    """Return the current phase of this process."""
    return _current


def enter(name: str, patience: float = 1.0) -> None:
    """Begin the phase ``name``. Ranks of one run must enter the same phases in the same order."""
    global _current
    _current = Phase(_current.number + 1, name, patience)
    if _descriptor is not None:
        _write(_descriptor, _current)


def advance(detail: str) -> None:
    """Report progress inside a phase, which restarts its time limit. ``detail`` replaces the previous detail."""
    enter(f"{_current.name.partition(': ')[0]}: {detail}", _current.patience)


def wait_for(collective: str) -> None:
    """Record that this process waits in a collective, such as "tp all_reduce"; "" ends the wait.

    Writes to shared memory without a system call: a step has hundreds of collectives.
    """
    global _awaited
    _awaited = collective
    if _shared_wait is not None:
        _shared_wait[_RECORD_BYTES:] = collective.encode()[:_WAIT_BYTES].ljust(_WAIT_BYTES, b"\0")


def awaited() -> str:
    """Return the collective that this process waits in; empty if it does not wait."""
    return _awaited


def read_phase(descriptor: int) -> Phase:
    """Return the phase in an open PhaseFile."""
    number, patience, name = os.pread(descriptor, _RECORD_BYTES, 0).decode(errors="replace").split(" ", 2)
    return Phase(int(number), name.rstrip(), float(patience))


def _write(descriptor: int, phase: Phase) -> None:
    text = f"{phase.number} {phase.patience} {phase.name}".encode()[:_RECORD_BYTES]
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES), 0)  # one call: a reader sees the old record or the new one


# torchrun restarts ranks with the store of the earlier attempt, whose entries must be ignored.

ATTEMPT = "MEGATRON_LLAMA_ATTEMPT"
"""Environment variable with a value that only the ranks of one attempt share."""
