"""Hardware table of the forecasts: hardware.csv has one row per device, with the source of its numbers."""

from __future__ import annotations

import csv
import functools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

TABLE = Path(__file__).with_name("hardware.csv")
MAKERS = {"nvidia", "amd", "intel", "aws", "instinct", "tesla", "dgx", "hgx"}
"""Words that may precede a chip's name."""
USUAL = ("h100", "trn2", "gaudi2")
"""Chips that stand for their kind of device if only the kind is known; the first is the default."""
TYPICAL_REACH = 0.80
"""Share of the peak that large GEMMs reach on devices without a published benchmark: the median of the table."""
TYPICAL_BUS_SHARE = 0.80
"""Share of the link bandwidth that large collectives reach inside a node, without a published benchmark."""


@dataclass(frozen=True)
class HardwareSpec:
    """Peak rates and memory of one accelerator, or of the part that one rank uses."""

    name: str
    family: str
    """Chip. Devices of one family share fitted constants."""
    peaks: dict[str, float]
    """Dense peak by number format (fp32, bf16, fp8, fp4), FLOP/s."""
    reach: dict[str, float]
    """Share of the peak that large GEMMs reach in a benchmark, by number format."""
    memory_bytes: int
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    per_node: int
    """Devices that fast links connect."""
    source: str
    """Where the numbers are published."""
    link: float = math.inf
    """Bandwidth to the other devices of the node, bytes/s per direction."""
    bus: float = math.inf
    """Bus bandwidth of a large all-reduce over a node, bytes/s."""
    network: float = math.inf
    """Bandwidth to other nodes, bytes/s per direction."""
    ranks_per_device: int = 1
    """Ranks that share the device (NeuronCores)."""
    host_speed: float = 1.0
    """Single-thread speed of its usual hosts relative to A100 hosts (Zen 2, Cascade Lake). Sapphire Rapids and Zen 4
    have 1.5."""
    kind: str = "cpu"
    """Setting ``device.name`` of a run on this device."""

    def peak(self, form: str) -> float:
        """Return the peak FLOP/s of a format, or of the next higher precision if the device lacks the format."""
        return self.peaks[self.format_used(form)]

    def format_used(self, form: str) -> str:
        """Return the format in which the device computes ``form``."""
        order = ("fp4", "fp8", "bf16", "fp32")
        return next(name for name in order[order.index(form) :] if name in self.peaks)

    def per_rank(self) -> HardwareSpec:
        """Return the share of the device that one rank uses."""
        parts = self.ranks_per_device
        if parts == 1:
            return self
        rates = {name: getattr(self, name) / parts for name in ("bandwidth", "link", "bus", "network")}
        peaks = {form: peak / parts for form, peak in self.peaks.items()}
        memory, per_node = self.memory_bytes // parts, self.per_node * parts
        return replace(self, peaks=peaks, memory_bytes=memory, per_node=per_node, ranks_per_device=1, **rates)


@functools.cache
def devices() -> dict[str, HardwareSpec]:
    """Return the devices of the table by name, lower case."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: _device(row) for row in csv.DictReader(file)}


@functools.cache
def _aliases() -> dict[str, str]:
    """Return the device name of each alias and name, lower case, longest first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [(row["name"], row["aliases"]) for row in csv.DictReader(file)]
    names = {alias: name for name, aliases in rows for alias in (name, *filter(None, aliases.split(";")))}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def find_device(name: str) -> HardwareSpec | None:
    """Return the device of a name as published tables write it: "8x NVIDIA H100 SXM5 80GB", "A100-SXM4-40GB (DGX)".

    A count and the maker's name are dropped; the next word must be the chip. The other words of an alias may follow in
    any order, and unknown words are ignored. A longer number is another chip: H1000, Gaudi 4. Returns None for an
    unknown chip.
    """
    plain = re.sub(r"(?<=\d) ?gi?b\b", "gb", re.sub(r"^(\d+ ?x ?)+", "", name.strip().lower()))
    words = re.findall("[a-z0-9]+", plain)
    while words and (words[0] in MAKERS or words[0].isdigit()):
        words.pop(0)
    for alias, device in _aliases().items():
        chip, *rest = alias.split("-")
        if rest and words[:1] == [chip] and set(rest) <= set(words):
            return devices()[device]
    for alias, device in _aliases().items():
        if _starts_with(words, re.sub("[^a-z0-9]", "", alias)):
            return devices()[device]
    return None


def _starts_with(words: list[str], chip: str) -> bool:
    """Return whether ``words`` joined start with ``chip``, and its number does not continue."""
    if not "".join(words).startswith(chip):
        return False
    rest, length = list(words), len(chip)
    while rest and length >= len(rest[0]):
        length -= len(rest.pop(0))
    if length:  # the chip ends inside a word: H100SXM5
        return chip[-1].isdigit() and rest[0][length].isalpha()
    return chip[-1].isdigit() or not (rest and rest[0].isdigit())


def _device(row: dict[str, str]) -> HardwareSpec:
    formats = ("fp32", "bf16", "fp8", "fp4")
    peaks = {form: 1e12 * float(row[f"{form}_tflops"]) for form in formats if row[f"{form}_tflops"]}
    reach = {form: float(row[f"reach_{form}"]) for form in ("bf16", "fp8") if row[f"reach_{form}"]}
    link = 1e9 * float(row["link_gbps"])
    return HardwareSpec(
        name=row["name"],
        family=row["family"],
        peaks=peaks,
        reach={form: reach.get(form, reach.get("bf16", TYPICAL_REACH)) for form in peaks},
        memory_bytes=int(float(row["memory_gib"]) * 2**30),
        bandwidth=1e12 * float(row["bandwidth_tbps"]),
        link=link,
        bus=1e9 * float(row["bus_gbps"]) if row["bus_gbps"] else TYPICAL_BUS_SHARE * link,
        per_node=int(row["per_node"]),
        network=1e9 * float(row["network_gbps"]),
        ranks_per_device=int(row["ranks_per_device"]),
        host_speed=float(row["host_speed"]),
        source=row["source"],
        kind=row["device"],
    )
