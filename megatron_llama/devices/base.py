"""What the rest of the program may ask of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from megatron_llama.plan import Plan


class Peak(NamedTuple):
    """What one device could do at best."""

    flops: float
    """Dense FLOP/s in a given compute dtype; 0 if unknown."""
    source: str
    """Where the figure comes from: a data sheet, a measurement, a setting."""


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
        """None when the device can be used here, else the reason in one sentence.

        Quick where there is no such device, and it leaves torch alone where ``environment`` must come before it.
        """

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
        """Make this process use its device (or its share of the cores); returns torch's device.

        Raises ConfigError when there is no device for this rank, or its packages turn out not to work.
        """

    def seed(self, seed: int) -> None:
        """Seed torch's generators, the device's included. To be called when the process groups stand."""
        import torch

        torch.manual_seed(seed)

    def has_point_to_point(self) -> bool:
        """Whether the process group sends and receives. All ranks must call it together, with the group alive."""
        return True

    @abstractmethod
    def peak_flops(self, precision: str) -> Peak:
        """Peak of one device for matrix products in ``precision``, fp32 or bf16."""

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
        """Variables that put what this device's compilers keep under ``folder``, which ranks and runs may share."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}

    def ahead_of_time_environment(self) -> dict[str, str]:
        """Variables with which graphs are compiled but not run, where the device's compiler can do that: then no device
        is needed. They must stand before ``probe``. Raises ConfigError where nothing says what to compile for."""
        return {}

    def compiled_artefacts(self, folder: Path) -> int | None:
        """Compiled graphs under ``folder``; None where torch's own counters tell (Inductor)."""
        return None


def device_index(name: str, local_rank: int, visible: int) -> int:
    """Which of the ``visible`` devices is this rank's.

    A starter may show each rank only its own device (srun --gpus-per-task=1): then it is the first, whatever the
    rank's number. Raises ConfigError when there are fewer devices than ranks.
    """
    from megatron_llama.config import ConfigError, Problem

    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    rule = f"rank {local_rank} of this machine finds {visible} devices: each rank needs one of its own"
    instead = f"start {visible} ranks per machine" if visible else "check that the job was given devices"
    raise ConfigError([Problem("device", name, rule, instead)])


def numbers_in(variable: str, text: str) -> list[int]:
    """The numbers in a variable such as ``0-2,5``. Raises ConfigError, naming it, where it holds other things."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            from megatron_llama.config import ConfigError, Problem

            rule = "must be a number, or numbers and ranges of them with commas between"
            raise ConfigError([Problem(variable, text, rule, f"write {variable}=0-3, or unset it")])
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def package_missing(package: str, source: str) -> str | None:
    """None when ``package`` is installed, else that it is not and that it comes from ``source``. Imports nothing.

    PyPI has packages of these names whose only line raises ImportError("WRONG PACKAGE ..."): they count as missing.
    """
    spec = find_spec(package)
    if spec is None:
        return f"{package} is not installed; it comes from {source}"
    if spec.origin and "WRONG PACKAGE" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")[:4096]:
        return f"{package} is not installed: what is there is PyPI's placeholder; the real one comes from {source}"
    return None


def point_to_point_works(torch_device: torch.device) -> bool:
    """Whether a number sent between ranks 2k and 2k+1 arrives, on all pairs. All ranks must call it together.

    Nobody waits for a message before all have started theirs, so that a send that raises leaves no one hanging.
    """
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    number = torch.full((1,), 7.0 if rank % 2 == 0 else 0.0, device=torch_device)
    work = None

    def everywhere(good: bool) -> bool:
        flag = torch.full((1,), float(good), device=torch_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return flag.item() == 1.0

    try:
        if peer < world:
            work = dist.isend(number, peer) if rank % 2 == 0 else dist.irecv(number, peer)
        started = True
    except (RuntimeError, NotImplementedError, AttributeError):  # each is how some backend says that it can't
        started = False
    if not everywhere(started):
        return False
    if work is not None:
        work.wait()
    return everywhere(peer >= world or number.item() == 7.0)
