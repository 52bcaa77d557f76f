"""The doctor command on this host, its connections and its report."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.job_store import LaunchFailed
from megatron_llama.tools.doctor import cli, disks, network
from megatron_llama.tools.doctor.examination import DoctorReport
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding
from megatron_llama.tools.doctor.network import ClockReading, Connections
from tests.tools.doctor.nodes import healthy

SETTINGS = ["model=llama_2m", "device=cpu", "trainer.tp=2"]


def test_quick_examination_of_this_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["--quick", "--json", *SETTINGS, f"run.dir={tmp_path}/run"])
    report = json.loads(capfd.readouterr().out)
    assert status == 0, report["findings"]
    assert [node["name"] for node in report["nodes"]] == [socket.gethostname()] and report["measured"] is None
    assert not list(tmp_path.iterdir())


def test_a_fatal_problem_exits_with_2(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_examine", lambda folder: {"folder": "/full", "fault": "No space left", "free": 0})
    assert cli.main(["--quick", *SETTINGS]) == 2
    output = capfd.readouterr().out
    assert "✗ disks" in output and "No space left" in output and ": 1 fatal" in output


def test_config_errors_exit_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trainer.tpp=2"]) == 2 and "trainer.tp" in capfd.readouterr().err
    assert cli.main(["trainer.tpp=2", "--quick"]) == 0, "train.py, which run.slurm starts next, reports the error"


def context(rank: int, port: int) -> ProcessContext:
    return ProcessContext("srun", rank, 0, 1, 3, "127.0.0.1", port, "job", False, node=rank, nodes=3)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_connections_report_missing_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "check_first_address", lambda context: None)  # the nodes are on this machine
    monkeypatch.setattr(time, "time", lambda: 1000.0 + 5.0 * (threading.current_thread().name == "second"))
    port, got = free_port(), list[Any]()

    def second() -> None:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'00 {"number": 2}\n')
            connections = Connections.of(context(1, port), "secret")
            got.append(connections.exchange("two"))
            got.append(connections.read_clocks())
            connections.close()

    listening = threading.Event()
    listen = network.listen

    def listen_and_notify(context: ProcessContext) -> socket.socket:
        made = listen(context)
        listening.set()
        return made

    monkeypatch.setattr(network, "listen", listen_and_notify)
    thread = threading.Thread(target=lambda: listening.wait(60) and second(), name="second", daemon=True)
    thread.start()
    first = Connections.of(context(0, port), "secret", seconds=3.0)
    assert first.missing == [2], "the connection without the secret is rejected"
    assert first.exchange("one") == ["one", "two", None]
    readings = first.read_clocks()
    thread.join(60)
    assert got == [["one", "two", None], []]
    assert readings[0] is readings[2] is None and readings[1] is not None
    assert readings[1].ahead == pytest.approx(5.0, abs=readings[1].round_trip)
    first.close()


def test_report_starts_with_the_most_severe() -> None:
    nodes = [healthy(number) for number in range(2)]
    findings = [
        Finding("clocks", WARNS, "n2", "it is late", "chrony"),
        Finding("pairs", BREAKS, "n1 → n2", "x", "open"),
    ]
    rate = {"axis": "tp", "kind": "all_reduce", "ranks": 4, "size": 1 << 20, "seconds": 1e-3, "group": [0, 1, 2, 3]}
    measured = {"products": [1e12, 2e12], "hosts": ["n1", "n2"], "links": [[0, 1, 1e9]], "collectives": [rate]}
    text = DoctorReport(nodes, [None, ClockReading(0.5, 0.001)], findings, measured, 12.0).page(colour=False)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines.index("✗ pairs n1 → n2") < lines.index("! clocks n2")
    assert "tp all_reduce 4 1 MiB 1,000 us 1.049 GB/s 1.573 GB/s" in lines, "bus bandwidth is 2 (n-1)/n of it"
    assert lines[-1] == "2 findings on 2 nodes in 12 s: 1 fatal, 1 may fail or slow a run."
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 80


def test_a_lost_store_of_torchrun_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ARRIVAL_SECONDS", 0.5)
    monkeypatch.setattr(network, "check_first_address", lambda context: None)
    port = free_port()
    torchrun = replace(context(1, port), launcher="torchrun", has_store=True)
    with pytest.raises(LaunchFailed, match=f"the store of torchrun's agent at 127.0.0.1:{port} is lost: "):
        Connections.of(torchrun, "secret")
