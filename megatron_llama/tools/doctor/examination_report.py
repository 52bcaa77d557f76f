"""What the doctor prints: the nodes, the collectives' speeds, and every finding with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_llama.config.problems import fill
from megatron_llama.system.text_table import text_table
from megatron_llama.system.units import gib, plural
from megatron_llama.tools.doctor import disks, hardware_check, interfaces, versions
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, SEVERITIES, WARNS, Finding, Node
from megatron_llama.tools.doctor.meeting import ClockReading
from megatron_llama.tools.doctor.rate import Rate

WIDTH = 110
_MARKS = {BREAKS: "✗", WARNS: "!", NOTES: "·"}
_COLOURS = {BREAKS: "31;1", WARNS: "33;1", NOTES: "36"}


@dataclass(frozen=True)
class Report:
    """All that an examination has brought to light."""

    nodes: Sequence[Node]
    readings: Sequence[ClockReading | None]
    """Of the nodes' clocks."""
    findings: Sequence[Finding]
    measured: Mapping[str, Any] | None
    """What the ranks have measured; None where they did not."""
    seconds: float
    """That it took."""

    def page(self, *, colour: bool) -> str:
        """As text for people."""
        lines = [*_node_table(self.nodes, self.readings), ""] if self.nodes else []
        if self.measured is not None:
            lines += [*_speed_table(self.measured), ""]
        ordered = sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        for finding in ordered:
            lines += _block(finding, colour)
        return "\n".join([*lines, *_verdict(self.nodes, ordered, self.seconds)]) + "\n"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"seconds": round(self.seconds, 1)}


def _node_table(nodes: Sequence[Node], readings: Sequence[ClockReading | None]) -> list[str]:
    rows = [("node", "ranks", "address", "interface", "device", "torch", "commit", "clock", "run.dir", "free")]
    for node, reading in zip(nodes, readings, strict=True):
        device, disk = node.seen[hardware_check.CHECK], node.seen[disks.CHECK][disks.RUN]
        count = f"{device['count']} x " if device.get("count") else ""
        clock = "" if reading is None else f"{reading.ahead:+.3f} s"
        speed = f"{disks.WRITTEN / disk['seconds'] / 1e6:,.0f} MB/s" if "seconds" in disk else "?"
        rows.append(
            (
                node.name,
                node.ranks,
                node.address,
                interfaces.interface_of_node(node) or "",
                f"{count}{device.get('device', 'none')}",
                str(node.seen[versions.CHECK]["torch"]),
                node.seen[versions.CHECK]["commit"],
                clock,
                speed,
                "?" if disk["free"] is None else gib(disk["free"]),
            )
        )
    return text_table([[*map(str, row)] for row in rows])


def _speed_table(measured: Mapping[str, Any]) -> list[str]:
    """The slowest group of each axis, as the NCCL tests count."""
    slowest: dict[tuple[str, str, int], Rate] = {}
    for fields in measured["collectives"]:
        rate = Rate(**fields)
        known = slowest.get((rate.axis, rate.kind, rate.size))
        if known is None or rate.seconds > known.seconds:
            slowest[rate.axis, rate.kind, rate.size] = rate
    rates = [rate / 1e9 for rate in measured["products"]]
    lines = [f"Products: {min(rates):,.1f} to {max(rates):,.1f} GFLOP/s on {len(rates)} {plural(len(rates), 'rank')}."]
    if links := [rate / 1e6 for _, _, rate in measured["links"]]:
        lines.append(f"Links between nodes: {min(links):,.0f} to {max(links):,.0f} MB/s.")
    if not slowest:
        return lines
    rows = [("axis", "collective", "ranks", "size", "time", "algorithm", "bus")]
    for rate in slowest.values():
        rows.append(
            (
                rate.axis,
                rate.kind,
                str(rate.ranks),
                _size(rate.size),
                f"{1e6 * rate.seconds:,.0f} us",
                f"{rate.algorithm_bandwidth / 1e9:.3f} GB/s",
                f"{rate.bus_bandwidth / 1e9:.3f} GB/s",
            )
        )
    return [*lines, "", *text_table(rows, left=2)]


def _block(finding: Finding, colour: bool) -> Iterator[str]:
    title = f"{_MARKS[finding.severity]} {finding.check:12s}{finding.where}"
    yield f"\x1b[{_COLOURS[finding.severity]}m{title}\x1b[0m" if colour else title
    yield fill(f"  {'':12s}", finding.what, WIDTH)
    yield fill(f"  {'do':>10s}  ", finding.remedy, WIDTH)
    yield ""


def _verdict(nodes: Sequence[Node], findings: Sequence[Finding], seconds: float) -> Iterator[str]:
    looked = f"{len(nodes)} {plural(len(nodes), 'node')} in {seconds:.0f} s"
    if not findings:
        yield f"Nothing is wrong with {looked}."
        return
    counts = [sum(finding.severity == severity for finding in findings) for severity in SEVERITIES]
    words = ("sure to break a run", "that may cost one", "good to know")
    told = ", ".join(f"{count} {word}" for count, word in zip(counts, words, strict=True) if count)
    yield f"{len(findings)} {plural(len(findings), 'finding')} on {looked}: {told}."


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
