"""scripts/doctor.py: each check reports an injected fault and nothing for healthy nodes; connections; the report."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.job_store import LaunchFailed
from megatron_llama.plan import resolve
from megatron_llama.tools.doctor import cli, disks, examination, network, rank_and_link_speed
from megatron_llama.tools.doctor import machine_checks as machine
from megatron_llama.tools.doctor.disks import RUN, Need
from megatron_llama.tools.doctor.examination import DoctorReport
from megatron_llama.tools.doctor.finding import BREAKS, WARNS, Finding, NodeState
from megatron_llama.tools.doctor.network import ClockReading, Connections
from megatron_llama.tools.doctor.rank_and_link_speed import Rate, first_ranks, pairing_rounds
from tests.config.helpers import make
from tests.golden import GoldenFiles
from tests.ranks import check_threads

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


NEED = Need(checkpoint=100 * GIB, retained=3)
JUDGES: dict[str, Callable[[list[NodeState]], Iterable[Finding]]] = {
    machine.VERSIONS: machine.judge_versions,
    machine.HARDWARE: machine.judge_hardware,
    network.INTERFACES: network.judge_interfaces,
    machine.LIMITS: lambda nodes: machine.judge_limits(nodes, accelerator=True),
    disks.CHECK: lambda nodes: disks.judge(nodes, [None] * len(nodes), NEED),
}


@pytest.mark.parametrize(
    ("device", "exact", "writes"), [("cpu", False, False), ("cpu", True, True), ("cuda", False, True)]
)
def test_the_cache_of_a_run_that_compiles_is_checked(device: str, exact: bool, writes: bool) -> None:
    """Uncompiled blocks have compiled operators on a GPU, and loops in C++ in exact mode."""
    settings = {"device.name": device, "trainer.exact": exact, "trainer.compile": False}
    assert ("trainer.compile_cache" in examination.output_folders(make(**settings))) == writes


FAULTS: list[tuple[str, dict[str, Any]]] = [
    (machine.VERSIONS, {"torch": "2.11.0"}),
    (machine.VERSIONS, {"torch": None, machine.LACKS: ["torch"]}),
    (machine.VERSIONS, {machine.LACKS: ["matplotlib"]}),
    (machine.VERSIONS, {"python": "3.11.7"}),
    (machine.VERSIONS, {machine.PROGRAM: "bad", "commit": "old"}),
    (machine.HARDWARE, {"missing": "no driver"}),
    (machine.HARDWARE, {"device": "cpu"}),
    (machine.HARDWARE, {"count": 7}),
    (machine.HARDWARE, {"driver": "550"}),
    (network.INTERFACES, {"own": ["127.0.1.1"]}),
    *((network.INTERFACES, {"asked": {network.GLOO: name}}) for name in ("eth7", "lo")),
    (network.INTERFACES, {"asked": {"X_IFNAME": "^eth,lo"}}),
    (machine.LIMITS, {"files": 1024}),
    (machine.LIMITS, {"locked": 65536}),
    (machine.LIMITS, {"shared": 64 << 20}),
    (disks.CHECK, {RUN: {"fault": "Permission denied"}}),
    (disks.CHECK, {"trainer.compile_cache": {"fault": "No space left on device", "free": 0}}),
    (disks.CHECK, {RUN: {"locks": None}}),
    (disks.CHECK, {RUN: {"renames": False}}),
    (disks.CHECK, {RUN: {"seconds": 0.2}}),
    (disks.CHECK, {RUN: {"free": 90 * GIB}}),
    (disks.CHECK, {RUN: {"free": 250 * GIB}}),
]
"""Reports of the third of four nodes."""


def with_fault(check: str, fault: dict[str, Any]) -> list[NodeState]:
    nodes = [healthy(number) for number in range(4)]
    seen = nodes[2].seen[check]
    for name, value in fault.items():
        seen[name] = {**seen[name], **value} if check == disks.CHECK else value
    return nodes


def tried(slow: float = 0.0002, fault: str = "") -> dict[int, list[dict[str, Any]]]:
    """Return the connections between three nodes; the second cannot reach the third, or slowly."""
    results = {n: [{"to": m, "seconds": 0.0002, "fault": ""} for m in range(3) if m != n] for n in range(3)}
    results[1][1] = {"to": 2, "seconds": None if fault else slow, "fault": fault, "port": 40001}
    return results


def measured(products: list[float], slow: Callable[[int, int], bool] = lambda one, other: False) -> dict[str, Any]:
    """Return measurements of four nodes with two ranks each."""
    hosts = [f"n{1 + rank // 2}" for rank in range(8)]
    links = [(a, b, 1e7 if slow(a, b) else 1e9) for a in range(4) for b in range(4) if a != b]
    return {"hosts": hosts, "products": products, "links": links, "collectives": []}


def rates(slow: int) -> list[dict[str, Any]]:
    """Return rates of four tensor-parallel groups; the one that starts with rank ``slow`` is slow."""
    common = {"axis": "tp", "kind": "all_reduce", "ranks": 2, "size": 1 << 24}
    groups = [(0, 1), (2, 3), (4, 5), (6, 7)]
    return [common | {"seconds": 0.1 if group[0] == slow else 0.01, "group": group} for group in groups]


def test_findings() -> None:
    """Healthy nodes have no finding; the page has the findings of each fault, with severity, node and remedy."""
    nodes = [healthy(number) for number in range(3)]
    there, equal = {"seen": True, "locked_out": True}, [1e12] * 8

    def judge_disks(*others: dict[str, Any]) -> Iterable[Finding]:
        return disks.judge(nodes, [None, *others], NEED)

    def judge_clocks(*ahead: tuple[float, float]) -> Iterable[Finding]:
        return machine.judge_clocks(nodes, [None, *(ClockReading(*each) for each in ahead)])

    situations: dict[str, Iterable[Finding]] = {
        **{f"healthy {check}": judge([healthy(number) for number in range(4)]) for check, judge in JUDGES.items()},
        **{f"{check}: {fault}": JUDGES[check](with_fault(check, fault)) for check, fault in FAULTS},
        "shared folders": judge_disks(there, there),
        "a folder that n3 does not see": judge_disks(there, {"seen": False, "locked_out": None}),
        "locks of n2 alone": judge_disks({"seen": True, "locked_out": False}, there),
        "clocks within the error of the reading": judge_clocks((0.4, 0.001), (-1.2, 0.9)),
        "a clock that is late": judge_clocks((-37.2, 0.001), (0.0, 0.001)),
        "fast pairs": network.judge_pairs(nodes, tried()),
        "a pair without an answer": network.judge_pairs(nodes, tried(fault="no answer within 4 s")),
        "a slow pair": network.judge_pairs(nodes, tried(slow=0.05)),
        "equal ranks and links": rank_and_link_speed.judge(measured(equal)),
        "a slow rank": rank_and_link_speed.judge(measured([*equal[:5], 6e11, *equal[6:]])),
        "a slow link": rank_and_link_speed.judge(measured(equal, lambda a, b: (a, b) == (1, 3))),
        "slow links of a node": rank_and_link_speed.judge(measured(equal, lambda a, b: a == 2)),
        "equal groups": rank_and_link_speed.judge(measured(equal) | {"collectives": rates(slow=8)}),
        "a slow group": rank_and_link_speed.judge(measured(equal) | {"collectives": rates(slow=4)}),
    }
    page = ""
    for name, findings in situations.items():
        page += f"== {name}\n"
        for one in findings:
            assert one.remedy and one.what and not one.what.endswith(".")
            page += f"{one.severity} {one.check}, {one.where}: {one.what}\n    {one.remedy}\n"
    GoldenFiles.check("tools/doctor/findings.txt", page, {r"(?<=run )\S+(?= -m pip)": "PYTHON"})


def test_observing_a_disk_leaves_no_files(tmp_path: Path) -> None:
    seen = disks.observe({RUN: tmp_path / "runs" / "new"})[RUN]
    assert seen["folder"] == str(tmp_path) and seen["fault"] is None and seen["renames"] and seen["locks"]
    with disks.marker(tmp_path) as mark:
        assert disks.check_marker(str(mark)) == {"seen": True, "locked_out": True}
    assert not list(tmp_path.iterdir())
    if os.geteuid():
        tmp_path.chmod(0o555)
        assert disks.observe({RUN: tmp_path})[RUN]["fault"] == "Permission denied"


def test_disk_need_counts_checkpoints() -> None:
    settings: dict[str, Any] = {"checkpoint.every_steps": 10, "trainer.steps": 95, "checkpoint.keep": 2}
    plan = resolve(make(**settings), 1)
    assert examination.disk_need(plan) == Need(plan.whole.trained * (4 + 2 * 4), 3), "two, and the one being written"
    settings["checkpoint.keep"] = None
    assert examination.disk_need(resolve(make(**settings), 1)).retained == 10, "at 10, 20 ... 90 and at the end"


def test_reach_open_and_closed_ports() -> None:
    echo = network.Echo()
    answered = network.reach("127.0.0.1", echo.port)
    assert answered["seconds"] > 0 and not answered["fault"]
    echo.close()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = probe.getsockname()[1]
    assert network.reach("127.0.0.1", closed) == {"seconds": None, "fault": "Connection refused", "port": closed}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_pairing_rounds_contain_each_pair_once(count: int) -> None:
    all_rounds = [list(pairs) for pairs in pairing_rounds(count)]
    for pairs in all_rounds:
        assert len({n for pair in pairs for n in pair}) == 2 * len(pairs), "one partner at a time"
    all_pairs = [pair for pairs in all_rounds for pair in pairs]
    assert sorted(all_pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert first_ranks(["a", "a", "b", "b"]) == [0, 2]


def test_bandwidths_of_a_rate() -> None:
    # doc/PERFORMANCE.md there: all_reduce 2 (n-1)/n, all_gather and reduce_scatter (n-1)/n, send and recv 1.
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    rates = [Rate("tp", kind, 4, size=8_000_000, seconds=0.002) for kind in kinds]
    assert [rate.algorithm_bandwidth for rate in rates] == [4e9] * 4
    assert [rate.bus_bandwidth for rate in rates] == [6e9, 3e9, 3e9, 4e9]


@pytest.mark.parametrize(
    ("text", "exact", "chosen"),
    [
        ("eth0", True, {"eth0"}),
        ("eth", True, set()),
        ("eth", False, {"eth0", "eth1"}),
        ("=eth1", False, {"eth1"}),
        ("^lo,docker", False, {"eth0", "eth1"}),
        ("^=eth1", False, {"lo", "docker0", "eth0"}),
    ],
)
def test_interfaces_selected_by_a_variable(text: str, exact: bool, chosen: set[str]) -> None:
    known = ["lo", "docker0", "eth0", "eth1"]
    assert {name for name in known if network.matches(text, name, exact=exact)} == chosen


# --- the command, connections and the report --------------------------------------------------------------------------

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


def test_a_quick_examination_ignores_config_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """train.py, which run.slurm starts next, reports the errors; the doctor reports that it does not check them."""
    assert cli.main(["trainer.tpp=2", "--quick"]) == 0
    assert "nothing is checked: the settings are invalid" in capsys.readouterr().err
    assert cli.main([*SETTINGS, "trainer.pp=64", "--quick"]) == 0
    page = capsys.readouterr().out
    assert "train.py rejects the settings" in page and "1 finding on 1 node" in page


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
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 80
    GoldenFiles.check("tools/doctor/report.txt", text)


def test_a_lost_store_of_torchrun_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ARRIVAL_SECONDS", 0.5)
    monkeypatch.setattr(network, "check_first_address", lambda context: None)
    port = free_port()
    torchrun = replace(context(1, port), launcher="torchrun", has_store=True)
    with pytest.raises(LaunchFailed, match=f"the store of torchrun's agent at 127.0.0.1:{port} is lost: "):
        Connections.of(torchrun, "secret")
    check_threads()  # torch's client writes to stderr at its end, which may be in the next test
