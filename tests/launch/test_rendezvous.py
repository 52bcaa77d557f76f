"""Processes that find each other before the start, or report who is missing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore

from megatron_llama.config import ConfigError
from megatron_llama.launch import environment, job_store, rendezvous, reports, run_dir
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.job_store import JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.rank import is_peer_lost
from megatron_llama.launch.rendezvous import Rendezvous
from megatron_llama.system.signals import is_stopped
from tests.launch.places import context, info
from tests.paths import ROOT
from tests.processes import PATIENCE_SECONDS, MakeLauncher, host_store


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes are this machine: the loopback, which several nodes can't share, counts as an address here."""
    monkeypatch.setattr(rendezvous, "check_first_address", lambda context: None)


check_first_address = rendezvous.check_first_address


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_all_learn_where_the_run_is(port: int) -> None:
    heard: dict[int, str] = {}

    def other(rank: int) -> None:
        here = Rendezvous(context(rank, port=port))
        here.report(info(rank, 3))
        heard[rank] = here.wait().run_dir

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    threads[0].start()  # before there is anybody to meet
    time.sleep(0.3)
    first = Rendezvous(context(0, port=port))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n")
        threads[1].start()
        first.report(info(0, 3))
        nodes = first.gather()
        assert [node.name for node in nodes] == ["n1", "n2", "n3"]
    first.open(nodes, "runs/it's here")
    for thread in threads:
        thread.join(100)
    assert heard == {1: "runs/it's here", 2: "runs/it's here"}


def test_a_run_folder_that_is_not_shared_is_rejected_on_all_nodes(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "SHARED_LIMIT_SECONDS", 0.0)
    ranks = [start(context(rank, 2, port=port)) for rank in (0, 1)]
    errors = together(
        lambda: ranks[0].open(ranks[0].gather(), str(tmp_path)), lambda: ranks[1].wait(run_dir.check_shared)
    )
    for error in errors:
        assert isinstance(error, ConfigError) and error.problems[0].field == "run.dir", errors
        assert socket.gethostname() in error.problems[0].rule and "all nodes mount" in error.problems[0].instead
    with run_dir.claim_run_dir(tmp_path):
        assert run_dir.check_shared(str(tmp_path)) is None


def test_a_process_of_another_job_is_not_counted(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port), limit_seconds=1.0)
    first.report(info(0))
    Rendezvous(context(1, 2, port=port, job="8")).report(info(1))
    with pytest.raises(LaunchFailed, match="nodes 1 of 2 missing after 1 s; arrived: n1"):
        first.gather()


def test_missing_process_0_is_reported(port: int) -> None:
    with pytest.raises(LaunchFailed, match=rf"node 2 .* cannot reach the first node at 127.0.0.1, port {port}"):
        Rendezvous(context(2, port=port), limit_seconds=0.5)


def test_end_of_process_0_ends_the_wait(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port))
    other = Rendezvous(context(1, 2, port=port))
    other.report(info(1))
    del first  # and with it the store
    with pytest.raises(EOFError):
        other.wait()


def test_process_0_that_does_not_start_is_reported(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port))
    other = Rendezvous(context(1, 2, port=port), limit_seconds=0.5)
    other.report(info(1))
    with pytest.raises(LaunchFailed, match=r"process 0 did not start within 0\.5 s: it, or a process .* is stopped"):
        other.wait()
    del first


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run all calls concurrently; return their results or errors."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return results


def start(place: ProcessContext, token: str = "", counts: int | None = None) -> Rendezvous:
    """Start a process that has reported itself and counts ``counts`` ranks."""
    count = place if counts is None else replace(place, world_size=counts)
    here = Rendezvous(count)
    own_key = reports.node_info(count, place.rank, 1, place.world_size)
    here.report(replace(own_key, token=token) if token else own_key)
    return here


def test_two_processes_with_one_number_are_told_at_once(port: int) -> None:
    ranks = [start(context(rank, port=port)) for rank in (0, 1, 1)]
    errors = together(ranks[0].gather, ranks[1].wait, ranks[2].wait)
    assert sum(isinstance(error, ConfigError) for error in errors) >= 2, errors
    assert f"process {os.getpid()} on" in str(errors[0]) and errors[0].problems[0].field == "RANK"


