"""Standard output and error of a run are a courtesy: where they are lost the run goes on, and a file has the rest.

They are lost by a reader of a pipe that ends (``| head``), a terminal that closes, a full disk, a descriptor that was
closed before the start, or a reader that stops reading. A character that their encoding lacks is written as \\uXXXX.
"""

from __future__ import annotations

import io
import os
import select
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

FILE = "console.txt"
"""In the run's folder: what could not be shown."""
STALLED_SECONDS = 60.0
"""An output that takes nothing for so long counts as lost: whoever pages through it must not stop the training."""
# So much fits into a pipe that poll calls writable, so that no write waits.
_PIECE = 4096
# Where the file of lost output is; in the environment, because ranks may be Pythons of their own.
_SPILL = "MEGATRON_LLAMA_CONSOLE"
_KEPT_BYTES = 1 << 20


class _Output(io.RawIOBase):
    """A file descriptor that takes everything; what can't be written to it goes to the file of lost output."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.name = descriptor, "stdout" if descriptor == 1 else "stderr"
        self.loss: str | None = None
        self._spilled = False
        self._early = bytearray()  # lost before there was a file for it

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
        self._early += left[: max(0, _KEPT_BYTES - len(self._early))]
        return size

    def _write_some(self, data: memoryview) -> int:
        """Writes what it can without waiting for ever; the number of bytes."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        if not poll.poll(1000 * STALLED_SECONDS):
            raise TimeoutError(0, f"nobody has read it for {STALLED_SECONDS:g} s")
        try:
            return os.write(self.descriptor, data[:_PIECE])
        except BlockingIOError:
            return 0

    def lose(self, loss: str) -> None:
        """Puts the file of lost output in the descriptor's place; nothing where that is lost too, or not known yet."""
        first, self.loss = self.loss is None, self.loss or loss
        if not (first and self.spill()):
            _replace(self.descriptor, os.devnull)  # the next file that is opened must not get this number

    def spill(self) -> bool:
        """Goes on in the file of lost output, where there is one; whether it does."""
        path = os.environ.get(_SPILL)
        if path is None or not _replace(self.descriptor, path):
            return False
        self._spilled = True
        early, self._early = bytes(self._early), bytearray()
        self.write(
            f"{self.name} is lost: {self.loss}. What process {os.getpid()} prints goes on here.\n".encode() + early
        )
        other = _outputs[3 - self.descriptor]
        if other.loss is None:
            other.write(f"{self.name} is lost: {self.loss}. The run goes on and prints to {path}\n".encode())
        return True


_outputs: dict[int, _Output] = {}


def protect_output() -> None:
    """Makes ``sys.stdout`` and ``sys.stderr`` of this process, and of those that it forks, ones that never fail."""
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:  # the next file that is opened would get its number, and what is printed
        _replace(number, os.devnull)
    for number, old in ((1, sys.stdout), (2, sys.stderr)):
        _outputs[number] = _Output(number)
        made = io.TextIOWrapper(
            cast(BinaryIO, _outputs[number]),
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
            write_through=getattr(old, "write_through", False),  # as PYTHONUNBUFFERED wants it
        )
        setattr(sys, _outputs[number].name, made)
    for number in closed:
        if number:
            _outputs[number].lose("it was closed before the start")


def set_spill_folder(folder: Path) -> None:
    """From here on, what can't be shown goes to a file in ``folder``, the run's."""
    if _outputs:
        os.environ[_SPILL] = str(folder / FILE)
        for output in _outputs.values():
            if output.loss is not None:
                output.spill()


def stdout_loss() -> str | None:
    """Why standard output takes nothing any more; None where it does, or is not protected."""
    return _outputs[1].loss if _outputs else None


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _replace(number: int, path: str) -> bool:
    """Opens a file, for appending, under a descriptor's number; False where it can't be opened."""
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
