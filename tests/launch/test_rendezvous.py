"""Processes that find each other before the start, or report who is missing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore

from megatron_llama.config import ConfigError
from megatron_llama.launch import environment, job_store, rendezvous, run_dir
from megatron_llama.launch.environment import ProcessContext
from megatron_llama.launch.failure_cause import is_peer_lost
from megatron_llama.launch.job_store import JobStore, LaunchFailed, StoreLost
from megatron_llama.launch.rendezvous import NodeInfo, Rendezvous
from megatron_llama.system.signals import is_stopped
from megatron_llama.train.metrics_file import START, append_start_line, note_loaded_step
from tests.processes import PATIENCE_SECONDS, MakeLauncher, children, gone, host_store, run_command, state, wait_until
from tests.ranks import check_threads

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes are this machine: the loopback, which several nodes can't share, counts as an address here."""
    monkeypatch.setattr(rendezvous, "check_first_address", lambda context: None)
    monkeypatch.setattr(rendezvous, "_CHECK_SECONDS", 0.1)


check_first_address = rendezvous.check_first_address


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """An open port, on which process 0 hosts its store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def context(rank: int, world: int = 3, address: str = "127.0.0.1", port: int = 0, job: str = "7") -> ProcessContext:
    """Return the context of one of ``world`` processes on separate machines."""
    return ProcessContext("srun", rank, 0, 1, world, address, port, job, False, node=rank, nodes=world)


def info(rank: int, processes: int = 2, **more: Any) -> NodeInfo:
    """Return the report of one process."""
    return replace(rendezvous.node_info(context(rank, processes), rank, 1, 3), name=f"n{rank + 1}", **more)


def connect(
    port: socket.socket, rank: int, world: int = 2, secret: str = "", limit: float = PATIENCE_SECONDS, job: str = "7"
) -> Rendezvous:
    """Start a process; process 0 hosts the store."""
    place = context(rank, world, port=port.getsockname()[1], job=job)
    return Rendezvous(place, limit, secret, port.dup() if rank == 0 else None)


def start(port: socket.socket, rank: int, world: int = 3, counts: int | None = None) -> Rendezvous:
    """Start a process that has reported itself and counts ``counts`` ranks."""
    count = world if counts is None else counts
    process = connect(port, rank, count)
    process.report(rendezvous.node_info(context(rank, count), rank, 1, world))
    return process


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


def test_all_learn_the_run_folder(port: socket.socket) -> None:
    first, *others = [start(port, rank) for rank in range(3)]
    with socket.create_connection(port.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n")
        nodes = first.gather()
        assert [node.number for node in nodes] == [0, 1, 2]
        sent, *received = together(lambda: first.open(nodes, "runs/it's here"), *(other.wait for other in others))
    assert sent.run_dir == "runs/it's here" and received == [sent, sent]


def test_a_process_that_starts_before_process_0_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # refuses connections until it listens
        monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: late.listen())
        rendezvous.wait_until_reachable(context(1, port=late.getsockname()[1]), PATIENCE_SECONDS)


def test_unshared_run_folder_is_rejected(port: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "SHARED_LIMIT_SECONDS", 0.0)
    first, second = start(port, 0, 2), start(port, 1, 2)
    errors = together(lambda: first.open(first.gather(), str(tmp_path)), lambda: second.wait(run_dir.check_shared))
    for error in errors:
        assert isinstance(error, ConfigError) and error.problems[0].field == "run.dir", errors
        assert socket.gethostname() in error.problems[0].rule and "all nodes mount" in error.problems[0].instead
    with run_dir.claim_run_dir(tmp_path):
        assert run_dir.check_shared(str(tmp_path)) is None


def test_a_process_of_another_job_is_not_counted(port: socket.socket) -> None:
    first = connect(port, 0, limit=1.0)
    first.report(info(0))
    connect(port, 1, job="8").report(info(1))
    with pytest.raises(LaunchFailed, match="nodes 1 of 2 missing after 1 s; arrived: n1"):
        first.gather()


def test_missing_process_0_is_reported() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        number = bound.getsockname()[1]
        with pytest.raises(LaunchFailed, match=rf"node 2 .* cannot reach the first node at 127.0.0.1, port {number}"):
            Rendezvous(context(2, port=number), limit_seconds=0.5)


def test_end_of_process_0_ends_the_wait(port: socket.socket) -> None:
    first, other = connect(port, 0), connect(port, 1)
    other.report(info(1))
    del first  # and with it the store
    with pytest.raises(StoreLost):
        other.wait()


def test_process_0_that_does_not_start_is_reported(port: socket.socket) -> None:
    first, other = connect(port, 0), connect(port, 1, limit=0.5)
    other.report(info(1))
    with pytest.raises(LaunchFailed, match=r"process 0 did not start within 0\.5 s: it, or a process .* is stopped"):
        other.wait()
    del first


def test_two_processes_with_one_number_are_rejected(port: socket.socket) -> None:
    first, *others = [start(port, rank) for rank in (0, 1, 1)]
    errors = together(first.gather, *(other.wait for other in others))
    assert sum(isinstance(error, ConfigError) for error in errors) >= 2, errors
    assert f"process {os.getpid()} on" in str(errors[0]) and errors[0].problems[0].field == "RANK"


def test_a_late_process_with_a_taken_number_does_not_wait(port: socket.socket) -> None:
    first, second = start(port, 0, 2), start(port, 1, 2)
    together(lambda: first.open(first.gather(), "runs/x"), second.wait)
    with pytest.raises(ConfigError, match=r"two\s+processes\s+have\s+this\s+rank"):
        start(port, 1, 2).wait()


@pytest.mark.parametrize("counts", [2, 4])
def test_processes_with_different_world_sizes_do_not_wait(port: socket.socket, counts: int) -> None:
    first, second = start(port, 0), start(port, 1, counts=counts)
    for error in together(first.gather, second.wait):
        assert isinstance(error, ConfigError) and error.problems[0].field == "WORLD_SIZE", error


def test_reports_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    """torchrun keeps its store while agents come and go, and counts restarts on each agent alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(chosen: str) -> list[Any]:
        under_torchrun = partial(replace, launcher="torchrun", has_store=True, nodes=1)
        first, second = (Rendezvous(under_torchrun(context(rank, 2, port=store.port))) for rank in (0, 1))
        first.report(info(0))
        second.report(info(1))

        def begin() -> rendezvous.StartMessage:
            nodes = [replace(node, token="old") if node.number else node for node in first.gather()]
            return first.open(nodes, *first.agree_on_run_dir(chosen))  # like a report of an earlier attempt

        sent, received = together(begin, second.wait)
        assert sent == received, "the old report is replaced"
        first.board().post_note("")
        assert not second.board().post_note("")
        together(partial(first.board().gather, "rank 0 hangs"), partial(second.board().gather, "rank 1 too"))
        assert second.board().post_note("")
        return [sent.run_dir, sent.restarted, sent.attempt]

    append_start_line(tmp_path, {"event": START, "time": 1.0})
    note_loaded_step(tmp_path, 3)  # in an earlier launch
    attempts = [attempt(str(tmp_path)), attempt("runs/second")]  # the first ends before its line
    for loads in (False, True, False):
        append_start_line(tmp_path, {"event": START, "time": round(time.time(), 3)})
        if loads:
            note_loaded_step(tmp_path, 3)
        attempts.append(attempt("runs/next"))
    assert [each[:2] for each in attempts] == [[str(tmp_path), loaded] for loaded in (False, False, False, True, True)]
    assert len({each[2] for each in attempts}) == 5


