"""Intel Gaudi 2 and 3, through Intel's PyTorch bridge (``habana_frameworks``) in eager mode with torch.compile.

Not run on hardware: written from Intel's documentation and tested against a stand-in (tests/devices/fakes). The
launcher reads the driver's files, because a process that uses the bridge acquires a card.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.devices.base import Device, LazyModule, Peak, device_index, numbers_in, package_missing

if TYPE_CHECKING:
    import torch

    from megatron_llama.config import Config
else:
    torch = LazyModule("torch")

ROOT = Path("/")  # root of the driver's files; tests replace it
PACKAGE = "habana_frameworks"
SOURCE = "Intel's own package index and containers (Intel Gaudi documentation, installation guide)"
# (driver's name of the card, dense TFLOP/s of its matrix engines in bf16 and fp32, GiB), from Intel's data sheets. 0 if
# not published.
_CARDS = (("GAUDI3", 1835.0, 229.0, 128), ("GAUDI2", 432.0, 0.0, 96))


def torch_device() -> torch.device:
    """Return torch's device, without an index: a process has one card."""
    return torch.device("hpu")


def _cards() -> list[str]:
    """Return the driver's name of each card of this machine or container."""
    # Newer and older drivers. Other accelerators (a laptop's NPU) share the first folder, but have no device_type.
    newer = ("dev/accel/accel", "sys/class/accel/accel", "device/device_type")
    older = ("dev/hl", "sys/class/habanalabs/hl", "device_type")
    for node, entry, file in (newer, older):
        names = []
        for path in sorted((ROOT / node).parent.glob(f"{Path(node).name}[0-9]*")):
            type_file = ROOT / f"{entry}{path.name.removeprefix(Path(node).name)}" / file
            if type_file.is_file():
                names.append(type_file.read_text(encoding="utf-8").strip().upper())
        if names:
            return names
    return []


def _visible_modules() -> list[int]:
    """Return the bridge's numbers of the cards that this process may use."""
    if listed := os.environ.get("HABANA_VISIBLE_MODULES"):
        return numbers_in("HABANA_VISIBLE_MODULES", listed)
    return list(range(len(_cards())))


class Hpu(Device):
    """One rank per card."""

    name = "hpu"
    backend = "hccl"
    is_accelerator = True
    forkable = False  # an acquired card does not survive a fork
    compiler = "hpu_backend"
    attention = "mask"
    graph_suffix = ".recipe"
    variable_prefixes = ("HABANA_", "PT_HPU_", "HLS_")
    interface_variable = "HCCL_SOCKET_IFNAME"

    def probe(self) -> str | None:
        no_card = None if _cards() else "this machine has no Intel Gaudi driver or card"
        return ", and ".join(filter(None, (no_card, package_missing(PACKAGE, SOURCE)))) or None

    def count(self) -> int:
        return len(_visible_modules())

    def memory_bytes(self) -> int:
        return next((gibibytes for card, _, _, gibibytes in _CARDS if card in _cards()[0]), _CARDS[-1][-1]) * 2**30

    def hardware(self) -> dict[str, str]:
        facts, cards = {}, _cards()
        with suppress(OSError):
            facts["driver"] = (ROOT / "sys/module/habanalabs/version").read_text(encoding="utf-8").strip()
        if cards:
            facts["devices"] = ", ".join(f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards))
        return facts

    def environment(self, config: Config) -> dict[str, str]:
        return {"PT_HPU_LAZY_MODE": "0"}  # for torch.compile; the bridge reads it when torch is imported

    def enter(self, local_rank: int, local_ranks: int) -> torch.device:
        modules = _visible_modules()
        module = modules[device_index(self.name, local_rank, len(modules))]
        os.environ.setdefault("HLS_MODULE_ID", str(module))  # the card that the bridge acquires
        import habana_frameworks.torch.core  # type: ignore[import-not-found]  # noqa: F401  registers device, compiler
        import habana_frameworks.torch.distributed.hccl  # type: ignore[import-not-found]  # noqa: F401  collectives

        return torch_device()

    def seed(self, seed: int) -> None:
        import habana_frameworks.torch.hpu.random as random  # type: ignore[import-not-found]

        torch.manual_seed(seed)
        random.manual_seed_all(seed)

    def peak_flops(self, precision: str) -> Peak:
        name = (_cards() or ["no card"])[0]
        for card, bf16, fp32, _ in _CARDS:
            if card in name and (flops := fp32 if precision == "fp32" else bf16):
                return Peak(flops * 1e12, f"data sheet, {card} dense {precision}")
        return Peak(0.0, f"unknown for {name} in {precision}: set device.peak_tflops to see MFU")

    def peak_memory_bytes(self) -> int:
        import habana_frameworks.torch.hpu as bridge  # type: ignore[import-not-found]

        return bridge.max_memory_allocated()

    def synchronize(self) -> None:
        import habana_frameworks.torch.hpu as bridge  # type: ignore[import-not-found]

        bridge.synchronize()

    def compile_environment(self, folder: Path) -> dict[str, str]:
        # Path, whether to clear it at start, size limit in MB, whether it is on a shared disk (for locking).
        recipes = f"{folder / 'recipes'},false,65536,true"
        return {**super().compile_environment(folder), "PT_HPU_RECIPE_CACHE_CONFIG": recipes}


DEVICE = Hpu()
