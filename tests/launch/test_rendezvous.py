"""Processes that find each other before the start, or say who could not."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.launch import network
from megatron_llama.launch import rendezvous as meeting
from megatron_llama.launch.process_context import Place
from megatron_llama.launch.rendezvous import Arrival, LaunchFailed, PortMeeting


def place(rank: int, world: int = 3, address: str = "127.0.0.1", port: int = 0) -> Place:
    """One of ``world`` processes, each on a machine of its own."""
    return Place("srun", rank, 0, 1, world, address, port, "7", False, node=rank, nodes=world)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def arrival(rank: int, **more: object) -> Arrival:
    made = meeting.arrival_of(place(rank), rank, 1, 3)
    return replace(made, name=f"n{rank + 1}", **more)  # type: ignore[arg-type]


def test_all_hear_where_the_run_lives(port):
    heard: dict[int, str] = {}

    def other(rank: int) -> None:
        here = PortMeeting(place(rank, port=port))
        here.arrive(arrival(rank))
        heard[rank] = here.wait()

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    threads[0].start()  # before there is anybody to meet
    time.sleep(0.3)
    first = PortMeeting(place(0, port=port))
    assert first.listener is not None
    with first.listener:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\n")
            threads[1].start()
            arrivals = first.arrive(arrival(0))
        assert [a.name for a in arrivals] == ["n1", "n2", "n3"]
        first.open("runs/it's here")
        for thread in threads:
            thread.join(100)
    assert heard == {1: "runs/it's here", 2: "runs/it's here"}


def test_a_process_of_another_job_is_not_counted(port, monkeypatch):
    monkeypatch.setattr(meeting, "ARRIVAL_LIMIT_SECONDS", 1.0)
    first = PortMeeting(place(0, 2, port=port))
    assert first.listener is not None
    other = PortMeeting(place(1, 2, port=port))
    other.arrive(arrival(1, job="8/srun/2"))
    with first.listener, pytest.raises(LaunchFailed, match="nodes 1 of 2 have not come within 1 s; here are n1"):
        first.arrive(arrival(0))


def test_a_first_process_that_is_not_there_is_said(port, monkeypatch):
    monkeypatch.setattr(meeting, "ARRIVAL_LIMIT_SECONDS", 0.5)
    with pytest.raises(LaunchFailed, match=rf"node 2, .* can't reach the first node at 127.0.0.1, port {port}"):
        PortMeeting(place(2, port=port)).arrive(arrival(2))


def test_a_first_process_that_ends_lets_the_others_go(port):
    first = PortMeeting(place(0, 2, port=port))
    other = PortMeeting(place(1, 2, port=port))
    other.arrive(arrival(1))
    assert first.listener is not None
    first.listener.close()
    with pytest.raises(EOFError):
        other.wait()


def test_a_port_that_is_taken_is_the_users_to_change(port):
    with socket.create_server(("", port)), pytest.raises(ConfigError, match="MASTER_PORT"):
        PortMeeting(place(0, port=port))


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1"])
def test_a_loopback_address_is_refused_on_every_node(address):
    for node in (0, 1):
        with pytest.raises(ConfigError, match=rf"(?s)MASTER_ADDR.*on node {node},"):
            meeting.check_first_address(place(node, address=address))
    meeting.check_first_address(place(0, 1, address))


def test_the_first_node_may_know_its_own_name_as_loopback(monkeypatch):
    monkeypatch.setattr(meeting, "addresses_of", lambda host: ["127.0.1.1"])
    meeting.check_first_address(place(0, address="head"))  # Debian's /etc/hosts
    with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
        meeting.check_first_address(place(1, address="head"))


def test_nodes_that_count_differently_are_named():
    with pytest.raises(LaunchFailed, match="n3 has 7 ranks and so counts 21 in all; n1 has 1 and counts 3"):
        meeting.settled([arrival(0), arrival(1), arrival(2, ranks=7, world_size=21)])


def test_the_table():
    two = [
        arrival(0, first_rank=0, ranks=4, address="10.0.0.1", interface="ib0"),
        arrival(1, first_rank=4, ranks=4, address="10.0.0.2", interface=None),
    ]
    assert meeting.table(two, place(0, 2, "n1", 15070)).splitlines() == [
        "node  name  ranks  address   interface",
        "0     n1    0-3    10.0.0.1  ib0",
        "1     n2    4-7    10.0.0.2  unknown",
        "They meet at n1, port 15070.",
    ]


def test_interfaces():
    assert network.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") in ("lo", "lo0", None)
    assert network.interface_of("203.0.113.7") is None, "an address of nobody"
    assert network.is_loopback("localhost.localdomain") and not network.is_loopback("n1.cluster")