def test_a_late_process_with_a_taken_number_does_not_wait(port: int) -> None:
    first, second = start(context(0, 2, port=port)), start(context(1, 2, port=port))
    together(lambda: first.open(first.gather(), "runs/x"), second.wait)
    with pytest.raises(ConfigError, match=r"two\s+processes\s+have\s+this\s+rank"):
        start(context(1, 2, port=port)).wait()


@pytest.mark.parametrize("counts", [2, 4])
def test_processes_that_were_told_of_different_worlds_do_not_wait(port: int, counts: int) -> None:
    first, second = start(context(0, port=port)), start(context(1, port=port), counts=counts)
    errors = together(first.gather, second.wait)
    for error in errors:
        assert isinstance(error, ConfigError) and error.problems[0].field == "WORLD_SIZE", errors


def test_what_an_earlier_attempt_has_left_does_not_count() -> None:
    """torchrun keeps its store while agents come and go, and counts restarts on each agent alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        replace(context(rank, 2, port=store.port), launcher="torchrun", has_store=True, nodes=1) for rank in (0, 1)
    ]

    def attempt(chosen: str) -> list[Any]:
        first, second = [start(place) for place in places]

        def begin() -> reports.StartMessage:
            nodes = [replace(node, token="old") if node.number else node for node in first.gather()]
            return first.open(nodes, *first.agree_on_run_dir(chosen))  # like a report of an earlier attempt

        sent, received = together(begin, second.wait)
        assert sent == received, "the old report is replaced"
        first.board().post_note("")
        assert not second.board().post_note("")
        together(partial(first.board().gather, "rank 0 hangs"), partial(second.board().gather, "rank 1 too"))
        assert second.board().post_note("")
        return [sent.run_dir, sent.restarted, sent.attempt]

    monday, tuesday = attempt("runs/monday"), attempt("runs/tuesday")
    assert monday[:2] == ["runs/monday", False] and tuesday[:2] == ["runs/monday", True]
    assert monday[2] != tuesday[2]


def test_a_port_that_is_taken_is_the_users_to_change(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(ConfigError, match="MASTER_PORT"):
        Rendezvous(context(0, port=port))


SECRET = "0123456789abcdef"


def stranger(port: int) -> Any:
    """Connect to the port without the job's secret."""
    return TCPStore("127.0.0.1", port, is_master=False)


def test_who_knows_the_jobs_name_but_not_its_secret_takes_nobodys_place(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port), secret=SECRET)
    first.report(info(0))
    Rendezvous(context(1, 2, port=port), secret=SECRET).report(replace(info(1), name="good"))
    Rendezvous(context(1, 2, port=port)).report(replace(info(1), name="evil"))
    Rendezvous(context(1, 2, port=port), secret="another").report(replace(info(1), name="evil"))
    assert [node.name for node in first.gather()] == ["n1", "good"]


def test_a_value_that_a_stranger_changes_or_moves_is_not_believed(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port), 0.5, SECRET)
    other = Rendezvous(context(1, 2, port=port), 0.5, SECRET)
    first.report(info(0))
    evil = stranger(port)
    (own_key,) = our_keys(evil)
    other.report(info(1))
    (theirs,) = our_keys(evil, 2) - {own_key}
    good = evil.get(theirs)
    for changed in (b"{}", b"0" * 64 + b"{}", good[:-1] + b" ", evil.get(own_key)):  # the last: another's report
        evil.set(theirs, changed.decode())
        with pytest.raises(LaunchFailed, match="nodes 1 of 2.*reports without this job's MEGATRON_LLAMA_SECRET"):
            first.gather()
    evil.set(theirs, good.decode())
    assert len(first.gather()) == 2


