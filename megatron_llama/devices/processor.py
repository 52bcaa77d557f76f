"""The machine's processor, from Linux's files, the rate of matmuls on a device, and the compiler of our C++."""
from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def processor() -> dict[str, str]:
    """Of the first core, such as its "model name" and "flags"; empty where Linux says nothing."""
    with suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return {}


def has_512_bit_units() -> bool:
    """Whether it is an AMD whose units have the width of its AVX-512 instructions: from Zen 5 on. Zen 4 takes two
    turns for each."""
    found = processor()
    family, flags = found.get("cpu family", ""), found.get("flags", "").split()
    return found.get("vendor_id") == "AuthenticAMD" and "avx512f" in flags and family.isdecimal() and int(family) >= 26


def instruction_set() -> str:
    """A name for what code that is compiled here may need: the architecture, and a hash of the extensions.

    Inductor compiles for this very processor (``-march=native``, and vectors of its width), but its cache's keys do not
    say so (torch 2.11 to 2.13): a graph from a machine with AVX-512 gives NaN on one that has AVX2 alone.
    """
    found = processor()
    extensions = sorted((found.get("flags") or found.get("Features") or platform.processor()).split())
    extensions.append(os.environ.get("ATEN_CPU_CAPABILITY", ""))  # by which torch is told to use fewer
    return f"{platform.machine()}-{hashlib.sha256(' '.join(extensions).encode()).hexdigest()[:8]}"


def matmul_rate(
    size: int,
    dtype: torch.dtype,
    seconds: float,
    device: str | torch.device = "cpu",
    wait: Callable[[], object] = lambda: None,
) -> float:
    """FLOP/s of the best of the products of two matrices of ``size`` rows and columns that ``seconds`` have room for.
    ``wait`` returns when the device has finished."""
    import torch

    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


# C++ of our own on a CPU, compiled for the processor that runs it.

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