def test_a_launcher_that_forks_ranks_hosts_the_store_in_a_process(launcher: MakeLauncher, tmp_path: Path) -> None:
    """Its ranks inherit no thread; the store survives the signals that the ranks answer by saving."""

    def host() -> int:
        with socket.create_server(("127.0.0.1", 0)) as port:
            first = Rendezvous(context(0, 2, port=port.getsockname()[1]), listener=port.dup(), forks=True)
            first.report(info(0))
            connect(port, 1).report(info(1))
        (store,) = [pid for pid in children(os.getpid()) if state(pid) not in "ZX"]
        (tmp_path / "store").write_text(str(store))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(store, number)
        assert [node.number for node in first.gather()] == [0, 1]
        check_threads()
        return 0

    launcher(host, status=0)
    assert gone(int((tmp_path / "store").read_text()))


def test_a_taken_port_is_rejected() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError, match="MASTER_PORT"):
        Rendezvous(context(0, port=taken.getsockname()[1]))


def stranger(port: socket.socket) -> Any:
    """Connect to the port without the job's secret."""
    return TCPStore("127.0.0.1", port.getsockname()[1], is_master=False)


def our_keys(store: Any, count: int = 1) -> set[str]:
    """The job's keys, once there are ``count``: a client of the store does not wait until what it sets has arrived."""

    def keys() -> set[str]:
        return {key for key in store.list_keys() if "megatron_llama/" in key}

    wait_until(lambda: len(keys()) >= count)
    return keys()


def test_without_the_secret_the_jobs_name_is_not_enough(port: socket.socket) -> None:
    first = connect(port, 0, secret=SECRET, job="4711")
    first.report(info(0))
    evil = stranger(port)
    (key,) = our_keys(evil)
    assert "4711" not in key and SECRET not in key and SECRET.encode() not in evil.get(key)
    connect(port, 1, secret=SECRET, job="4711").report(replace(info(1), name="good"))
    for secret in ("", "another"):
        connect(port, 1, secret=secret, job="4711").report(replace(info(1), name="evil"))
    assert [node.name for node in first.gather()] == ["n1", "good"]


