"""Whether all nodes have the same devices and drivers, and as many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_llama.config.settings import DEVICES
from megatron_llama.devices import get_device
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, Node, majority

CHECK = "devices"


def observe(wanted: str, *, count: bool) -> dict[str, Any]:
    """The device that ``device=wanted`` means here, its number (for ``count``, which may import torch), and what its
    driver's files say; ``missing`` has the reason where it can't be used."""
    if wanted not in DEVICES:  # the plan's problems name it
        return {"missing": None}
    try:
        device = get_device(wanted)
    except ValueError as error:
        return {"missing": str(error)}
    number = device.count() if count else None
    return {"missing": None, "device": device.name, "count": number, **device.hardware()}


def judge(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Devices that are missing, and what differs between nodes."""
    for node in nodes:
        if reason := node.seen[CHECK]["missing"]:
            remedy = "check the driver on that node and that the job was given devices, or leave the node out"
            yield Finding(CHECK, BREAKS, node.name, reason, remedy)
    there = [node for node in nodes if "device" in node.seen[CHECK]]
    for name in ("device", "count", "devices", "driver", "processor"):
        values = [node.seen[CHECK].get(name) for node in there]
        usual = majority(values) if values else None
        for node, value in zip(there, values, strict=True):
            if value == usual:
                continue
            like = next(other for other in there if other.seen[CHECK].get(name) == usual)
            what = f"{_words(name, value)}, and {like.name} has {usual}"
            yield Finding(CHECK, BREAKS if name == "device" else WARNS, node.name, what, _remedy(name, node, like))


def _words(name: str, value: Any) -> str:
    noun = {"device": "its device", "count": "its devices: it", "devices": "its devices"}.get(name, f"its {name}")
    return f"{noun} has {value}" if name == "count" else f"{noun} is {value}"


def _remedy(name: str, node: Node, like: Node) -> str:
    if name == "driver":
        return f"install {like.name}'s driver on {node.name}"
    if name == "processor":
        return "ask for nodes of one kind (sbatch --constraint=...): a step lasts as long as its slowest rank"
    return f"leave {node.name} out (sbatch --exclude={node.name}), or find the device that is not visible there"
