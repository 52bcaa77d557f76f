"""The doctor's command on this machine, its meeting, and its page."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.launch.environment import ProcessContext
from megatron_llama.tools.doctor import cli, disks, network
from megatron_llama.tools.doctor.examination import Report
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding
from megatron_llama.tools.doctor.network import ClockReading, Meeting
from tests.tools.doctor.nodes import healthy

SETTINGS = ["model=llama_2m", "device=cpu", "trainer.tp=2"]


def test_a_quick_look_at_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["--quick", "--json", *SETTINGS, f"run.dir={tmp_path}/run"])
    found = json.loads(capfd.readouterr().out)
    assert status == 0, found["findings"]
    assert [node["name"] for node in found["nodes"]] == [socket.gethostname()] and found["measured"] is None
    assert not list(tmp_path.iterdir())


def test_what_is_sure_to_break_ends_with_2(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_examine", lambda folder: {"folder": "/full", "fault": "No space left", "free": 0})
    assert cli.main(["--quick", *SETTINGS]) == 2
    said = capfd.readouterr().out
    assert "✗ disks" in said and "No space left" in said and "sure to break a run" in said


def test_a_mistake_in_the_settings(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trainer.tpp=2"]) == 2 and "trainer.tp" in capfd.readouterr().err
    assert cli.main(["trainer.tpp=2", "--quick"]) == 0, "train.py says it, and run.slurm goes on to that"


def context(rank: int, port: int) -> ProcessContext:
    return ProcessContext("srun", rank, 0, 1, 3, "127.0.0.1", port, "job", False, node=rank, nodes=3)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_processes_meet_and_who_is_missing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "check_first_address", lambda context: None)  # the nodes are on this machine
    monkeypatch.setattr(time, "time", lambda: 1000.0 + 5.0 * (threading.current_thread().name == "second"))
    port, got = free_port(), list[Any]()

    def second() -> None:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'00 {"number": 2}\n')
            mine = Meeting.of(context(1, port), "secret")
            got.append(mine.exchange("two"))
            got.append(mine.read_clocks())
            mine.close()

    listening = threading.Event()
    listen = network.listen

    def listen_and_tell(context: ProcessContext) -> socket.socket:
        made = listen(context)
        listening.set()
        return made

    monkeypatch.setattr(network, "listen", listen_and_tell)
    thread = threading.Thread(target=lambda: listening.wait(60) and second(), name="second", daemon=True)
    thread.start()
    first = Meeting.of(context(0, port), "secret", seconds=3.0)
    assert first.missing == [2], "the stranger without the secret is nobody"
    assert first.exchange("one") == ["one", "two", None]
    readings = first.read_clocks()
    thread.join(60)
    assert got == [["one", "two", None], []]
    assert readings[0] is readings[2] is None and readings[1] is not None
    assert readings[1].ahead == pytest.approx(5.0, abs=readings[1].round_trip)
    first.close()


def test_the_page_has_the_worst_first() -> None:
    nodes = [healthy(number) for number in range(2)]
    findings = [
        Finding("clocks", WARNS, "n2", "it is late", "chrony"),
        Finding("pairs", BREAKS, "n1 → n2", "x", "open"),
    ]
    rate = {"axis": "tp", "kind": "all_reduce", "ranks": 4, "size": 1 << 20, "seconds": 1e-3, "group": [0, 1, 2, 3]}
    measured = {"products": [1e12, 2e12], "hosts": ["n1", "n2"], "links": [[0, 1, 1e9]], "collectives": [rate]}
    text = Report(nodes, [None, ClockReading(0.5, 0.001)], findings, measured, 12.0).page(colour=False)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines.index("✗ pairs n1 → n2") < lines.index("! clocks n2")
    assert "tp all_reduce 4 1 MiB 1,000 us 1.049 GB/s 1.573 GB/s" in lines, "the bus carries 2 (n-1)/n of it"
    assert lines[-1] == "2 findings on 2 nodes in 12 s: 1 sure to break a run, 1 that may cost one."
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 120
