"""Pipes as input: standard input, ``<(zcat x.gz)``, a FIFO.

A run reads its input's beginning more than once, and in several processes. So a pipe's bytes go to a nameless temporary
file first, which is gone with this process however it ends.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

from megatron_llama.system.errors import UserError

STDIN = "-"
_kept: list[IO[bytes]] = []
"""Open as long as this process and its workers live."""


@dataclass(frozen=True)
class Stored:
    """A pipe's content."""

    path: str
    size: int
    """Bytes."""
    identity: int
    """Of the content; in place of a file's time, so that a run with the same content goes on."""


def is_pipe(status: os.stat_result) -> bool:
    """Whether it can be read only once, from its beginning to its end."""
    return stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or stat.S_ISCHR(status.st_mode)


def stored(path: str) -> Stored:
    """Reads a pipe to its end, into $TMPDIR.

    Raises:
        UserError: it is a terminal or another device, or there is no room.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as pipe:
            if stat.S_ISCHR(os.fstat(pipe.fileno()).st_mode):
                raise UserError(f"{path} is a terminal or a device: name a file, or write into a pipe")
            file = tempfile.TemporaryFile() if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile()
            sys.stderr.write(f"note: {path} is a pipe: its bytes go to {tempfile.gettempdir()} first\n")
            while piece := pipe.read(1 << 20):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
    except OSError as error:
        raise UserError(f"can't store the pipe {path} in {tempfile.gettempdir()}: {error.strerror}") from None
    _kept.append(file)
    name = f"/proc/self/fd/{file.fileno()}" if isinstance(file.name, int) else file.name
    return Stored(name, size, int(digest.hexdigest()[:15], 16))