def our_keys(store: Any, count: int = 1) -> set[str]:
    """The job's keys, once there are ``count``: a client of the store does not wait until what it sets has arrived."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(keys := {key for key in store.list_keys() if "megatron_llama/" in key}) < count:
        assert time.monotonic() < deadline
    return keys


def test_neither_the_jobs_name_nor_its_secret_stands_in_the_store(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port, job="4711"), secret=SECRET)
    first.report(info(0))
    (key,) = our_keys(stranger(port))
    assert "4711" not in key and SECRET not in key
    assert SECRET.encode() not in stranger(port).get(key)


@pytest.mark.parametrize("report", ["", "[" * 100_000, '{"number": 1}', "null", "7" * 5000])
def test_without_a_secret_an_invalid_report_is_a_missing_rank(port: int, report: str) -> None:
    first = Rendezvous(context(0, 2, port=port), limit_seconds=0.5)
    first.report(info(0))
    (own_key,) = our_keys(stranger(port))
    stranger(port).set(f"{own_key[:-1]}1", report)
    with pytest.raises(LaunchFailed, match="nodes 1 of 2 missing"):
        first.gather()


def another_program(how: str) -> socket.socket:
    """Open a port that is not process 0: silent, slow, invalid, endless or closing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if how == "nonsense":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            while how in ("drips", "does not stop"):
                connection.sendall(b"\xff" * (1 if how == "drips" else 4096))
                time.sleep(0.05 if how == "drips" else 0.0)

    def serve() -> None:
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])
                if how == "hangs up":
                    held[-1].close()
                else:
                    threading.Thread(target=talk, args=(held[-1],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize("how", ["silent", "drips", "nonsense", "does not stop", "hangs up"])
def test_port_of_another_program_is_reported_in_time(
    launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(job_store, "ANSWER_SECONDS", 1.0)

    def connect() -> int:
        with (
            another_program(how) as listener,
            pytest.raises(LaunchFailed, match="does not belong to process 0"),
        ):
            Rendezvous(context(1, port=listener.getsockname()[1]), limit_seconds=2.0).report(info(1))
        return 0

    job = launcher(connect)  # torch's client tries to connect for minutes, in a thread
    assert job.wait() == 0, job.errors


def test_stopped_store_host_raises_store_lost(launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    job = launcher(partial(stop_store_host, monkeypatch))  # calls of a stopped store stay in their threads
    assert job.wait() == 0, job.errors


def stop_store_host(monkeypatch: pytest.MonkeyPatch) -> int:
    host, port = host_store()
    try:
        here = JobStore(lambda: TCPStore("127.0.0.1", port, is_master=False), "job", "", PATIENCE_SECONDS)
        here.set("a", "1")
        assert here.get("a") == "1" and here.get("b") is None
        assert here.wait("b", 0.2) is None, "a timeout is an answer"
        os.kill(host, signal.SIGSTOP)
        while not is_stopped(host):
            time.sleep(0.01)
        monkeypatch.setattr(job_store, "ANSWER_SECONDS", 0.3)
        calls: list[Callable[[], Any]] = [partial(here.get, "a"), partial(here.wait, "b", 0.3), here.clone]
        for call in calls:
            with pytest.raises(StoreLost, match="did not answer within"):
                call()
        return 0
    finally:
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)


def test_a_hostile_crowd_at_the_store_keeps_nobody_out(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port), PATIENCE_SECONDS, SECRET)
    first.report(info(0))
    # torch's protocol: a greeting, then SET, the length of a key, the key, the length of a value, the value.
    greeting, before = b"\x00" + struct.pack("<I", 0x3C85F7CE), memory_mib()
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        dripping, huge, garbage = silent[:3]
        dripping.sendall(greeting + b"\x01" + b"\x01" * 5)  # the first bytes of a length
        garbage.sendall(bytes(range(256)) * 400)
        huge.sendall(greeting + b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 8 << 30))
        with contextlib.suppress(OSError):  # the store hangs up at once
            for _ in range(200):
                huge.sendall(b"x" * (1 << 20))
        Rendezvous(context(1, 2, port=port), PATIENCE_SECONDS, SECRET).report(info(1))
        assert [node.number for node in first.gather()] == [0, 1]
        assert memory_mib() - before < 100, "8 GiB were announced, and 200 MiB offered"


def memory_mib() -> float:
    """Return the MiB of memory of this process, which includes the store."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_process_0_listens_on_master_addr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_loopback", lambda host: host == "127.0.1.1")
    # 127.0.0.2 stands for the address of one of several interfaces, 127.0.1.1 for a name that is the loopback on the
    # first node alone, 203.0.113.7 for the address of a router before it.
    for address, nodes, expected in [
        ("127.0.0.2", 2, "127.0.0.2"),
        ("127.0.1.1", 2, "all addresses"),
        ("203.0.113.7", 2, "all addresses"),
        ("127.0.1.1", 1, "127.0.1.1"),
    ]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            number = int(probe.getsockname()[1])
        first = Rendezvous(replace(context(0, 2, address, number), nodes=nodes))
        assert f"Process 0 listens on {expected}." in first.describe_security()
        assert [one if one not in ("::", "0.0.0.0") else "all addresses" for one in listening_addresses(number)] == [
            expected
        ]


def listening_addresses(port: int) -> list[str]:
    """Return the addresses on which this machine listens at ``port``."""
    addresses = []
    for file, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(file).read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                words = bytes.fromhex(address)  # words of four bytes in host order
                swapped = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.append(socket.inet_ntop(family, swapped))
    return addresses


def test_missing_secret_is_reported(port: int) -> None:
    first = Rendezvous(context(0, 2, port=port))
    assert "MEGATRON_LLAMA_SECRET is not set" in first.describe_security()
    second = Rendezvous(context(1, 2, port=port), secret=SECRET)
    assert "Messages carry an HMAC" in second.describe_security()


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1"])
def test_a_loopback_address_is_refused_on_every_node(address: str) -> None:
    for node in (0, 1):
        with pytest.raises(ConfigError, match=rf"(?s)MASTER_ADDR.*on\s+node\s+{node}"):
            check_first_address(context(node, address=address))
    check_first_address(context(0, 1, address))


def test_torchruns_nodes_may_share_a_machine() -> None:
    """If the store of the first agent answers, the loopback is valid."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        for node in (0, 1):
            check_first_address(replace(context(node, port=port), launcher="torchrun", has_store=True))
            with pytest.raises(ConfigError, match="resolves to the loopback"):
                check_first_address(context(node, port=port))
    with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
        check_first_address(replace(context(1, port=port), launcher="torchrun", has_store=True))


def test_the_first_node_may_know_its_own_name_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "addresses_of", lambda host: ["127.0.1.1"])
    check_first_address(context(0, address="head"))  # Debian's /etc/hosts
    with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
        check_first_address(context(1, address="head"))


