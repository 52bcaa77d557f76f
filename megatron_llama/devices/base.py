"""The interface of a device. A new device is a package or a file next to this one, with a subclass of ``Device``.

Properties of a device are class attributes, so a plan reads them without importing torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices.processor import instruction_set

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_llama.arch.attention_pattern import Pattern
    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels
    from megatron_llama.topology import Topology


class LazyModule:
    """A module that is imported at its first use: a plan needs devices, but no torch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


INDUCTOR = "inductor"
"""torch.compile's default backend."""


class Peak(NamedTuple):
    """Peak performance of one device."""

    flops: float
    """Dense FLOP/s in a given compute dtype; 0 if unknown."""
    source: str
    """Source of the figure: data sheet, measurement or setting."""


class FaultCounts(NamedTuple):
    """Faults of one device since its counters were opened: memory errors, and errors that the driver numbers (Xid)."""

    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    xid_errors: int = 0
    last_xid: int = 0


FAULT_METRICS = FaultCounts._fields[:3]
"""Metrics with the sums over all devices since the start, from the first fault on."""


class Device(ABC):
    """Base class of devices. Stateless."""

    name: str
    """Value of ``device.name``, also torch's device type."""
    backend: str
    """Backend of torch.distributed."""
    is_accelerator: bool
    """Whether the machine determines the number of devices. The world size is then the number of visible devices."""
    forkable: bool
    """Whether ranks may be forked from a parent process that has imported torch."""
    compiler: str
    """Backend of torch.compile."""
    attention: str
    """Kernel of attention inside documents and with patterns. Other attention: see the table in kernels.py.

    * varlen: one call of FlashAttention over sequences of different lengths.
    * tiles: one call per visible rectangle of the score matrix.
    * mask: all scores, with a dense mask of one shape, for devices that compile each shape.
    """
    asynchronous: bool = True
    """Whether the host runs ahead of the device. Reading a value on the host is then a sync, and memory in use by a
    queued operation must not be freed."""
    overlaps_copies: bool = False
    """Whether copies in memory run on a separate torch.Stream, next to the training step."""
    sums_int64: bool = False
    """Whether the device sums int64 tensors: trainer.exact needs it, and copies are compared on the device."""
    keeps_bf16_grads: bool = False
    """Whether the optimizer's kernels read bf16 gradients of fp32 weights, so that no fp32 copy is needed."""
    binds_process_group: bool = False
    """Whether torch.distributed must be given the rank's device. Otherwise the backend guesses it from the rank."""
    compile_from_steps: int = 1000
    """Steps from which on a run compiles by default, because compilation takes a minute or two."""
    compiles_epochs: bool = False
    """Whether a run of ``trainer.epochs``, whose steps are not known yet, compiles by default."""
    fuses_eager_blocks: bool = False
    """Whether uncompiled blocks too have operators that the compiler fuses (``Kernels.fuse_rows``)."""
    pins_memory: bool = False
    """Whether the device copies from pinned host memory while it computes. Batches are then built in pinned memory."""
    has_float8: bool = False
    """Whether this kind of device has float8 matmuls (``Kernels.float8_mm``)."""
    has_async_tp: bool = False
    """Whether this kind of device supports ``enable_async_tp``."""
    graph_suffix: str | None = None
    """Suffix of the compiler's files, one per graph. None: Inductor's counters of cache misses count graphs."""
    float8_multiple: int = 1
    """Sizes of float8 matmuls must be multiples of this."""
    decoding_keys_multiple: int = 1
    """Multiple to which decoding rounds up the number of keys, because attention prepares a plan for each number."""
    measures_peak: bool = False
    """Whether ``peak_flops`` is a measurement, which depends on the host's load, instead of a data sheet's value."""
    peak_memory_label: str = "tensors on its device"
    """Memory that ``peak_memory_bytes`` counts, as the run's summary names it."""
    uncounted_memory: str = "device context, communication buffers, fragmentation"
    """Memory of a rank that the plan's forecast of tensors omits."""
    variants: Mapping[str, Mapping[str, str]] = {}
    """Environment variables that disable a feature, by its name: prove_gpu.py repeats a failed check with each."""
    variable_prefixes: tuple[str, ...] = ()
    """Prefixes of the device's environment variables, which the ssh launcher forwards to other machines."""
    interface_variable: str = "GLOO_SOCKET_IFNAME"
    """Environment variable with the network interfaces of the backend."""

    @abstractmethod
    def probe(self) -> str | None:
        """Return None if the device is available on this machine, else the reason in one sentence.

        Fast on machines without such a device. Must not import torch if ``environment`` must be set before the import.
        """

    def ignored(self) -> str | None:
        """Return a sentence if this machine has such a device and its driver, but torch cannot use it; else None."""
        return None

    @abstractmethod
    def count(self) -> int:
        """Return the number of visible devices on this machine; for the CPU, of its cores."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return the memory of one device in bytes; for the CPU, of the machine, which its ranks share."""

    def memory_reserve(self, tensor_bytes: int) -> int:
        """Return the estimated bytes on a device besides ``tensor_bytes`` of live tensors; 0 if unknown."""
        return 0

    def hardware(self) -> dict[str, str]:
        """Return properties that must be equal on all machines of a run, such as device model and driver, by name.

        Reads system files only: imports no torch and acquires no device.
        """
        return {}

    def libraries(self) -> dict[str, str]:
        """Return versions of the device's libraries that torch uses, by name. Imports torch."""
        return {}

    @abstractmethod
    def environment(self, config: Config) -> dict[str, str]:
        """Return variables to set before a rank imports torch. Variables that the user has set take precedence."""

    @abstractmethod
    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        """Bind this process to its device, or to its share of the cores. Return torch's device.

        Raises:
            ConfigError: there is no device for this rank, or its packages do not work.
        """

    def prepare_memory(self, activation_bytes: int) -> None:
        """Prepare the allocator for activations [s, b, h] of this many bytes. Does nothing by default."""
        return None

    def seed(self, seed: int) -> None:
        """Seed torch's generators, including the device's. Called after the process groups are initialized."""
        import torch

        torch.manual_seed(seed)

    def kernel_type(self) -> type[Kernels]:
        """Return the class of this device's kernels. Imports torch."""
        from megatron_llama.devices.kernels import Kernels

        return Kernels

    def kernels(self, compiled: bool) -> Kernels:
        """Return the kernels for eager or compiled blocks: one object per process and argument."""
        from megatron_llama.devices.kernels import shared_kernels

        return shared_kernels(self.kernel_type(), self.attention, compiled, compiled and self.compiler == INDUCTOR)

    def attention_kernel(self, pattern: Pattern, dtype: str, head_dim: int) -> str:
        """Return ``attention``, or the name of the kernel that replaces it for a pattern, dtype or head.

        Causal attention over whole sequences has other kernels (kernels.py).
        """
        return self.attention

    def attention_packages(self) -> list[str]:
        """Return the attention of installed packages that replaces torch's, by preference, with its hardware.

        Imports no package.
        """
        return []

    def open_fault_counters(self) -> Callable[[], FaultCounts] | None:
        """Return a function that reads the fault counters of this rank's device; None without counters or a reader."""
        return None

    def recorder(self) -> Any:
        """Return the module that reads the last collectives of ranks on this machine, as cuda/flight_recorder.py does.

        None: the device has no recorder.
        """
        return None

    def pipeline_transfers(self, topology: Topology) -> AbstractContextManager[None]:
        """Return a context in which pipeline stages can exchange tensors. All ranks enter it together.

        Default: the process group's send and recv.
        """
        return nullcontext()

    @abstractmethod
    def peak_flops(self, precision: str) -> Peak:
        """Return the peak of one device for matmuls in ``precision``, fp32 or bf16."""

    def has_fast_bf16(self) -> bool:
        """Whether an accelerator has units for bf16 matmuls."""
        return True

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the peak of this process's tensors on its device in bytes; on the CPU, the peak resident set."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def register_host_memory(self, buffer: torch.Tensor) -> None:  # noqa: B027
        """Let copies from the device write directly to mapped host memory. Default: does nothing."""

    def unregister_host_memory(self, buffer: torch.Tensor) -> None:  # noqa: B027
        """Undo ``register_host_memory``, before the memory is unmapped."""

    def synchronize_stream(self) -> None:
        """Wait for the work of the current stream only."""
        self.synchronize()

    def record_event(self) -> Any:
        """Record an event in the device's current stream, for ``elapsed_seconds``. Does not wait."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two recorded events that the device has reached."""
        return float(end - start)

    def compiles_code(self, config: Config) -> bool:
        """Return whether a run compiles blocks, operators of uncompiled blocks, or loops (trainer.compile_cache)."""
        return bool(config.trainer.compile) or self.fuses_eager_blocks

    def compiler_missing(self) -> str | None:
        """Return None if torch.compile works on this host, else the reason in one sentence."""
        return None

    def require_float8(self) -> None:  # noqa: B027  planning rejects other kinds of devices
        """Raise ConfigError if this rank's device lacks the float8 matmuls of its kind."""

    def enable_async_tp(self, group: dist.ProcessGroup) -> None:
        """Make the compiler fuse a group's gathers and scatters with the adjacent matmuls. A collective of the group.

        Raises:
            ConfigError: the group's devices do not support it.
        """
        raise NotImplementedError(self.name)

    def compile_environment(self, folder: Path) -> dict[str, str]:
        """Return variables that put the compilers' caches under ``folder``, which ranks, runs and machines may share.

        Inductor has a separate folder per instruction set.
        """
        inductor = folder / "inductor" / instruction_set()
        return {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(folder / "triton")}

    def ahead_of_time_environment(self) -> dict[str, str]:
        """Return variables, to set before ``probe``, with which graphs are compiled but not run: no device is needed.

        Empty if the compiler does not support that.

        Raises:
            ConfigError: the device to compile for is unknown.
        """
        return {}

    def count_compiled_graphs(self, folder: Path) -> int | None:
        """Return the number of compiled graphs under ``folder``; None without ``graph_suffix``."""
        return None if self.graph_suffix is None else sum(1 for _ in folder.rglob(f"*{self.graph_suffix}"))


