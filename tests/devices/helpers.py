"""Made-up machines with devices: folders with the files of their drivers."""

from __future__ import annotations

from pathlib import Path

FAKES = Path(__file__).parent / "fakes"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def trainium(root: Path, chips: int = 1, name: str = "Trainium2") -> Path:
    """A machine with chips of eight cores."""
    for chip in range(chips):
        write(root / f"dev/neuron{chip}")
        folder = root / f"sys/devices/virtual/neuron_device/neuron{chip}"
        write(folder / "core_count", "8\n")
        write(folder / "info/architecture/device_name", f"{name}\n")
    return root


def gaudi(root: Path, cards: int = 1, name: str = "GAUDI2") -> Path:
    """A machine with a newer driver, and another accelerator that shares its folder."""
    for card in range(cards):
        write(root / f"dev/accel/accel{card}")
        write(root / f"sys/class/accel/accel{card}/device/device_type", f"{name}\n")
    write(root / f"dev/accel/accel{cards}")
    write(root / f"sys/class/accel/accel{cards}/device/vendor", "0x8086\n")
    return root
