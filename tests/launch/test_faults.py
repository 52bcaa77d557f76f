"""Failures of ranks and launchers."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.devices import get_device
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.launch import start
from megatron_llama.launch.failure_cause import describe, is_peer_lost
from megatron_llama.launch.rank import load_entry, run_as_rank
from megatron_llama.launch.run_dir import rank_outputs
from megatron_llama.launch.start import LocalRanks, start_ranks
from megatron_llama.launch.supervise import Grace
from megatron_llama.parallel import process_groups
from megatron_llama.plan import Plan
from megatron_llama.system.errors import LaunchFailed, MachineError
from tests.data.files import data_plan, numbered, write_indexed
from tests.processes import (
    PATIENCE_SECONDS,
    MakeLauncher,
    announce,
    gone,
    parent,
    pids,
    plan_of,
    rank,
    save_and_leave,
    without_plan,
)


def run(work: Callable[[Path], None], folder: Path, ranks: int = 4, fork: bool = True) -> Callable[[], int]:
    """Return a launcher that runs ``work`` on ``ranks`` ranks."""

    def start() -> int:
        Cpu.forkable = fork  # in this process alone
        return start_ranks(plan_of(ranks), partial(without_plan, partial(work, folder)))

    return start


def sleep_long(folder: Path) -> None:
    announce(folder)
    time.sleep(600)


def join_world() -> None:
    """Connects the ranks by gloo, through the store that the launcher hosts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def reduce_once(folder: Path) -> None:
    """A real collective; writes what came out."""
    join_world()
    total = torch.tensor([float(rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    (folder / f"total{rank()}").write_text(str(total.item()))


def test_import_path_of_a_spawned_rank(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start: Python imports sitecustomize before a rank's own code runs."""
    (tmp_path / "megatron_llama.py").write_text("raise ImportError('a file in the current folder')")
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "path"), *sys.path])
    launcher(run(reduce_once, tmp_path, ranks=2, fork=False), status=0)
    assert (tmp_path / "imported").exists()
    assert [float(path.read_text()) for path in tmp_path.glob("total*")] == [3.0, 3.0]


def test_an_entry_may_be_a_name(launcher: MakeLauncher, tmp_path: Path) -> None:
    assert load_entry("tests.launch.test_faults:join_world") is join_world
    job = launcher(lambda: start_ranks(plan_of(1), "tests.launch.no_such_file:entry"), status=1)
    assert job.last_line == "ModuleNotFoundError: No module named 'tests.launch.no_such_file'"


def fail_on_one(folder: Path) -> None:
    """Rank 1 fails; the others wait for it in a collective and notice that it has gone."""
    join_world()
    announce(folder)
    try:
        dist.barrier()  # all are connected: who goes now is missed by the others
        if rank() == 1:
            raise ZeroDivisionError("the weights of rank one")
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        (folder / f"lost{rank()}").write_text(str(error))
        raise


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that waits for the other ranks' reports as long as it takes; they end by themselves."""
    monkeypatch.setattr(start, "GRACE", Grace(PATIENCE_SECONDS, PATIENCE_SECONDS, PATIENCE_SECONDS))


def test_the_first_failure_has_the_last_word(launcher: MakeLauncher, tmp_path: Path, patient: None) -> None:
    job = launcher(run(fail_on_one, tmp_path), status=1)
    assert job.last_line == "ZeroDivisionError: the weights of rank one"
    assert job.errors.count("Traceback (most recent call last)") == 1, "the other ranks' errors are consequences"
    assert "Rank 1 of 4 failed" in job.errors and "fail_on_one" in job.errors
    # Not by luck: others did fail, by errors that are recognised as consequences.
    lost = [path.read_text() for path in tmp_path.glob("lost*")]
    assert lost and all(is_peer_lost(RuntimeError(text)) for text in lost), lost


def fail_while_destroying_waits(folder: Path) -> None:
    """Destroying the groups waits, as with NCCL, for rank 0, which waits in a collective for rank 1."""
    device, plan = get_device("cpu"), plan_of(2)
    device.enter(rank(), 2)
    dist.destroy_process_group = lambda: time.sleep(600)
    with process_groups(plan, plan.topology(rank()), device, torch.device("cpu")):
        announce(folder)
        dist.barrier()
        if rank() == 1:
            raise torch.OutOfMemoryError("of rank one")
        time.sleep(600)


def fail_late_to_say_so(folder: Path) -> None:
    """The cause is slower to report than its consequence, as when it cleans up on its way out."""
    if rank() == 0:
        announce(folder)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    wait_for_end(folder)
    raise ValueError("the cause")


def fail_while_others_leave(folder: Path) -> None:
    if rank() == 0:
        announce(folder)
        sys.exit(75)
    wait_for_end(folder)
    raise OSError("disk full while saving")


def wait_for_end(folder: Path) -> None:
    """Wait until the launcher has seen the end of rank 0."""
    (first,) = pids(folder, 1)
    while parent(first) == os.getppid():  # on a busy host another process soon has the pid
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_consequence_reported_first_is_not_the_cause(launcher: MakeLauncher, tmp_path: Path, patient: None) -> None:
    job = launcher(run(fail_late_to_say_so, tmp_path, ranks=2), status=1)
    assert job.last_line == "ValueError: the cause"


def _from(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_message"),
    [
        (_from(MachineError("step 2 could not be written (No space left on device)"), OSError(28, "No space")), True),
        (_from(MachineError("step 2 could not be written (TypeError)"), TypeError("of the program")), False),
        (OSError(28, "No space left on device", "/run/metrics.jsonl"), True),
        (PermissionError(13, "Permission denied", "/other/run"), True),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), True),
        (OSError(28, "No space left on device"), False),  # where, only the traceback says
        (FileNotFoundError(2, "No such file", "/run/step"), False),
        (FileNotFoundError(2, "No such file"), False),  # such as a deleted current folder
    ],
)
def test_what_a_disk_did_is_no_traceback(error: Exception, is_message: bool) -> None:
    reported = describe(error)
    assert reported.code == 1 and ("Traceback" in reported.text or "Error" in reported.text) != is_message
    assert (error.strerror if isinstance(error, OSError) else str(error)) in reported.text


