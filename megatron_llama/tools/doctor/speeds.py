"""Slow ranks, slow links and slow groups, from what the ranks have measured: whoever is far behind the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_high
from typing import Any

from megatron_llama.tools.doctor.finding import WARNS, Finding

RANKS, LINKS, GROUPS = "ranks", "links", "collectives"
SLOW_RANK, SLOW_LINK, SLOW_GROUP = 0.7, 0.25, 0.25
"""Shares of the middle one's speed below which a rank, a link or a group is named."""


def judge(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """``measured``: what ``measure_ranks`` has written."""
    yield from _slow_ranks(measured["products"], measured["hosts"])
    yield from _slow_links(measured["links"], list(dict.fromkeys(measured["hosts"])))
    yield from _slow_groups(measured["collectives"], measured["hosts"])


def _slow_ranks(products: Sequence[float], hosts: Sequence[str]) -> Iterator[Finding]:
    usual = median_high(products)
    for rank, rate in enumerate(products):
        if rate < SLOW_RANK * usual:
            what = f"multiplies {rate / 1e9:,.1f} GFLOP/s, and the middle rank {usual / 1e9:,.1f}"
            remedy = "look for other work on that device, its temperature and clock"
            remedy += f"; or leave the node out (sbatch --exclude={hosts[rank]})"
            yield Finding(RANKS, WARNS, f"rank {rank} on {hosts[rank]}", what, remedy)


def _slow_links(links: Sequence[tuple[int, int, float]], nodes: Sequence[str]) -> Iterator[Finding]:
    """A pair by its name; a node whose every link is slow by its own."""
    if len(links) < 3:  # one pair has nothing beside it
        return
    usual = median(rate for _, _, rate in links)
    slow = [(one, other, rate) for one, other, rate in links if rate < SLOW_LINK * usual]
    of_node: dict[int, set[int]] = defaultdict(set)
    for one, other, _ in slow:
        of_node[one].add(other)
        of_node[other].add(one)
    partners: dict[int, set[int]] = defaultdict(set)
    for one, other, _ in links:
        partners[one].add(other)
    bad = {node for node, others in of_node.items() if len(others) == len(partners[node]) > 1}
    remedy = "look at that cable, switch port or virtual machine's limit (ethtool, iperf3)"
    for node in sorted(bad):
        worst = min(rate for one, other, rate in slow if node in (one, other))
        what = f"all its links are slow: {_mega(worst)} at worst, and most links carry {_mega(usual)}"
        yield Finding(LINKS, WARNS, nodes[node], what, f"{remedy}; or leave the node out (--exclude={nodes[node]})")
    for one, other, rate in slow:
        if one not in bad and other not in bad:
            what = f"carries {_mega(rate)}, and most links {_mega(usual)}"
            yield Finding(LINKS, WARNS, f"{nodes[one]} → {nodes[other]}", what, remedy)


def _slow_groups(rates: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Finding]:
    """Among the groups of one axis, by the largest message; each group once, with its slowest collective."""
    largest = max((rate["size"] for rate in rates), default=0)
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for rate in rates:
        if rate["size"] == largest:
            alike[rate["axis"], rate["kind"]].append(rate)
    worst: dict[tuple[str, tuple[int, ...]], tuple[float, str, str]] = {}
    for (axis, kind), groups in alike.items():
        usual = median_high(largest / rate["seconds"] for rate in groups)
        for rate in groups:
            found, members = largest / rate["seconds"], tuple(rate["group"])
            if found < SLOW_GROUP * usual:
                what = f"its {kind} takes {_mega(found)}, and that of the middle group {_mega(usual)}"
                share, _, _ = worst.get((axis, members), (1.0, "", ""))
                if found / usual < share:
                    worst[axis, members] = found / usual, what, ", ".join(dict.fromkeys(hosts[r] for r in members))
    for (axis, members), (_, what, nodes) in worst.items():
        where = f"{axis} group of ranks {', '.join(map(str, members))} ({nodes})"
        yield Finding(GROUPS, WARNS, where, what, "look at the slow ranks and links of its nodes first")


def _mega(rate: float) -> str:
    return f"{rate / 1e6:,.1f} MB/s"