def test_interfaces() -> None:
    assert environment.local_address_to("127.0.0.1") == "127.0.0.1"
    assert environment.interface_of("127.0.0.1") in ("lo", "lo0", None)
    assert environment.interface_of("203.0.113.7") is None, "an unused address"
    assert environment.is_loopback("localhost.localdomain") and not environment.is_loopback("n1.cluster")


# A lost store: one message with its address, and no C++ stack.

LOST = """
import os, signal
os.environ.update({variables})
from torch.distributed import TCPStore
from tests.processes import host_store
host, port = host_store()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
store = TCPStore("127.0.0.1", port, is_master=False)
os.kill(host, signal.SIGKILL)
os.waitpid(host, 0)
from megatron_llama.launch.rank import describe
def call():
    {call}
try:
    for _ in range(3):
        call()
except BaseException as error:
    report = describe(error)
    assert (report.kind, report.code, report.consequence) == ("error", 1, True), report
    print(report.text.replace(str(port), "PORT"))
"""
CALLS = {
    "torch's": "store.get('missing')",
    "ours": "from megatron_llama.launch import job_store; job_store.JobStore(lambda: store, '', '', 9).get('missing')",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_lost_store_is_one_message(name: str) -> None:
    program = LOST.format(variables=job_store.QUIET, call=CALLS[name])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    message = " ".join(done.stdout.split())
    assert message.startswith("Lost the rendezvous store at 127.0.0.1:PORT, through which"), done.stderr
    assert "(rank 0 or its launcher) has ended" in message and "run the same command" in message
    assert "frame #" not in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr


def test_only_errors_of_the_store_are_its_loss() -> None:
    assert job_store.describe_lost_store(RuntimeError("TCPStore")) is None
    assert job_store.describe_lost_store(None) is None
    waited = DistStoreError("wait timeout after 300000ms, keys: /default_pg/0/1")
    message = job_store.describe_lost_store(waited, "node1:29500")
    assert str(message).startswith("No message from another rank in the rendezvous store at node1:29500")
    assert is_peer_lost(waited)
