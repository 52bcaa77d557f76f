"""A rank without progress ends the job and is reported as the culprit, in any phase."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch.distributed as dist

from megatron_llama.devices.cuda import flight_recorder
from megatron_llama.launch import job_store, start, watchdog
from megatron_llama.launch.job_store import Board, JobStore
from megatron_llama.launch.start import LocalRanks, Rank, start_ranks
from megatron_llama.launch.watchdog import Hang, Watchdog, watch_this_process
from megatron_llama.parallel.compiling import may_compile
from megatron_llama.plan import resolve
from megatron_llama.system import phase
from megatron_llama.system.phase import Phase, PhaseFile
from megatron_llama.system.signals import is_stopped
from tests.config.helpers import make
from tests.golden import GoldenFiles
from tests.processes import (
    PATIENCE_SECONDS,
    Launcher,
    MakeLauncher,
    announce,
    hasten,
    host_store,
    pids,
    plan_of,
    rank,
    wait_until,
    without_plan,
)


class Simulated:
    """A simulated rank whose phase the test sets."""

    def __init__(
        self, number: int, step: int = 1, *, stopped: bool = False, answers: bool = True, ended: bool = False
    ) -> None:
        self.number, self.stopped, self.answers, self.ended = number, stopped, answers, ended
        self.phase, self.awaited = Phase(step, f"step {step}"), ""

    def enter(self, name: str, patience: float = 1.0) -> None:
        self.phase = Phase(self.phase.number + 1, name, patience)

    def request_stacks(self) -> None:
        pass

    def stacks(self) -> str:
        return f"in the stack of {self.number}" if self.answers and not self.stopped else ""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(watchdog, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def report_of(watch: Watchdog, seconds: float) -> str:
    """Return the watchdog's report within ``seconds``; empty if there is none."""
    try:
        for _ in range(round(seconds)):
            watch.wait(1.0)
    except Hang as hang:
        return str(hang)
    return ""


def test_limit_of_phases_and_patient_phases(clock: Clock) -> None:
    one = Simulated(0)
    watch = Watchdog([one], 1, 10.0)
    assert not report_of(watch, 9)
    one.enter("step 2")
    assert not report_of(watch, 9), "a new phase has its own time"
    one.enter("compiling", phase.PATIENT)
    assert not report_of(watch, 79)
    one.enter("compiling ahead", phase.UNWATCHED)
    assert not report_of(watch, 100_000)
    one.enter("step 3")
    assert report_of(watch, 12).endswith("Rank 0 of 1 failed: no progress for 11 s in step 3; it runs")
    assert not report_of(Watchdog([one], 1, None), 100_000), "None: no limit"


