"""Work whose files can't grow."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path


def on_a_full_disk(work: Callable[[], None], errors: Path, size: int) -> str:
    """Run ``work`` with files limited to ``size`` bytes; return stderr. The exit status must be 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, errors.read_text()
    return errors.read_text()
