"""Whether the nodes agree what time it is. The first one asks the others, and takes half the way there and back off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_llama.tools.doctor.finding import WARNS, Finding, Node
from megatron_llama.tools.doctor.meeting import ClockReading

CHECK = "clocks"
MOST_SECONDS = 1.0
"""Logs and metrics of several nodes can't be put in order beyond that, and newest files are not the newest."""


def judge(nodes: Sequence[Node], readings: Sequence[ClockReading | None]) -> Iterator[Finding]:
    """Clocks that differ from the first node's by more than MOST_SECONDS and what the reading may be wrong by."""
    for node, reading in zip(nodes, readings, strict=True):
        if reading is not None and abs(reading.ahead) > MOST_SECONDS + reading.round_trip / 2:
            way = "ahead of" if reading.ahead > 0 else "behind"
            what = f"its clock is {abs(reading.ahead):,.1f} s {way} {nodes[0].name}'s"
            remedy = f"systemctl restart chronyd (or ntpd) on {node.name}, then chronyc tracking shows the difference"
            yield Finding(CHECK, WARNS, node.name, what, remedy)