def test_long_phases_before_the_second_step_are_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    one = Simulated(0)
    watch = Watchdog([Simulated(1), one], 2, None)
    for name in ("building the model", "loading", "step 1", "step 2"):
        one.enter(name)
        watch.wait(1.0)
        watch.wait(8.0 if name == "loading" else 30.0)
        watch.wait(4.0)
        watch.wait(60.0)
    shown = [line.rpartition(", ")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["rank 0: building the model", "rank 0: loading", "rank 0: step 1"]


def test_suspended_job_is_no_hang(clock: Clock) -> None:
    watch = Watchdog([Simulated(0)], 1, 60.0)
    assert not report_of(watch, 2)
    clock.now += 86400  # Ctrl-Z suspends ranks and watchdog
    assert not report_of(watch, 50)
    assert report_of(watch, 10)


def test_reports(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog.socket, "gethostname", lambda: "n1")
    waits, waits_too = Simulated(0, 2), Simulated(1, 2)
    waits.awaited, waits_too.awaited = "dp reduce_scatter", "dp all_gather"
    situations = {
        "rank 1 is stopped": [Simulated(0, 2), Simulated(1, stopped=True), Simulated(2, 2)],
        "rank 1 writes no stack": [Simulated(0), Simulated(1, answers=False)],
        "rank 1 is behind": [Simulated(0, 2), Simulated(1)],
        "rank 0 waits for rank 1 in a collective": [waits, Simulated(1)],
        "both are in one step": [Simulated(0, 2), Simulated(1, 2)],
        "both wait in a collective": [waits, waits_too],
        "rank 0 has ended": [Simulated(0, ended=True), Simulated(1)],
    }
    pages = [f"== {name}\n{report_of(Watchdog(ranks, len(ranks), 10.0), 30)}" for name, ranks in situations.items()]
    states = [watchdog.RankState(rank, 1 + (rank != 1), "step 7", 9.0, host=f"n{rank}") for rank in range(3)]
    pages.append(f"== three hosts\n{watchdog.describe(states, 3)}")
    GoldenFiles.check("launch/hangs.txt", "\n\n".join(pages))


# Real processes with SIGSTOP. The watchdog's clock does not advance until the rank is stopped.


def stop_in(name: str, folder: Path) -> None:
    """Stop rank 1 in a phase; the other rank waits for it in the next phase."""
    for each in ("importing the program", "meeting the other ranks", "loading", "step 1", "exporting"):
        if each != "importing the program":
            phase.enter(each, phase.PATIENT)
        if each == name:
            announce(folder)
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            break
    phase.enter("what follows")
    phase.wait_for("tp all_reduce")
    time.sleep(600)


def watched(work: Callable[[], None], ranks: int = 2) -> Callable[[], int]:
    """Return a launcher with a limit of 1000 s per phase."""
    return partial(start_ranks, plan_of(ranks), partial(without_plan, work), LocalRanks(ranks, hang_seconds=1000.0))


def until_stopped(folder: Path, number: int, ranks: int = 2) -> None:
    """Let the watchdog's clock advance when the rank is stopped."""
    pid = pids(folder, ranks)[number]
    wait_until(lambda: is_stopped(pid))
    (folder / "hasten").touch()


@pytest.mark.parametrize("name", ["importing the program", "meeting the other ranks", "step 1", "exporting"])
def test_a_stopped_rank(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hasten(monkeypatch, tmp_path / "hasten")
    job = launcher(watched(partial(stop_in, name, tmp_path)))
    until_stopped(tmp_path, 1)
    assert job.wait() == 1
    assert job.last_line.startswith("Rank 1 of 2 failed: no progress for ")
    assert f"in {name}; it is stopped" in job.last_line
    assert job.last_line.endswith("; others wait for it in tp all_reduce"), "read from the phase file"
    assert "Stacks of rank 0" in job.errors and "in stop_in" in job.errors
    assert "Stacks of rank 1" not in job.errors


def test_a_rank_stopped_at_its_start(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch, tmp_path / "hasten")
    run = start.run_assignment

    def stopped_at_once(assignment: start.Assignment, *rest: Any) -> None:
        os.environ["RANK"] = str(assignment.rank)
        announce(tmp_path)
        if assignment.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        run(assignment, *rest)

    monkeypatch.setattr(start, "run_assignment", stopped_at_once)
    job = launcher(watched(partial(time.sleep, 600)))
    until_stopped(tmp_path, 1)
    assert job.wait() == 1
    assert job.last_line.startswith("Rank 1 of 2 failed") and "in the start of its process" in job.last_line


def test_stacks_under_a_held_gil(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch, tmp_path / "hasten")

    def hold() -> None:
        phase.enter("step 1")
        announce(tmp_path)
        max(itertools.repeat(0))  # an endless loop in C: no other thread and no signal handler runs

    job = launcher(watched(hold, ranks=1))
    pids(tmp_path, 1)
    (tmp_path / "hasten").touch()
    assert job.wait() == 1
    assert "in hold" in job.errors and job.last_line.endswith("in step 1; it runs")


# Ranks of torchrun or srun: each watches itself and uses a common store.


def one_of_three(number: int, port: int, folder: Path, listener: socket.socket | None) -> int:
    """Run a rank that watches itself; the victim stops itself. Rank 0 hosts the store on a ``listener``."""
    os.environ["RANK"] = str(number)
    connect = partial(dist.TCPStore, "127.0.0.1", port, is_master=False)
    if listener is not None and number == 0:
        file = os.dup(listener.fileno())
        connect = partial(connect, is_master=True, wait_for_workers=False, master_listen_fd=file)
    phase.enter("step 7")
    store = JobStore(connect, "job", "secret", PATIENCE_SECONDS)
    the_board = Board(store, number, 3, "rank 0's")
    (folder / f"up{number}").touch()
    while len(list(folder.glob("up*"))) < 3:
        time.sleep(0.01)
    the_board.post_note(watchdog._to_json([watchdog.RankState(number, 1, "step 7", None)]))
    announce(folder)
    if number == int((folder / "victim").read_text()):
        os.kill(os.getpid(), signal.SIGSTOP)
    pids(folder, 3)
    watch_this_process(number, 3, 1000.0, the_board)
    time.sleep(600)
    return 0


@pytest.mark.parametrize(
    ("victim", "host"),
    [pytest.param(1, False, marks=pytest.mark.slow), (0, True)],
    ids=["a rank", "the host of the store"],
)
def test_ranks_that_watch_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, host: bool) -> None:
    hasten(monkeypatch, tmp_path / "hasten")
    monkeypatch.setattr(job_store, "ANSWER_SECONDS", 2.0 if host else PATIENCE_SECONDS)
    monkeypatch.setattr(job_store, "_GATHER_SECONDS", 5.0)
    (tmp_path / "victim").write_text(str(victim))
    listener = socket.create_server(("127.0.0.1", 0)) if host else None
    store, port = (0, listener.getsockname()[1]) if listener is not None else host_store()
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    ranks = [Launcher(partial(one_of_three, n, port, tmp_path, listener), folders[n]) for n in range(3)]
    try:
        until_stopped(tmp_path, victim, 3)
        others = [rank for number, rank in enumerate(ranks) if number != victim]
        assert [rank.wait() for rank in others] == [1, 1]
        output = [rank.errors for rank in others]
        if host:
            assert all("does not answer" in text.splitlines()[-1] and "rank 0's" in text for text in output)
            return
        (full,) = [text for text in output if "See another rank's report" not in text]
        assert full.rstrip().splitlines()[-1] == f"Rank 1 of 3 failed: no progress in step 7; {watchdog._LAST_HEARD}"
        assert "Stacks of rank 0" in full and "Stacks of rank 2" in full
    finally:
        for rank in ranks:
            rank.kill()
        if listener is not None:
            listener.close()
        else:
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)