def lose_peer(folder: Path) -> None:
    raise RuntimeError("[gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:6001")


def test_srun_ranks_name_a_lost_peer(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_llama.launch.rank.CONSEQUENCE_DELAY_SECONDS", 0.0)
    job = launcher(lambda: run_as_rank(plan_of(1), 3, partial(without_plan, partial(lose_peer, tmp_path))), status=1)
    assert "Traceback" not in job.errors
    message = " ".join(job.errors.split())
    assert "Rank 3 lost its connection to another rank" in message and "closed by peer [10.0.0.2]:6001" in message


def test_an_output_that_can_not_be_deleted_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with rank_outputs(tmp_path, range(2)) as folder:
        (folder / "rank_00001.txt").touch()
        monkeypatch.setattr(Path, "unlink", read_only)


KILLED = "rank 1 was killed by SIGKILL (the system may be out of memory)"


def end_early(end: Callable[[], object], folder: Path) -> None:
    """Rank 1 ends; the others wait."""
    if rank() == 1:
        end()
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "last_line"),
    [
        # As some libraries do on a fatal error.
        (partial(end_early, partial(os._exit, 0)), "rank 1 exited with status 0 before the end of its work"),
        (partial(end_early, partial(sys.exit, "no more data")), "SystemExit: no more data"),
        (partial(end_early, partial(ctypes.string_at, 0)), "rank 1 was killed by SIGSEGV"),
        (partial(end_early, lambda: os.kill(os.getpid(), 9)), KILLED),
        (fail_while_destroying_waits, "torch.OutOfMemoryError: of rank one"),
        (fail_while_others_leave, "OSError: disk full while saving"),  # 75 needs all ranks
    ],
    ids=["exit", "SystemExit", "crash", "kill", "others wait", "others leave"],
)
def test_a_failing_rank_takes_all_down(
    launcher: MakeLauncher, tmp_path: Path, work: Callable[[Path], None], last_line: str
) -> None:
    job = launcher(run(work, tmp_path, ranks=2), status=1)
    assert job.last_line == last_line and "Rank 1 of 2 failed" in job.errors
    if "SIGSEGV" in last_line:
        assert "in end_early" in job.errors, "the Python stack of a crash is shown"


def fail_alone(folder: Path) -> None:
    raise ZeroDivisionError("the only rank")


def test_a_failure_of_a_spawned_rank_is_reported(launcher: MakeLauncher, tmp_path: Path) -> None:
    job = launcher(run(fail_alone, tmp_path, ranks=1, fork=False), status=1)
    assert job.last_line == "ZeroDivisionError: the only rank" and "Rank 0 of 1 failed" in job.errors


