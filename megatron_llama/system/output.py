"""Console output that never stops a run: if stdout or stderr is lost, a file in the run's folder gets the rest.

Causes: a pipe's reader exits (``| head``) or stops reading, the terminal closes, the disk is full, or a descriptor was
closed before the start. Characters that the encoding lacks are written as \\uXXXX.
"""

from __future__ import annotations

import io
import os
import select
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

FILE = "console.txt"
"""File in the run's folder for output that the console did not take."""
STALLED_SECONDS = 60.0
"""Time without a successful write after which an output counts as lost, so that a paused pager cannot stop a run."""
# A pipe that poll reports as writable takes this many bytes without blocking.
_CHUNK_BYTES = 4096
# Variable with the path of the file for lost output. Ranks may be separate processes, so it is in the environment.
_SPILL = "MEGATRON_LLAMA_CONSOLE"
_MAX_EARLY_BYTES = 1 << 20


def import_pyplot() -> Any:
    """Return matplotlib's pyplot, without a display and without its log lines, e.g. on a home that is not writable."""
    import logging  # most programs draw nothing

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


class _Output(io.RawIOBase):
    """File object over a descriptor whose writes never fail; lost output goes to the spill file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.name = descriptor, "stdout" if descriptor == 1 else "stderr"
        self.loss: str | None = None
        self._spilled = False
        self._early = bytearray()  # output lost before the spill file is set

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: Any) -> int:
        left = memoryview(bytes(data))
        size = len(left)
        while left and (self.loss is None or self._spilled):
            try:
                left = left[self._write_some(left) :]
            except OSError as error:
                self.lose(error.strerror or str(error))
        self._early += left[: max(0, _MAX_EARLY_BYTES - len(self._early))]
        return size

    def _write_some(self, data: memoryview) -> int:
        """Write a chunk, waiting at most STALLED_SECONDS; return the number of bytes."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        if not poll.poll(1000 * STALLED_SECONDS):
            raise TimeoutError(0, f"its reader has not read for {STALLED_SECONDS:g} s")
        try:
            return os.write(self.descriptor, data[:_CHUNK_BYTES])
        except BlockingIOError:
            return 0

    def lose(self, loss: str) -> None:
        """Redirect the descriptor to the spill file, or to /dev/null if there is no spill file."""
        first, self.loss = self.loss is None, self.loss or loss
        if not (first and self.spill()):
            _replace(self.descriptor, os.devnull)  # the next file that is opened must not get this number

    def spill(self) -> bool:
        """Redirect the descriptor to the spill file; return False if there is none."""
        path = os.environ.get(_SPILL)
        if path is None or not _replace(self.descriptor, path):
            return False
        self._spilled = True
        early, self._early = bytes(self._early), bytearray()
        self.write(
            f"{self.name} is lost: {self.loss}. Process {os.getpid()} continues to print here.\n".encode() + early
        )
        other = _outputs[3 - self.descriptor]
        if other.loss is None:
            other.write(f"{self.name} is lost: {self.loss}. The run continues and prints to {path}\n".encode())
        return True


_outputs: dict[int, _Output] = {}


def protect_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` of this process and its forks by objects whose writes never fail."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(number)
    for number in closed:  # else the next opened file gets this number, and the printed text
        _replace(number, os.devnull)
    for number, old in ((1, sys.stdout), (2, sys.stderr)):
        _outputs[number] = _Output(number)
        stream = io.TextIOWrapper(
            cast(BinaryIO, _outputs[number]),
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
            write_through=getattr(old, "write_through", False),  # set by PYTHONUNBUFFERED
        )
        setattr(sys, _outputs[number].name, stream)
    for number in closed:
        if number:
            _outputs[number].lose("it was closed before the start")


def set_spill_folder(folder: Path) -> None:
    """Send lost output to a file in ``folder``, the run's folder."""
    if _outputs:
        os.environ[_SPILL] = str(folder / FILE)
        for output in _outputs.values():
            if output.loss is not None:
                output.spill()


def stdout_loss() -> str | None:
    """Return why standard output is lost; None if it works or is not protected."""
    return _outputs[1].loss if _outputs else None


def _replace(number: int, path: str) -> bool:
    """Open a file for appending under a descriptor's number; return False if it cannot be opened."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        new = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:
        return False
    if new != number:
        os.dup2(new, number)
        os.close(new)
    os.set_inheritable(number, True)
    return True
