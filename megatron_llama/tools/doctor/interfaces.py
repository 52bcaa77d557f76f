"""Each node's network interfaces and addresses: which one gloo and an accelerator's library would take, and what leads
them astray."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.launch.environment import address_of_interface, addresses_of, is_loopback
from megatron_llama.tools.doctor.finding import BREAKS, NOTES, WARNS, Finding, Node, majority

CHECK = "interfaces"
GLOO = "GLOO_SOCKET_IFNAME"
"""Gloo carries checkpoints' agreements on every device, and all of a CPU's collectives."""
_SYSTEM = Path("/sys/class/net")


def observe(variable: str) -> dict[str, Any]:
    """Interfaces, what the host's own name means, and the variables that choose an interface; ``variable`` is the
    device's."""
    name = socket.gethostname()
    own: list[str] = []
    with suppress(OSError):
        own = addresses_of(name)
    found = {}
    for _, interface in socket.if_nameindex():
        found[interface] = {
            "address": address_of_interface(interface),
            "mtu": _number(interface, "mtu"),
            "megabits": _number(interface, "speed"),
            "up": _read(interface, "operstate") != "down",
        }
    asked = {key: os.environ[key] for key in dict.fromkeys((GLOO, variable)) if os.environ.get(key)}
    return {"host": name, "own": own, "interfaces": found, "asked": asked}


def judge(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Variables that name interfaces that are not there, names that lead to the loopback, and slower or odd networks.
    One node alone needs none."""
    if len(nodes) == 1:
        return
    for node in nodes:
        seen = node.seen[CHECK]
        usable = {name: each for name, each in seen["interfaces"].items() if each["up"] and each["address"]}
        for variable, text in seen["asked"].items():
            taken = [name for name in usable if matches(text, name, exact=variable == GLOO)]
            outside = [name for name in taken if not is_loopback(usable[name]["address"])]
            if not outside:
                what = f"{variable}={text} chooses {'only the loopback' if taken else 'none of its interfaces'}"
                listed = ", ".join(f"{name} ({each['address']})" for name, each in usable.items())
                good = interface_of_node(node)
                remedy = f"set {variable}={good}, or unset it" if good else _UNSET
                yield Finding(CHECK, BREAKS, node.name, f"{what}; it has {listed}", remedy)
        if GLOO not in seen["asked"] and (not seen["own"] or is_loopback(seen["own"][0])):
            meaning = seen["own"][0] if seen["own"] else "nothing"
            what = f"its name {seen['host']} means {meaning} there, where gloo would listen by itself"
            remedy = f"nothing for train.py, which names {interface_of_node(node) or 'the right interface'}; for other"
            yield Finding(CHECK, NOTES, node.name, what, f"{remedy} programs correct /etc/hosts")
    for quantity, words in (("mtu", "MTU"), ("megabits", "speed in Mbit/s")):
        values = [_used(node).get(quantity) for node in nodes]
        usual = majority(values)
        for node, value in zip(nodes, values, strict=True):
            if value is not None and usual is not None and value != usual:
                what = f"the {words} of {interface_of_node(node)} is {value}, and elsewhere {usual}"
                remedy = f"ip link set {interface_of_node(node)} mtu {usual}" if quantity == "mtu" else _CABLE
                yield Finding(CHECK, WARNS, node.name, what, remedy)


_UNSET = "unset it: train.py finds the interface that leads to the first node"
_CABLE = "look at the cable and the port of the switch, or leave the node out"


def matches(text: str, name: str, *, exact: bool) -> bool:
    """Whether a variable's text chooses an interface: gloo wants its name; the accelerators' libraries take the
    beginnings of names, with ^ before all but those, with = whole names."""
    if exact:
        return name in text.split(",")
    negated, text = text.startswith("^"), text.removeprefix("^")
    whole, text = text.startswith("="), text.removeprefix("=")
    listed = [part for part in text.split(",") if part]
    found = name in listed if whole else any(name.startswith(part) for part in listed)
    return found != negated


def interface_of_node(node: Node) -> str | None:
    """The interface that has the address by which the others know the node."""
    interfaces = node.seen[CHECK]["interfaces"].items()
    return next((name for name, each in interfaces if node.address and each["address"] == node.address), None)


def _used(node: Node) -> dict[str, Any]:
    name = interface_of_node(node)
    return node.seen[CHECK]["interfaces"][name] if name else {}


def _read(interface: str, name: str) -> str:
    try:
        return (_SYSTEM / interface / name).read_text(encoding="ascii").strip()
    except OSError:  # a virtual interface has no speed
        return ""


def _number(interface: str, name: str) -> int | None:
    text = _read(interface, name)
    return int(text) if text.isdigit() and int(text) > 0 else None
