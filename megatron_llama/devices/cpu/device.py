"""CPU: ranks are processes that share the machine's cores and memory."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import sys
from functools import cache
from typing import TYPE_CHECKING

from megatron_llama.devices.base import INDUCTOR, Device, LazyModule, Peak
from megatron_llama.devices.processor import best_matmul_rate, processor
from megatron_llama.system.ulimits import memory_limits, usable_cores

if TYPE_CHECKING:
    import torch

    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels
else:
    torch = LazyModule("torch")

MOST_THREADS = 1024
"""Limit on OMP_NUM_THREADS: libgomp crashes (SIGSEGV) with tens of thousands of threads."""


class Cpu(Device):
    """One rank per process, with cores / ranks of this machine threads each."""

    name = "cpu"
    backend = "gloo_shared_memory"
    is_accelerator = False
    forkable = sys.platform != "darwin"  # Objective-C's runtime and Accelerate abort after a fork
    compiler = INDUCTOR
    attention = "tiles"
    asynchronous = False
    keeps_bf16_grads = True
    sums_int64 = True
    has_float8 = True  # emulated
    measures_peak = True
    peak_memory_label = "its process, with Python and libraries"
    uncounted_memory = "Python and libraries, 0.3 GiB or more per process"

    def probe(self) -> str | None:
        return None

    def count(self) -> int:
        return len(usable_cores())

    def memory_bytes(self) -> int:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *(limit for limit, _ in memory_limits())])

    def hardware(self) -> dict[str, str]:
        name = processor().get("model name")
        return {} if name is None else {"processor": name}

    def environment(self, config: Config) -> dict[str, str]:
        return {}  # ``enter`` sets the number of threads, which depends on the ranks of the machine

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        from megatron_llama.devices.cpu.matmul import has_fast_bf16, multiply_in_fp32
        from megatron_llama.devices.cpu.shared_memory import register

        setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is for nested threads
        threads = int(setting) if setting.isdecimal() and int(setting) else max(1, self.count() // local_ranks)
        torch.set_num_threads(min(threads, MOST_THREADS))
        _tune_malloc(_KEEP_FREED_MEMORY)
        prefer_onednn()
        if not has_fast_bf16():
            multiply_in_fp32()
        register(self.backend)
        return torch.device("cpu")

    def prepare_memory(self, activation_bytes: int) -> None:
        if activation_bytes >= _LARGE:
            _tune_malloc(_MAP_LARGE_TENSORS)

    def kernel_type(self) -> type[Kernels]:
        from megatron_llama.devices.cpu.kernels import CpuKernels

        return CpuKernels

    def peak_flops(self, precision: str) -> Peak:
        """Measure the best matmul rate with this rank's threads, while the other ranks measure too.

        For bf16 both dtypes are measured: a CPU without bf16 instructions multiplies bf16 in fp32.
        """
        by_onednn = prefer_onednn()
        dtypes = [torch.float32] if precision == "fp32" else [torch.float32, torch.bfloat16]
        rates = {dtype: best_matmul_rate(_SIZES, dtype) for dtype in dtypes}
        best = max(rates, key=lambda dtype: rates[dtype])
        (rate, size), by = rates[best], " by oneDNN" if by_onednn and best == torch.float32 else ""
        return Peak(rate, f"measured, {size} x {size} {str(best).removeprefix('torch.')} matmul{by}")

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES

    def synchronize(self) -> None:
        pass

    def compiles_code(self, config: Config) -> bool:
        return super().compiles_code(config) or config.trainer.exact  # exact_cpu.cpp

    def compiler_missing(self) -> str | None:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) or shutil.which("clang++"):
            return None
        return f"torch.compile on the CPU needs a C++ compiler, and {compiler} is not installed"


@cache
def prefer_onednn() -> bool:
    """Make torch multiply fp32 matrices with oneDNN if MKL, the default, does not use AVX-512. Return whether it does.

    MKL does not use AVX-512 on AMD processors. With oneDNN, two cores of Zen 5 (512-bit units) reach 450 GFLOP/s
    instead of 200, two cores of Zen 4 210 instead of 190 (docs/design/decisions.md). torch has no setting for the
    library. It uses oneDNN if fp32 matmuls *may* be computed in bf16, which oneDNN does with AMX units only. A test
    matmul checks that results stay fp32.
    """
    facts = processor()
    flags, amd = facts.get("flags", "").split(), facts.get("vendor_id") == "AuthenticAMD"
    if not amd or "avx512f" not in flags or "amx_bf16" in flags or not torch.backends.mkldnn.is_available():
        return False
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, backend.fp32_precision = backend.fp32_precision, "bf16"
    values = torch.full((_SIZE, _SIZE), 1 + 2**-20)  # rounds to 1 in bf16
    if torch.equal(values @ torch.eye(_SIZE), values):
        return True
    backend.fp32_precision = before
    return False


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_LARGE = 16 << 20
"""Bytes of an activation [s, b, h] from which freed memory is returned to the system."""
_KEEP_FREED_MEMORY = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}
"""Make glibc reuse freed memory of any size, as the caching allocators of accelerators do. By default glibc maps new
memory for every tensor of 32 MiB or more, and often for smaller ones. The page faults take a fifth of a step's CPU time
for the 56 M model (docs/design/decisions.md)."""
_MAP_LARGE_TENSORS = {_M_MMAP_THRESHOLD: _LARGE, _M_MMAP_MAX: 2**16}
"""Make glibc return the memory of freed tensors of ``_LARGE`` bytes or more to the system. Activations of different
sizes fragment the heap: a rank with 32,768 tokens had 0.9 GiB of live tensors and 2.3 GiB of resident memory
(docs/design/decisions.md). Page faults take a few percent of a step with so long sequences."""


def _tune_malloc(options: dict[int, int]) -> None:
    """Set options of glibc's allocator. Other C libraries have no ``mallopt``; then this does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of the peak resident set."""


_SIZE = 1024
"""Rows and columns of a test matmul."""
_SIZES = (512, 1024)
"""Rows and columns of the matmuls that measure the peak. On a busy host only a short one is not interrupted."""


DEVICE = Cpu()
