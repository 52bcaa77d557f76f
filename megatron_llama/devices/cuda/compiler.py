"""The requirements of torch.compile on a host with GPUs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def compiler_missing() -> str | None:
    """Return None if Triton can compile its launchers, modules of Python, with a C compiler; else the reason."""
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang"])):
        name = f"{compiler} (CC)" if compiler else "gcc"
        return f"torch.compile on a GPU needs a C compiler, and {name} is not installed"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        return f"torch.compile on a GPU needs Python's header files, and {header} is missing (package python3-dev)"
    return None
