"""Reports of processes about themselves before the start."""

from __future__ import annotations

import pytest

from megatron_llama.launch import reports
from megatron_llama.launch.job_store import LaunchFailed
from tests.launch.places import context, info


def test_nodes_that_count_differently_are_named() -> None:
    with pytest.raises(LaunchFailed, match=r"n3 has 7 ranks \(world size 21\), n1 has 1 \(world size 3\)"):
        reports.check_consistent([info(0), info(1), info(2, ranks=7, world_size=21)])


def test_the_table() -> None:
    two = [
        info(0, first_rank=0, ranks=4, address="10.0.0.1", interface="ib0"),
        info(1, first_rank=4, ranks=4, address="10.0.0.2", interface=None),
    ]
    assert reports.node_table(two, context(0, 2, "n1", 15070)).splitlines() == [
        "node  name  ranks  address   interface",
        "0     n1    0-3    10.0.0.1  ib0",
        "1     n2    4-7    10.0.0.2  unknown",
        "Rendezvous at n1, port 15070.",
    ]