def async_tp_problem(reason: str) -> Problem:
    """Return the problem of trainer.async_tp on unsupported devices."""
    return Problem("trainer.async_tp", True, reason, "write trainer.async_tp=false")


def device_index(name: str, local_rank: int, visible: int) -> int:
    """Return the index of this rank's device among the ``visible`` ones.

    A launcher may make one device visible per rank (srun --gpus-per-task=1). It then has index 0 on each rank.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    rule = f"local rank {local_rank} has no device: {visible} are visible, and each rank needs one"
    instead = f"start {visible} ranks per machine" if visible else "check that the job was given devices"
    raise ConfigError([Problem("device", name, rule, instead)])


def numbers_in(variable: str, text: str) -> list[int]:
    """Parse numbers and ranges such as ``0-2,5``. Raises ConfigError, naming ``variable``, for other text."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            rule = "must be numbers and ranges, separated by commas"
            raise ConfigError([Problem(variable, text, rule, f"write {variable}=0-3, or unset it")])
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def package_missing(package: str, source: str) -> str | None:
    """Return None if ``package`` is installed, else a sentence with its ``source``. Imports nothing.

    PyPI's placeholders of these names, which only raise ImportError("WRONG PACKAGE ..."), count as missing.
    """
    spec = find_spec(package)
    if spec is None:
        return f"{package} is not installed; install it from {source}"
    if spec.origin and "WRONG PACKAGE" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")[:4096]:
        return f"{package} is PyPI's placeholder; install the real package from {source}"
    return None
