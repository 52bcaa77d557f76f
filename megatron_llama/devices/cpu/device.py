"""The CPU, the device that is always there: ranks are processes that share the machine's cores and memory."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.devices.base import INDUCTOR, Device, Peak
from megatron_llama.devices.processor import matmul_rate, processor

if TYPE_CHECKING:
    import torch

    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels


class Cpu(Device):
    """One rank per process; its threads are the cores divided by the ranks on this machine."""

    name = "cpu"
    backend = "gloo_shared_memory"
    is_accelerator = False
    forkable = True
    compiler = INDUCTOR
    attention = "tiles"
    asynchronous = False
    keeps_bf16_grads = True

    def probe(self) -> str | None:
        return None

    def count(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)

    def memory_bytes(self) -> int:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *_memory_limits()])

    def hardware(self) -> dict[str, str]:
        name = processor().get("model name")
        return {} if name is None else {"processor": name}

    def environment(self, config: Config) -> dict[str, str]:
        return {}  # a rank's number of threads depends on the ranks of its machine, which ``enter`` knows

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        import torch

        from megatron_llama.devices.cpu.matmul import multiplies_bf16, multiply_in_fp32
        from megatron_llama.devices.cpu.shared_memory import register

        asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is about nested threads
        threads = int(asked) if asked.isdecimal() and int(asked) else max(1, self.count() // local_ranks)
        torch.set_num_threads(threads)
        _keep_freed_memory()
        prefer_onednn()
        if not multiplies_bf16():
            multiply_in_fp32()
        register(self.backend)
        return torch.device("cpu")

    def kernel_type(self) -> type[Kernels]:
        from megatron_llama.devices.cpu.kernels import CpuKernels

        return CpuKernels

    def peak_flops(self, precision: str) -> Peak:
        """The best of a few matrix products with this rank's threads, while the other ranks do the same.

        For bf16 both dtypes are measured: a CPU without instructions for bf16 multiplies it in fp32, whose rate is then
        its peak.
        """
        import torch

        by_onednn = prefer_onednn()
        dtypes = [torch.float32] if precision == "fp32" else [torch.float32, torch.bfloat16]
        rates = {dtype: matmul_rate(_PRODUCT, dtype, _SECONDS) for dtype in dtypes}
        best = max(rates, key=lambda dtype: rates[dtype])
        by = " by oneDNN" if by_onednn and best == torch.float32 else ""
        return Peak(rates[best], f"measured, {_PRODUCT} x {_PRODUCT} {str(best).removeprefix('torch.')} product{by}")

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def synchronize(self) -> None:
        pass

    def compiler_missing(self) -> str | None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) or shutil.which("clang++"):
            return None
        return f"torch.compile on the CPU needs a C++ compiler, and {compiler} is not there"


@cache
def prefer_onednn() -> bool:
    """Has torch multiply fp32 matrices by oneDNN where MKL, its choice, leaves a part of the processor unused.

    MKL does not use AVX-512 on AMD's processors. With oneDNN two cores of Zen 5, whose units have 512 bits, make 450
    GFLOP/s instead of 200, two of Zen 4 210 instead of 190 (docs/design/log/2026-11.md). torch has no setting for the
    library. It goes
    to oneDNN when products *may* be computed in bf16, which oneDNN does with AMX units only. Products stay fp32;
    whether they do is tried here.
    """
    import torch

    found = processor()
    flags, amd = found.get("flags", "").split(), found.get("vendor_id") == "AuthenticAMD"
    if not amd or "avx512f" not in flags or "amx_bf16" in flags or not torch.backends.mkldnn.is_available():
        return False
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, "bf16"
    fine = torch.full((_PRODUCT, _PRODUCT), 1 + 2**-20)  # the 1 that bf16 would make of it
    if torch.equal(fine @ torch.eye(_PRODUCT), fine):
        return True
    products.fp32_precision = before
    return False


def _keep_freed_memory() -> None:
    """Has glibc reuse freed memory of any size instead of giving it back, as the caching allocators of accelerators do.

    By default every tensor of 32 MiB or more, and often smaller ones, is mapped anew, and the system clears each page
    as it is first touched: a fifth of a step's processor time for the 56 M shape (docs/design/log/2026-11.md). What
    the process needs
    at its peak stays the same. Other C libraries have no ``mallopt``, and nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def _memory_limits() -> Iterator[int]:
    """Limits of this process's control groups, bytes: a container's, a batch job's. They are below the machine's."""
    root = Path("/sys/fs/cgroup")
    files = [root / "memory.max"]  # a container sees its own group as the root
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            tree, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            group = tree / own.lstrip("/")
            files += [each / name for each in (group, *group.parents) if each != tree and tree in each.parents]
    for file in files:
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            yield int(file.read_text())


_PRODUCT, _SECONDS = 1024, 0.25
"""Rows and columns of the matrices whose product measures the peak, and how long: that is enough to see it."""


DEVICE = Cpu()