@pytest.mark.parametrize("fork", [True, False], ids=["fork", "spawn"])
def test_ranks_die_with_a_killed_launcher(launcher: MakeLauncher, tmp_path: Path, fork: bool) -> None:
    count = 2 if fork else 1
    job = launcher(run(sleep_long, tmp_path, count, fork))
    ranks = pids(tmp_path, count)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_signals_are_forwarded_and_75_returned(launcher: MakeLauncher, tmp_path: Path, number: signal.Signals) -> None:
    job = launcher(run(save_and_leave, tmp_path, ranks=2))
    pids(tmp_path, 2)
    os.kill(job.pid, number)
    assert job.wait() == 75, job.errors
    assert {path.read_text() for path in tmp_path.glob("told*")} == {number.name}
    assert job.errors == ""


def interrupted(folder: Path) -> None:
    """Rank 1 does not listen, as in a collective."""
    if rank() == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    announce(folder)
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_signal_ends_all_with_one_line(launcher: MakeLauncher, tmp_path: Path, number: signal.Signals) -> None:
    job = launcher(run(interrupted, tmp_path, ranks=2))
    ranks = pids(tmp_path, 2)
    os.kill(job.pid, number)
    assert job.wait() == 128 + number
    assert job.errors == f"Stopped by {number.name}.\n"
    assert all(gone(pid) for pid in ranks)


def clean_up(folder: Path) -> None:
    """Rank 1 closes its files after the launcher has seen the end of rank 0."""
    try:
        announce(folder)
        time.sleep(600)
    finally:
        if rank() == 1:
            wait_for_end(folder)
            (folder / "cleaned").touch()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_interrupted_ranks_may_close_their_files(launcher: MakeLauncher, tmp_path: Path, patient: None) -> None:
    job = launcher(run(clean_up, tmp_path, ranks=2))
    pids(tmp_path, 2)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait() == 130
    assert (tmp_path / "cleaned").exists(), job.errors


def talk(folder: Path) -> None:
    os.write(1, f"words of rank {rank()}\n".encode())


def test_only_rank_0_has_the_terminal(launcher: MakeLauncher, tmp_path: Path) -> None:
    outputs = tmp_path / "ranks"
    outputs.mkdir()
    job = launcher(
        partial(
            start_ranks, plan_of(3), partial(without_plan, partial(talk, tmp_path)), LocalRanks(3, output_dir=outputs)
        )
    )
    assert job.wait() == 0
    assert job.out.read_text() == "words of rank 0\n"
    assert [path.read_text() for path in sorted(outputs.iterdir())] == ["words of rank 1\n", "words of rank 2\n"]


def test_no_store_ends_the_ranks(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        pids(tmp_path, 2)
        raise RuntimeError("no thread\nException raised from listen (most recent call first):\nframe #0")

    monkeypatch.setattr(dist, "TCPStore", fail)

    def start() -> int:
        try:
            return run(sleep_long, tmp_path, ranks=2)()
        except LaunchFailed as error:
            (tmp_path / "message").write_text(str(error))
            return 1

    launcher(start, status=1)
    message = (tmp_path / "message").read_text()
    assert message.startswith("cannot host the rendezvous store on 127.0.0.1:") and message.endswith(": no thread")
    assert all(gone(pid) for pid in pids(tmp_path, 2))


def read_shrunk(part: str, plan: Plan) -> None:
    """Read a dataset whose file another process truncates."""
    (prefix,) = plan.config.data.prefixes
    dataset = IndexedDataset(str(prefix))
    os.truncate(f"{prefix}{part}", 0)
    int(dataset.tokens[-1]) + int(dataset.index.lengths[-1])


@pytest.mark.parametrize("part", [".bin", ".idx"])
def test_a_dataset_that_shrinks_is_named(launcher: MakeLauncher, tmp_path: Path, part: str) -> None:
    plan = data_plan([write_indexed(tmp_path / "set", numbered(900))])
    job = launcher(lambda: start_ranks(plan, partial(read_shrunk, part)), status=1)
    report = " ".join(job.errors.split())
    assert "rank 0 was killed by SIGBUS A data file has changed during the run:" in report
    assert f"{tmp_path / 'set'}{part}" in report
