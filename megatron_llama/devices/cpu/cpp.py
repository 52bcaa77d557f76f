"""C++ of our own on a CPU, compiled for the processor that runs it."""

from __future__ import annotations

import ctypes
import warnings


def load_cpp(source: str, instead: str) -> ctypes.CDLL | None:
    """The compiled ``source``, by Inductor's compiler and in Inductor's cache: seconds, once for a kind of processor.
    None where it can't be had, with a warning that says what happens ``instead``."""
    from torch._inductor.codecache import CppCodeCache  # a second, and only compiled runs load it

    try:
        return CppCodeCache.load(source)
    except (RuntimeError, OSError) as error:  # the compiler's, or the loader's
        why = str(error).strip().split("\n", 1)[0]
        warnings.warn(f"{instead} ({why})", stacklevel=3)
        return None