def test_a_value_that_a_stranger_changes_or_moves_is_not_believed(port: socket.socket) -> None:
    first, other = (connect(port, rank, limit=0.5, secret=SECRET) for rank in (0, 1))
    first.report(info(0))
    evil = stranger(port)
    (local,) = our_keys(evil)
    other.report(info(1))
    (remote,) = our_keys(evil, 2) - {local}
    good = evil.get(remote)
    for changed in (b"{}", b"0" * 64 + b"{}", good[:-1] + b" ", evil.get(local)):  # the last: another's report
        evil.set(remote, changed.decode())
        with pytest.raises(LaunchFailed, match="nodes 1 of 2.*reports without this job's MEGATRON_LLAMA_SECRET"):
            first.gather()
    evil.set(remote, good.decode())
    assert len(first.gather()) == 2


@pytest.mark.parametrize("report", ["", "[" * 100_000, '{"number": 1}', "null", "7" * 5000])
def test_without_a_secret_an_invalid_report_is_a_missing_rank(port: socket.socket, report: str) -> None:
    first = connect(port, 0, limit=0.5)
    first.report(info(0))
    evil = stranger(port)
    (local,) = our_keys(evil)
    evil.set(f"{local[:-1]}1", report)
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


def test_a_port_of_another_program_is_reported(launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(job_store, "ANSWER_SECONDS", 1.0)

    def join(how: str) -> None:
        with another_program(how) as listener:
            Rendezvous(context(1, port=listener.getsockname()[1]), limit_seconds=2.0).report(info(1))

    def join_each() -> int:
        kinds = ("silent", "drips", "nonsense", "does not stop", "hangs up")
        errors = together(*(partial(join, how) for how in kinds))
        for how, error in zip(kinds, errors, strict=True):
            assert isinstance(error, LaunchFailed) and "does not belong to process 0" in str(error), (how, error)
        return 0

    launcher(join_each, status=0)  # torch's client tries to connect for minutes, in a thread


def test_stopped_store_host_raises_store_lost(launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_store_host() -> int:
        host, port = host_store()
        try:
            here = JobStore(lambda: TCPStore("127.0.0.1", port, is_master=False), "job", "", PATIENCE_SECONDS)
            here.set("a", "1")
            assert here.get("a") == "1" and here.get("b") is None
            assert here.wait("b", 0.2) is None, "a timeout is an answer"
            os.kill(host, signal.SIGSTOP)
            wait_until(lambda: is_stopped(host))
            monkeypatch.setattr(job_store, "ANSWER_SECONDS", 0.3)
            for call in (partial(here.get, "a"), partial(here.wait, "b", 0.3), here.clone):
                with pytest.raises(StoreLost, match="did not answer within"):
                    call()
            return 0
        finally:
            os.kill(host, signal.SIGKILL)
            os.waitpid(host, 0)

    launcher(stop_store_host, status=0)  # calls of a stopped store stay in their threads


def test_hostile_connections_keep_no_process_out(port: socket.socket) -> None:
    first = connect(port, 0, secret=SECRET)
    first.report(info(0))
    # torch's protocol: a greeting, then SET, the length of a key, the key, the length of a value, the value.
    greeting, before = b"\x00" + struct.pack("<I", 0x3C85F7CE), memory_mib()
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(socket.create_connection(port.getsockname())) for _ in range(20)]
        dripping, huge, garbage = silent[:3]
        dripping.sendall(greeting + b"\x01" + b"\x01" * 5)  # the first bytes of a length
        garbage.sendall(bytes(range(256)) * 400)
        huge.sendall(greeting + b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 8 << 30))
        with contextlib.suppress(OSError):  # the store hangs up at once
            for _ in range(200):
                huge.sendall(b"x" * (1 << 20))
        connect(port, 1, secret=SECRET).report(info(1))
        assert [node.number for node in first.gather()] == [0, 1]
        assert memory_mib() - before < 100, "8 GiB were announced, and 200 MiB offered"


