"""Processor properties from Linux's files, matmul rates, and the compiler of the C++ kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def processor() -> dict[str, str]:
    """Return /proc/cpuinfo's entries of the first core, such as "model name" and "flags". Empty if unavailable."""
    with suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    return {}


def has_512_bit_units() -> bool:
    """Whether the processor is an AMD with 512-bit vector units: Zen 5 and later. Zen 4 splits the instructions."""
    facts = processor()
    family, flags = facts.get("cpu family", ""), facts.get("flags", "").split()
    return facts.get("vendor_id") == "AuthenticAMD" and "avx512f" in flags and family.isdecimal() and int(family) >= 26


def instruction_set() -> str:
    """Return a name of the instruction set: the architecture, and a hash of the extensions.

    Inductor compiles for the host's processor (``-march=native``), but its cache keys omit it (torch 2.11 to 2.13): a
    graph from a machine with AVX-512 returns NaN on a machine with AVX2 only.
    """
    facts = processor()
    extensions = sorted((facts.get("flags") or facts.get("Features") or platform.processor()).split())
    extensions.append(os.environ.get("ATEN_CPU_CAPABILITY", ""))  # limits the extensions that torch uses
    return f"{platform.machine()}-{hashlib.sha256(' '.join(extensions).encode()).hexdigest()[:8]}"


def matmul_rate(
    size: int,
    dtype: torch.dtype,
    seconds: float,
    device: str | torch.device = "cpu",
    wait: Callable[[], object] = lambda: None,
) -> float:
    """Return the best FLOP/s of matmuls of two [size, size] matrices, repeated for ``seconds``.

    ``wait`` returns when the device has finished.
    """
    import torch

    # Random numbers: a GPU needs less power for constants, and is faster. Not from the generator of the run.
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, size, generator=generator, dtype=dtype).to(device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def best_matmul_rate(sizes: Sequence[int], dtype: torch.dtype) -> tuple[float, int]:
    """Return (FLOP/s, size) of the fastest of several short measurements on the CPU, about 0.3 s on an idle host.

    Other programs can slow down any measurement but speed up none. So measurements are repeated until the two fastest
    rounds agree, at most for ROUND_LIMIT_SECONDS.
    """
    rounds: list[tuple[float, int]] = []
    end = time.perf_counter() + ROUND_LIMIT_SECONDS
    while True:
        rounds.append(max((matmul_rate(size, dtype, ROUND_SECONDS), size) for size in sizes))
        best, *others = sorted(rounds, reverse=True)
        agree = len(rounds) >= LEAST_ROUNDS and others[0][0] >= AGREEMENT * best[0]
        if agree or time.perf_counter() > end:
            return best


ROUND_SECONDS, ROUND_LIMIT_SECONDS, LEAST_ROUNDS, AGREEMENT = 0.04, 2.0, 4, 0.97


def load_cpp(source: str, instead: str) -> ctypes.CDLL | None:
    """Compile ``source`` with Inductor's compiler into Inductor's cache: seconds, once per instruction set.

    Returns None if it fails, with a warning that begins with ``instead``.
    """
    from torch._inductor.codecache import CppCodeCache  # takes a second to import; only compiled runs need it

    try:
        return CppCodeCache.load(source)
    except (RuntimeError, OSError) as error:  # from the compiler or the loader
        why = str(error).strip().split("\n", 1)[0]
        warnings.warn(f"{instead} ({why})", stacklevel=3)
        return None
