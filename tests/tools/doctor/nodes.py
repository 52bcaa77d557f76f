"""Nodes as the doctor's checks see them, all well, for tests that make one of them ill."""

from __future__ import annotations

from typing import Any

from megatron_llama.tools.doctor import disks, machine, network
from megatron_llama.tools.doctor.finding import Finding, Node

GIB = 2**30


def healthy(number: int) -> Node:
    """A node without a fault."""
    address = f"10.0.0.{number + 1}"
    links = {
        "lo": {"address": "127.0.0.1", "mtu": 65536, "megabits": None, "up": True},
        "eth0": {"address": address, "mtu": 9001, "megabits": 100_000, "up": True},
    }
    disk = {"folder": "/shared/runs", "fault": None, "free": 500 * GIB, "seconds": 0.01, "locks": True, "renames": True}
    seen: dict[str, Any] = {
        machine.VERSIONS: {
            "python": "3.12.1",
            "torch": "2.13.0+cu130",
            "megatron-core": "0.19.2",
            "numpy": "2.1",
            "commit": "abc",
            machine.LACKS: [],
            machine.PROGRAM: "f00",
        },
        machine.HARDWARE: {"missing": None, "device": "gpu", "count": 8, "devices": "8 x H100", "driver": "570.1"},
        network.INTERFACES: {"host": f"n{number + 1}", "own": [address], "interfaces": links, "asked": {}},
        disks.CHECK: {disks.RUN: dict(disk), "trainer.compile_cache": {**disk, "folder": "/cache"}},
        machine.LIMITS: {"files": 65536, "processes": None, "locked": None, "shared": 64 * GIB, "rdma": True},
    }
    return Node(number, f"n{number + 1}", address, str(number), seen)


def one(findings: list[Finding]) -> Finding:
    """The only finding, which has a remedy."""
    (found,) = findings
    assert found.remedy and found.what and not found.what.endswith(".")
    return found
