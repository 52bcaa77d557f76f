"""The devices that a forecast knows: hardware.csv, one a row, each with the source of its numbers."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

TABLE = Path(__file__).with_name("hardware.csv")
MAKERS = {"nvidia", "amd", "intel", "aws", "instinct", "tesla", "dgx", "hgx"}
"""Words that may stand before a chip's name."""
TYPICAL_REACH = 0.80
"""Share of its peak that a large product reaches where nobody has published it: the median of the table."""
TYPICAL_BUS_SHARE = 0.80
"""Share of the link's speed that a large collective reaches inside a node."""


@dataclass(frozen=True)
class HardwareSpec:
    """One accelerator, or the part of it that one rank has."""

    name: str
    family: str
    """Devices of the same chip, which share fitted constants."""
    peaks: dict[str, float]
    """Dense peak by number format, FLOP/s."""
    reach: dict[str, float]
    """Share of the peak that large products reach in a benchmark, by number format."""
    memory_bytes: int
    bandwidth: float
    """Of its memory, bytes/s."""
    link: float
    """To the other devices of the node, bytes/s in each direction."""
    bus: float
    """Bus bandwidth of a large all-reduce over a whole node, bytes/s."""
    per_node: int
    """Devices that the fast links join."""
    network: float
    """To other nodes, bytes/s in each direction."""
    ranks_per_device: int
    """Ranks that share a device, each with a part of it (NeuronCores)."""
    host_speed: float
    """How fast a core of its usual hosts is, beside those that A100 came with (Zen 2, Cascade Lake): in benchmarks of
    one thread, Sapphire Rapids and Zen 4 are half as fast again."""
    source: str
    kind: str = "cpu"
    """The ``device.name`` of a run on it."""

    def peak(self, form: str) -> float:
        """FLOP/s of a format; that of the next wider one where the device has none of its own."""
        return self.peaks[self.format_used(form)]

    def format_used(self, form: str) -> str:
        """The format whose peak ``form`` gets here."""
        order = ("fp4", "fp8", "bf16", "fp32")
        return next(name for name in order[order.index(form) :] if name in self.peaks)

    def per_rank(self) -> HardwareSpec:
        """The part of the device that one of its ranks has."""
        parts = self.ranks_per_device
        if parts == 1:
            return self
        return replace(
            self,
            peaks={form: peak / parts for form, peak in self.peaks.items()},
            memory_bytes=self.memory_bytes // parts,
            bandwidth=self.bandwidth / parts,
            link=self.link / parts,
            bus=self.bus / parts,
            per_node=self.per_node * parts,
            network=self.network / parts,
            ranks_per_device=1,
        )


@functools.cache
def devices() -> dict[str, HardwareSpec]:
    """Every device of the table by its name, lower case."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: _device(row) for row in csv.DictReader(file)}


@functools.cache
def _aliases() -> dict[str, str]:
    """The names that mean a device, lower case, its own too; the longest first."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [(row["name"], row["aliases"]) for row in csv.DictReader(file)]
    found = {alias: name for name, aliases in rows for alias in (name, *filter(None, aliases.split(";")))}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def find_device(name: str) -> HardwareSpec | None:
    """The device that ``name`` means, as tables write it ("8x NVIDIA H100 SXM5 80GB", "A100-SXM4-40GB (DGX)"); None
    where none is meant.

    A name is read from its chip on, which is its first word but for a count and the maker's; words behind it do no
    harm. What else an alias says may stand in any order.
    """
    plain = re.sub(r"(?<=\d) ?gi?b\b", "gb", re.sub(r"^(\d+ ?x ?)+", "", name.strip().lower()))
    words = re.findall("[a-z0-9]+", plain)
    while words and (words[0] in MAKERS or words[0].isdigit()):
        words.pop(0)
    squeezed = "".join(words)
    for alias, device in _aliases().items():
        chip, *rest = alias.split("-")
        if rest and words[:1] == [chip] and set(rest) <= set(words):
            return devices()[device]
    for alias, device in _aliases().items():
        if squeezed.startswith(re.sub("[^a-z0-9]", "", alias)):
            return devices()[device]
    return None


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
