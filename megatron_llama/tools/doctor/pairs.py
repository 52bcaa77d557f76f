"""Whether every node reaches every other one by TCP at any port, as the ranks' libraries do, and how quickly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median_high
from typing import Any

from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, Node

CHECK = "pairs"
SECONDS, ATTEMPTS = 4.0, 2
PAYLOAD = 64 << 10
"""Bytes there and back: more than a packet, so that one which is too large for some switch on the way is found."""
SLOWER, MORE_SECONDS = 10.0, 0.005
"""A pair is slow whose round trip is both, many times and much more than that of the middle one."""
_THREADS = 16


class Echo:
    """A port on this node, chosen by the system, that sends back what it gets."""

    def __init__(self) -> None:
        family, both = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="echo", daemon=True).start()

    def close(self) -> None:
        """No further connections."""
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.settimeout(SECONDS)
        while data := connection.recv(PAYLOAD):
            connection.sendall(data)


def reach_all(own: int, peers: Mapping[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """What becomes of a connection to each of ``peers``, by number (address, port): seconds of a round trip, or why
    there is none. All nodes do this at once, each beginning with the one after it."""
    order = sorted(peers, key=lambda number: (number < own, number))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda number: {"to": number, **reach(*peers[number])}, order))


def reach(address: str, port: int) -> dict[str, Any]:
    """One connection: ``seconds`` of a small round trip, or None and ``fault``."""
    fault = ""
    for _ in range(ATTEMPTS):
        try:
            with socket.create_connection((address, port), timeout=SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _round_trip(connection, PAYLOAD)
                return {"seconds": min(_round_trip(connection, 64) for _ in range(5)), "fault": ""}
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            fault = f"no answer within {SECONDS:g} s" if silent else error.strerror or str(error)
    return {"seconds": None, "fault": fault, "port": port}


def _round_trip(connection: socket.socket, size: int) -> float:
    start, left = time.perf_counter(), size
    connection.sendall(b"." * size)
    while left:
        data = connection.recv(left)
        if not data:
            raise ConnectionError("the connection was closed")
        left -= len(data)
    return time.perf_counter() - start


def judge(nodes: Sequence[Node], results: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """``results``: those of ``reach_all``, by the number of the node that tried."""
    by_number = {node.number: node for node in nodes}
    times = [each["seconds"] for found in results.values() for each in found if each["seconds"] is not None]
    usual = median_high(times) if times else 0.0
    for number, found in sorted(results.items()):
        for each in sorted(found, key=lambda one: one["to"]):
            here, there = by_number[number], by_number[each["to"]]
            where = f"{here.name} → {there.name}"
            if each["seconds"] is None:
                what = f"{here.address} can't connect to {there.address}, port {each['port']}: {each['fault']}"
                remedy = "open TCP between the two at all ports from 1024 up (firewall, security group)"
                yield Finding(CHECK, BREAKS, where, what, f"{remedy}, or leave one of them out")
            elif each["seconds"] > max(SLOWER * usual, usual + MORE_SECONDS):
                what = f"a round trip takes {1e3 * each['seconds']:.1f} ms, and {1e3 * usual:.2f} ms between most nodes"
                remedy = f"look at the way between them: tracepath {there.address} on {here.name}"
                yield Finding(CHECK, WARNS, where, what, remedy)
