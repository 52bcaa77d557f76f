"""What the rest of the program may ask of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from megatron_llama.config import Plan


class Device(ABC):
    """One kind of device. Stateless: safe to share between processes."""

    name: str
    """The value of ``device.name``, also torch's device type."""
    backend: str
    """Communication backend for torch.distributed."""
    is_accelerator: bool
    """Whether the number of devices is a fact of the machine (then the world is made of the visible ones)."""
    forkable: bool
    """Whether ranks may be forked from a parent that has imported torch."""

    @abstractmethod
    def probe(self) -> str | None:
        """None when the device can be used here, else the reason in one sentence."""

    @abstractmethod
    def count(self) -> int:
        """Devices visible on this machine; for the CPU, its cores."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory of one device; for the CPU, of the whole machine (all its ranks share it), bytes."""

    @abstractmethod
    def environment(self, plan: Plan) -> dict[str, str]:
        """Variables that must stand before torch is imported in a rank. What the user has set wins."""

    @abstractmethod
    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        """Make this process use its device (or its share of the cores); returns torch's device."""

    @abstractmethod
    def peak_flops(self, precision: str) -> tuple[float, str]:
        """Dense FLOP/s of one device with products in ``precision``, fp32 or bf16, and where the figure comes from."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most memory this process has used on its device so far (on the CPU: resident set), bytes."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def compiler_missing(self) -> str | None:
        """None when torch.compile works here, else the reason in one sentence."""
        return None

    def compile_backend(self) -> str:
        """torch.compile's backend."""
        return "inductor"

    def compile_environment(self, folder: Path) -> dict[str, str]:
        """Variables that put every cache of this device's compiler under ``folder``."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}

    def compiled_artefacts(self, folder: Path) -> int | None:
        """Compiled graphs under ``folder``; None where the compiler counts hits and misses itself."""
        return None

    def ahead_of_time_environment(self) -> dict[str, str]:
        """Variables that make the compiler work without the device being there."""
        return {}