def memory_mib() -> float:
    """Return the MiB of memory of this process, which includes the store."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    ("address", "nodes", "expected"),
    [
        ("127.0.0.2", 2, "127.0.0.2"),  # one of several interfaces
        ("127.0.1.1", 2, "all"),  # a name that is the loopback on the first node alone
        ("203.0.113.7", 2, "all"),  # a router before it
        ("127.0.1.1", 1, "127.0.1.1"),
    ],
)
def test_address_of_process_0(address: str, nodes: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_loopback", lambda host: host == "127.0.1.1")
    with rendezvous.listen(replace(context(0, 2, address), nodes=nodes)) as listener:
        host = listener.getsockname()[0]
        assert (host if host not in ("::", "0.0.0.0") else "all") == expected


def test_address_and_authentication_are_described(port: socket.socket) -> None:
    first = connect(port, 0)
    assert first.describe_security().startswith("Process 0 listens on 127.0.0.1. MEGATRON_LLAMA_SECRET is not set")
    assert connect(port, 1, secret=SECRET).describe_security().startswith("Messages carry an HMAC")
    with socket.create_server(("", 0)) as everywhere:
        assert connect(everywhere, 0).describe_security().startswith("Process 0 listens on all addresses.")


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1"])
def test_a_loopback_address_is_rejected_on_every_node(address: str) -> None:
    for node in (0, 1):
        with pytest.raises(ConfigError, match=rf"(?s)MASTER_ADDR.*on\s+node\s+{node}"):
            check_first_address(context(node, address=address))
    check_first_address(context(0, 1, address))


def test_a_loopback_address_is_valid_for_torchruns_nodes_on_one_machine(port: socket.socket) -> None:
    """If the store of the first agent answers, the loopback is valid."""
    for node in (0, 1):
        place = context(node, port=port.getsockname()[1])
        check_first_address(replace(place, launcher="torchrun", has_store=True))
        with pytest.raises(ConfigError, match="resolves to the loopback"):
            check_first_address(place)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        place = replace(context(1, port=bound.getsockname()[1]), launcher="torchrun", has_store=True)
        with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
            check_first_address(place)


def test_the_first_node_may_resolve_its_own_name_to_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "addresses_of", lambda host: ["127.0.1.1"])
    check_first_address(context(0, address="head"))  # Debian's /etc/hosts
    with pytest.raises(ConfigError, match=r"on\s+node\s+1"):
        check_first_address(context(1, address="head"))


def test_nodes_with_different_rank_counts_are_named() -> None:
    with pytest.raises(LaunchFailed, match=r"n3 has 7 ranks \(world size 21\), n1 has 1 \(world size 3\)"):
        rendezvous.check_consistent([info(0), info(1), info(2, ranks=7, world_size=21)])


def test_the_table_of_nodes() -> None:
    two = [
        info(0, first_rank=0, ranks=4, address="10.0.0.1", interface="ib0"),
        info(1, first_rank=4, ranks=4, address="10.0.0.2", interface=None),
    ]
    assert rendezvous.node_table(two, context(0, 2, "n1", 15070)).splitlines() == [
        "node  name  ranks  address   interface",
        "0     n1    0-3    10.0.0.1  ib0",
        "1     n2    4-7    10.0.0.2  unknown",
        "Rendezvous at n1, port 15070.",
    ]


def test_interfaces() -> None:
    assert environment.local_address_to("127.0.0.1") == "127.0.0.1"
    assert environment.interface_of("127.0.0.1") in ("lo", "lo0", None)
    assert environment.interface_of("203.0.113.7") is None, "an unused address"
    assert environment.is_loopback("localhost.localdomain") and not environment.is_loopback("n1.cluster")


# A lost store: one message with its address, and no C++ stack.

LOST = """
import os, signal
from megatron_llama.launch import job_store
os.environ.update(job_store.QUIET)
from torch.distributed import TCPStore
from tests.processes import host_store
host, port = host_store()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
store = TCPStore("127.0.0.1", port, is_master=False)
os.kill(host, signal.SIGKILL)
os.waitpid(host, 0)
from megatron_llama.launch.failure_cause import describe
for get in (store.get, job_store.JobStore(lambda: store, "", "", 9).get):
    try:
        for _ in range(3):
            get("missing")
    except BaseException as error:
        report = describe(error)
        assert (report.code, report.consequence) == (1, True), report
        print(report.text.replace(str(port), "PORT"), end="END")
"""


def test_a_lost_store_is_one_message() -> None:
    """Only errors of the store are its loss."""
    done = run_command(sys.executable, "-c", LOST)
    *messages, end = " ".join(done.stdout.split()).split("END")
    assert len(messages) == 2 and not end, done.stderr
    for message in messages:
        assert message.startswith("Lost the rendezvous store at 127.0.0.1:PORT, through which"), done.stderr
        assert "(rank 0 or its launcher) has ended" in message and "run the same command" in message
    assert "frame #" not in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr
    assert job_store.describe_lost_store(RuntimeError("TCPStore")) is None
    assert job_store.describe_lost_store(None) is None
    waited = DistStoreError("wait timeout after 300000ms, keys: /default_pg/0/1")
    message = job_store.describe_lost_store(waited, "node1:29500")
    assert str(message).startswith("No message from another rank in the rendezvous store at node1:29500")
    assert is_peer_lost(waited)
