"""An LD_PRELOAD library that makes writes below a folder fail, or moves the wall clock, on request.

Faults affect only the runs that load it. Requires Linux and a C compiler.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

CONTROL = "MEGATRON_LLAMA_CHAOS_CONTROL"
_FOLDER_BYTES = 1024
_SOURCE = Path(__file__).with_name("interposer.c")


class _Control(ctypes.Structure):
    """Shared memory of the library; equals struct control in C."""

    _fields_ = [
        ("seconds", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("hits", ctypes.c_int32),
        ("spare", ctypes.c_int32),
        ("folder", ctypes.c_char * _FOLDER_BYTES),
    ]


class Interposer:
    """The library's controls. Runs that are forked from this process share them."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._map)

    @classmethod
    def loaded(cls) -> Interposer | None:
        """Return the controls if the library is loaded into this process."""
        path = os.environ.get(CONTROL)
        return cls(Path(path)) if path else None

    def disk_fails(self, folder: Path, error: int, after: int) -> None:
        """Make operations that write below ``folder`` fail with errno ``error`` after ``after`` writes."""
        self._control.error = 0
        self._control.folder = os.fsencode(f"{folder}/")[: _FOLDER_BYTES - 1]
        self._control.left, self._control.hits = after, 0
        self._control.error = error

    def clock_jumps(self, seconds: int) -> None:
        """Set the offset of the wall clock from the correct time."""
        self._control.seconds = seconds

    @property
    def failed_writes(self) -> int:
        """Number of failed writes since the last ``disk_fails``."""
        return self._control.hits

    def heal(self) -> None:
        self._control.error = self._control.seconds = 0


DISK_ERRORS = {
    "disk full": errno.ENOSPC,
    "quota exceeded": errno.EDQUOT,
    "read-only": errno.EROFS,
    "no permission": errno.EACCES,
    "stale handle": errno.ESTALE,
    "input/output error": errno.EIO,
}


def build(folder: Path) -> dict[str, str] | str:
    """Compile the library into ``folder``; return the variables that load it, or an error message."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return "requires Linux and a C compiler"
    library, control = folder / "interposer.so", folder / "control"
    command = [compiler, "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{compiler}: {done.stderr.strip()}"
    control.write_bytes(bytes(ctypes.sizeof(_Control)))
    return {"LD_PRELOAD": str(library), CONTROL: str(control)}
