"""Seconds that collectives take: a start-up time and a bus bandwidth, inside a node or over its network."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_llama.plan.forecast.hardware import Device

RING_SHARE = 0.78
"""Of the link's speed: an all-reduce of some of a node's devices (eight may reduce in the switch, and go faster)."""


def bus_bandwidth(device: Device, ranks: int, stride: int, constants: Mapping[str, float]) -> float:
    """Bytes/s of a large collective among ``ranks`` ranks that stand ``stride`` ranks apart.

    Within a node: the measured bus bandwidth for all its devices, for some of them the ring's. Over nodes: what the
    network cards of the group's ranks on a node carry together, at most what the node's links do.
    """
    inside = max(1, min(ranks, device.per_node // min(stride, device.per_node)))
    within = device.bus
    if inside < device.per_node:
        within = min(device.bus, RING_SHARE * device.link)
        if device.family == "mi300x":  # each pair of devices has a seventh of the links
            within *= max(inside - 1, 1) / (device.per_node - 1)
    if inside >= ranks:
        return within
    return min(within, constants["network.share"] * inside * device.network)


def all_reduce(size: float, ranks: int, stride: int, device: Device, constants: Mapping[str, float]) -> float:
    """Seconds to sum ``size`` bytes among ``ranks``. An all-gather of, or reduce-scatter to, that size takes half."""
    if ranks == 1 or not size:
        return 0.0
    bandwidth = bus_bandwidth(device, ranks, stride, constants)
    outside = ranks * stride > device.per_node
    start = constants["latency.network"] if outside else constants["latency.node"]
    return start + 2 * (ranks - 1) / ranks * size / bandwidth
