"""Observations of healthy nodes, for tests that inject a fault."""

from __future__ import annotations

from typing import Any

from megatron_llama.tools.doctor import disks, machine, network
from megatron_llama.tools.doctor.finding import Finding, NodeState

GIB = 2**30


def healthy(number: int) -> NodeState:
    """Return a node without faults."""
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
    return NodeState(number, f"n{number + 1}", address, str(number), seen)


def one(findings: list[Finding]) -> Finding:
    """Return the only finding, after checking that it has a remedy."""
    (finding,) = findings
    assert finding.remedy and finding.what and not finding.what.endswith(".")
    return finding
