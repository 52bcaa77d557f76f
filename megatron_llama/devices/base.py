"""The interface of a device. A new device is a package or a file next to this one, with a subclass of ``Device``.

Facts about a device are class attributes, so a plan reads them without importing torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_llama.config import ConfigError, Problem
from megatron_llama.devices.processor import instruction_set

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_llama.arch.pattern import Pattern
    from megatron_llama.config import Config
    from megatron_llama.devices.kernels import Kernels
    from megatron_llama.topology import Topology

INDUCTOR = "inductor"
"""torch.compile's default backend."""


class Peak(NamedTuple):
    """What one device could do at best."""

    flops: float
    """Dense FLOP/s in a given compute dtype; 0 if unknown."""
    source: str
    """Where the figure comes from: a data sheet, a measurement, a setting."""


class Device(ABC):
    """One kind of device. Stateless, so that processes may share it."""

    name: str
    """The value of ``device.name``, also torch's device type."""
    backend: str
    """Backend of torch.distributed."""
    is_accelerator: bool
    """Whether the machine determines the number of devices; the world is then made of those that are visible."""
    forkable: bool
    """Whether ranks may be forked from a parent that has imported torch."""
    compiler: str
    """Backend of torch.compile."""
    attention: str
    """Kernel for documents and attention patterns.

    * varlen: one call of FlashAttention over sequences of different lengths.
    * tiles: one call per visible rectangle.
    * mask: the whole square with a dense mask of one shape, for devices that compile each shape.
    """
    asynchronous: bool = True
    """Whether the host runs ahead of the device. Reading a value on the host then waits, and memory in use by a queued
    operation must not be freed."""
    keeps_bf16_grads: bool = False
    """Whether the optimizer's kernels read bf16 gradients of fp32 weights, so that no fp32 copy is needed."""
    pins_memory: bool = False
    """Whether it copies from pinned host memory while it computes; batches are then built there."""
    variable_prefixes: tuple[str, ...] = ()
    """What the names of its environment variables begin with; ssh passes these on to other machines."""
    interface_variable: str = "GLOO_SOCKET_IFNAME"
    """The variable that names the network interfaces which its backend may use."""

    @abstractmethod
    def probe(self) -> str | None:
        """None if the device can be used here, else the reason in one sentence.

        Fast on machines without such a device. Must not import torch if ``environment`` has to be set before that.
        """

    @abstractmethod
    def count(self) -> int:
        """Devices visible on this machine; for the CPU, its cores."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory of one device, bytes; for the CPU that of the machine, which all its ranks share."""

    def hardware(self) -> dict[str, str]:
        """What must be alike on all machines of a run, by name: the kind of the devices, their driver. Reads the
        system's files: no torch, and no device is acquired."""
        return {}

    @abstractmethod
    def environment(self, config: Config) -> dict[str, str]:
        """Variables to set before a rank imports torch, for a resolved config. Variables that the user has set win."""

    @abstractmethod
    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        """Binds this process to its device, or to its share of the cores; returns torch's device.

        Raises ConfigError if there is no device for this rank, or its packages don't work.
        """

    def seed(self, seed: int) -> None:
        """Seeds torch's generators, the device's included. Called after the process groups are initialized."""
        import torch

        torch.manual_seed(seed)

    def kernel_type(self) -> type[Kernels]:
        """The class of this device's kernels. Imports torch."""
        from megatron_llama.devices.kernels import Kernels

        return Kernels

    def kernels(self, compiled: bool) -> Kernels:
        """Kernels for eager or compiled blocks: one object per process and argument."""
        from megatron_llama.devices.kernels import shared_kernels

        return shared_kernels(self.kernel_type(), self.attention, compiled, compiled and self.compiler == INDUCTOR)

    def attention_kernel(self, pattern: Pattern, dtype: str, head_dim: int) -> str:
        """Return ``attention``, or the name of the kernel that replaces it for a pattern, dtype or head.

        Causal attention over whole sequences has other kernels (kernels.py).
        """
        return self.attention

    def request_collectives(self, rank: int) -> bool:
        """Ask the process of ``rank`` on this machine to write its last collectives. False if it cannot answer."""
        return False

    def last_collectives(self, rank: int) -> str:
        """The unfinished collectives of a rank and the last finished one, as lines. Empty until they are written."""
        return ""

    def remove_recordings(self, rank: int) -> None:  # noqa: B027  nothing to remove by default
        """Remove the files of ``request_collectives``."""

    def pipeline_transfers(self, topology: Topology) -> AbstractContextManager[None]:
        """A context in which pipeline stages can exchange tensors. A collective: all ranks enter it together.

        The default leaves it to the process group's send and recv.
        """
        return nullcontext()

    @abstractmethod
    def peak_flops(self, precision: str) -> Peak:
        """Peak of one device for matrix products in ``precision``, fp32 or bf16."""

    def has_fast_bf16(self) -> bool:
        """Whether an accelerator has units for products in bf16."""
        return True

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory that this process has used on its device so far, bytes; on the CPU its resident set."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has finished all work given to it."""

    def synchronize_stream(self) -> None:
        """Waits for the work of the current stream alone, where transfers run beside it on others."""
        self.synchronize()

    def record_event(self) -> Any:
        """A moment in what this process has the device do, for ``elapsed_seconds``. Never waits."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Any, end: Any) -> float:
        """Between two marks that the device has passed."""
        return float(end - start)

    def compiler_missing(self) -> str | None:
        """None if torch.compile works here, else the reason in one sentence."""
        return None

    def async_tp_missing(self) -> str | None:
        """None if ``enable_async_tp`` can work on this kind of device, else the reason in one sentence. No device need
        be here."""
        return f"device={self.name} has no products that begin before their operands are complete"

    def enable_async_tp(self, group: dist.ProcessGroup) -> None:
        """Makes the compiler put a group's gathers and scatters into the products beside them. A collective of the
        group. Raises ConfigError where the group's devices can't do that."""
        raise ConfigError([async_tp_problem(str(self.async_tp_missing()))])

    def compile_environment(self, folder: Path) -> dict[str, str]:
        """Variables that put the caches of the device's compilers under ``folder``, which ranks, runs and machines may
        share. Inductor's has a part for each kind of processor."""
        inductor = folder / "inductor" / instruction_set()
        return {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TRITON_CACHE_DIR": str(folder / "triton")}

    def ahead_of_time_environment(self) -> dict[str, str]:
        """Variables, set before ``probe``, with which graphs are compiled but not run, so that no device is needed.

        Empty if the compiler can't do that. Raises ConfigError if nothing tells which device to compile for.
        """
        return {}

    def count_compiled_graphs(self, folder: Path) -> int | None:
        """Compiled graphs under ``folder``; None if torch's own counters of cache misses are valid (Inductor)."""
        return None


def async_tp_problem(reason: str) -> Problem:
    """The problem of trainer.async_tp where devices can't do it."""
    return Problem("trainer.async_tp", True, reason, "write trainer.async_tp=false")


def device_index(name: str, local_rank: int, visible: int) -> int:
    """The index of this rank's device among the ``visible`` ones.

    A starter may show each rank only its own device (srun --gpus-per-task=1), which then has index 0 whatever the local
    rank. Raises ConfigError if there are fewer devices than ranks.
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    rule = f"rank {local_rank} of this machine finds {visible} devices: each rank needs one of its own"
    instead = f"start {visible} ranks per machine" if visible else "check that the job was given devices"
    raise ConfigError([Problem("device", name, rule, instead)])


def numbers_in(variable: str, text: str) -> list[int]:
    """The numbers in the text of a variable, such as ``0-2,5``. Raises ConfigError, naming it, for any other text."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            rule = "must be a number, or numbers and ranges of them with commas between"
            raise ConfigError([Problem(variable, text, rule, f"write {variable}=0-3, or unset it")])
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def package_missing(package: str, source: str) -> str | None:
    """None if ``package`` is installed, else a sentence that also says where it comes from. Imports nothing.

    PyPI has placeholders of these names that only raise ImportError("WRONG PACKAGE ..."): they count as missing.
    """
    spec = find_spec(package)
    if spec is None:
        return f"{package} is not installed; it comes from {source}"
    if spec.origin and "WRONG PACKAGE" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")[:4096]:
        return f"{package} is not installed: what is there is PyPI's placeholder; the real one comes from {source}"
    return None
