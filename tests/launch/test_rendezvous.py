"""Processes that find each other before the start, or report who is missing."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.launch import network, rendezvous
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.rendezvous import LaunchFailed, NodeInfo, Rendezvous


def context(rank: int, world: int = 3, address: str = "127.0.0.1", port: int = 0, job: str = "7") -> ProcessContext:
    """One of ``world`` processes, each on a machine of its own."""
    return ProcessContext("srun", rank, 0, 1, world, address, port, job, False, node=rank, nodes=world)


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes are this machine: the loopback, which several nodes can't share, counts as an address here."""
    monkeypatch.setattr(rendezvous, "check_first_address", lambda context: None)


check_first_address = rendezvous.check_first_address


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def info(rank: int, **more: Any) -> NodeInfo:
    return replace(rendezvous.node_info(context(rank), rank, 1, 3), name=f"n{rank + 1}", **more)


def test_all_learn_where_the_run_is(port: int) -> None:
    heard: dict[int, str] = {}

    def other(rank: int) -> None:
        here = Rendezvous(context(rank, port=port))
        here.report(info(rank))
        heard[rank] = here.wait()

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    threads[0].start()  # before there is anybody to meet
    time.sleep(0.3)
    first = Rendezvous(context(0, port=port))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n")
        threads[1].start()
        first.report(info(0))
        assert [node.name for node in first.gather()] == ["n1", "n2", "n3"]
    first.open("runs/it's here")
    for thread in threads:
        thread.join(100)
    assert heard == {1: "runs/it's here", 2: "runs/it's here"}


def test_a_process_of_another_job_is_not_counted(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port), limit_seconds=1.0)
    first.report(info(0))
    Rendezvous(context(1, 2, port=port, job="8")).report(info(1))
    with pytest.raises(LaunchFailed, match="nodes 1 of 2 have not come within 1 s; here are n1"):
        first.gather()


def test_a_first_process_that_is_not_there_is_reported(port: int) -> None:
    with pytest.raises(LaunchFailed, match=rf"node 2, .* can't reach the first node at 127.0.0.1, port {port}"):
        Rendezvous(context(2, port=port), limit_seconds=0.5)


def test_a_first_process_that_ends_lets_the_others_go(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port))
    other = Rendezvous(context(1, 2, port=port))
    other.report(info(1))
    del first  # and with it the store
    with pytest.raises(EOFError):
        other.wait()


def test_a_port_that_is_taken_is_the_users_to_change(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(ConfigError, match="MASTER_PORT"):
        Rendezvous(context(0, port=port))


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1"])
def test_a_loopback_address_is_refused_on_every_node(address: str) -> None:
    for node in (0, 1):
        with pytest.raises(ConfigError, match=rf"(?s)MASTER_ADDR.*on node {node},"):
            check_first_address(context(node, address=address))
    check_first_address(context(0, 1, address))


def test_the_first_node_may_know_its_own_name_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "addresses_of", lambda host: ["127.0.1.1"])
    check_first_address(context(0, address="head"))  # Debian's /etc/hosts
    with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
        check_first_address(context(1, address="head"))


def test_nodes_that_count_differently_are_named() -> None:
    with pytest.raises(LaunchFailed, match="n3 has 7 ranks and so counts 21 in all; n1 has 1 and counts 3"):
        rendezvous.check_consistent([info(0), info(1), info(2, ranks=7, world_size=21)])


def test_the_table() -> None:
    two = [
        info(0, first_rank=0, ranks=4, address="10.0.0.1", interface="ib0"),
        info(1, first_rank=4, ranks=4, address="10.0.0.2", interface=None),
    ]
    assert rendezvous.node_table(two, context(0, 2, "n1", 15070)).splitlines() == [
        "node  name  ranks  address   interface",
        "0     n1    0-3    10.0.0.1  ib0",
        "1     n2    4-7    10.0.0.2  unknown",
        "They meet at n1, port 15070.",
    ]


def test_interfaces() -> None:
    assert network.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") in ("lo", "lo0", None)
    assert network.interface_of("203.0.113.7") is None, "an address of nobody"
    assert network.is_loopback("localhost.localdomain") and not network.is_loopback("n1.cluster")