def test_new_graphs_come_in_the_first_steps_and_the_first_validations() -> None:
    plan = resolve(make(**{"trainer.val_every_steps": 5}), 1)
    assert [step for step in range(3, 40) if may_compile(plan, step, 3)] == [3, 4, 5, 10]


def test_reading_stacks_does_not_disturb_the_writer() -> None:
    """A rank shares the file position with its launcher; a seek by the launcher would overwrite lines."""
    file: IO[bytes] = tempfile.TemporaryFile()
    lines = [f"line {number}\n" for number in range(5_000)]

    def write() -> None:
        for line in lines:
            os.write(file.fileno(), line.encode())

    writer = threading.Thread(target=write)
    rank = Rank(0, os.getpid(), file, file, PhaseFile(), None)
    writer.start()
    while writer.is_alive():
        rank.stacks()
    assert rank.stacks() == "".join(lines).strip()


def test_recorder_has_the_names_of_torch_and_executes_nothing() -> None:
    # Older names make torch warn on each rank.
    names = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
    variables = flight_recorder.recorder_environment()
    assert set(variables) == names and variables == flight_recorder.recorder_environment()
    folder = Path(variables["TORCH_FR_DUMP_TEMP_FILE"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700, "other users cannot read or replace the dumps"
    file = Path(f"{flight_recorder.recorder_environment()['TORCH_FR_DUMP_TEMP_FILE']}7")
    try:
        file.write_bytes(pickle.dumps({"entries": [Path("a")]}))
        assert flight_recorder.collectives(7) == ""
    finally:
        file.unlink()


class FakeRecorder(threading.Thread):
    """Imitates the monitoring thread of NCCL's process group: dumps the ring to a file on a write to its pipe."""

    def __init__(self, number: int, entries: list[dict[str, object]]) -> None:
        super().__init__(daemon=True)
        environment = flight_recorder.recorder_environment()
        assert int(environment["TORCH_FR_BUFFER_SIZE"]) > 0, "0 disables the pipe"
        self.file = Path(f"{environment['TORCH_FR_DUMP_TEMP_FILE']}{number}")
        self.content = pickle.dumps({"version": "2.10", "entries": entries}, protocol=2)
        pipe = f"{environment['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{number}.pipe"
        os.mkfifo(pipe)
        self.pipe = os.open(pipe, os.O_RDWR)  # opens without a writer, and a read waits for one

    def run(self) -> None:
        os.read(self.pipe, 128)
        self.file.write_bytes(self.content)
        os.close(self.pipe)


def recorded(name: str, number: int, state: str) -> dict[str, object]:
    group = {"process_group": ("1", "tensor-parallel"), "is_p2p": False, "p2p_seq_id": 0}
    return {**group, "profiling_name": name, "collective_seq_id": number, "input_sizes": [[4, 8]], "state": state}


def test_report_has_recorded_collectives(tmp_path: Path) -> None:
    ring = [recorded("nccl:all_reduce", number, "completed") for number in (1, 2)]
    ring += [recorded("nccl:_all_gather_base", 3, "started")]
    recorder = FakeRecorder(0, ring)
    recorder.start()
    ranks = [Simulated(0), Simulated(1)]
    states = Watchdog(ranks, 2, 10.0)._collect_states(ranks)
    report = watchdog.describe(states, 2)
    assert "nccl:_all_gather_base 3 in group tensor-parallel, of [[4, 8]]: started" in report
    assert "nccl:all_reduce 2 in group" in report and "all_reduce 1" not in report, "only the last finished one"
    assert "in the stack of 0" in report and not recorder.file.exists()
    assert "collectives" not in states[1].stacks, "it has no recorder"
