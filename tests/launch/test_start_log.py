"""starts.jsonl: each start and end with its reason, under all launchers; a damaged file does not disturb a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.warm  # noqa: F401  before the first fork
from megatron_llama import cli
from megatron_llama.config import ConfigError, Problem, stored_settings
from megatron_llama.launch import rank
from megatron_llama.launch import start as start_module
from megatron_llama.launch.failure_cause import Report
from megatron_llama.launch.rank import run_as_rank
from megatron_llama.launch.start import run_here
from megatron_llama.launch.start_log import RESTART_COUNTS, STARTS_FILE, Start, log_end, log_start, read_starts
from megatron_llama.launch.supervise import with_restarts
from megatron_llama.plan import Plan
from megatron_llama.system.files import write_atomically
from megatron_llama.system.phase import PhaseFile
from megatron_llama.train.metrics_file import note_loaded_step
from tests.processes import MakeLauncher, plan_of, run_train_py, save_and_leave, wait_until, without_plan
from tests.ranks import check_threads, foreign_threads

TINY = ("data=mock", "device=cpu", "data.seq_length=16", "trainer.steps=2", "device.peak_tflops=0.01")


def plan_in(folder: Path, ranks: int = 1, restarts: int = 0) -> Plan:
    plan = plan_of(ranks)
    plan.config.run.dir, plan.config.trainer.max_restarts = str(folder), restarts
    return plan


def only(folder: Path) -> Start:
    """Return the only start of a run."""
    (start,), invalid = read_starts(folder)
    assert not invalid
    return start


def test_a_start_and_its_end(tmp_path: Path) -> None:
    before = time.time() - 1
    (tmp_path / "checkpoints/step_00000020").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 24}\n{"step": 25}\n{"st')
    log_start(plan_in(tmp_path))
    start = only(tmp_path)
    assert (start.step, start.pid, start.host, start.status) == (20, os.getpid(), socket.gethostname(), None)
    assert start.is_running and before <= start.time <= time.time() + 1 and start.command
    log_end(tmp_path, 1, "rank 3 failed:\n  ValueError: x\n")
    start = only(tmp_path)
    assert not start.is_running and start.ended is not None and start.ended >= start.time
    assert (start.last_step, start.status, start.reason) == (25, 1, "rank 3 failed: ValueError: x")
    assert (tmp_path / STARTS_FILE).stat().st_mode & 0o077 == 0, "a command is the user's"


@pytest.mark.parametrize(
    ("resume", "every", "copied", "step"),
    [("auto", None, [2, 2], 0), ("never", 2, [4, 2, 4, 2], 0), ("r/other", 2, [], None), ("auto", 2, [2, 4, 6, 4], 4)],
)
def test_the_step_of_a_first_start(
    tmp_path: Path, resume: str, every: int | None, copied: list[int], step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_settings, "copies_folder", lambda: tmp_path)
    write_atomically(tmp_path / "checkpoints/memory.json", '{"folder": "copies"}')
    for number, each in enumerate(copied):
        path = tmp_path / f"copies/rank_{number // 2:05d}.{number % 2}.json"
        write_atomically(path, f'{{"state": {{"step": {each}}}}}')
    plan = plan_in(tmp_path)
    plan.config.checkpoint.resume, plan.config.checkpoint.memory_every_steps = resume, every
    log_start(plan)
    assert only(tmp_path).step == step


def test_the_step_is_the_loaded_checkpoints(tmp_path: Path) -> None:
    """The newest checkpoint may be damaged. A rewind of the same start loads another one later."""
    for step in (10, 20):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
    note_loaded_step(tmp_path, 10)
    assert not (tmp_path / STARTS_FILE).exists(), "a program without starts"
    log_start(plan_in(tmp_path))
    assert only(tmp_path).step == 20
    note_loaded_step(tmp_path, 10)
    note_loaded_step(tmp_path, 15)
    log_end(tmp_path, 0)
    start = only(tmp_path)
    assert (start.step, start.status) == (10, 0)
    note_loaded_step(tmp_path, 15)
    assert only(tmp_path) == start


@pytest.mark.parametrize(
    ("resume", "loads", "changes"),
    [("never", True, True), ("never", False, False), ("{}/checkpoints/best", True, True), ("{}/best", True, False)],
)
def test_a_restart_resumes_from_the_newest_state(tmp_path: Path, resume: str, loads: bool, changes: bool) -> None:
    plan, seen, first = plan_in(tmp_path, restarts=1), list[str](), resume.format(tmp_path)
    plan.config.checkpoint.resume = first

    def start() -> int:
        seen.append(plan.config.checkpoint.resume)
        log_start(plan)
        if loads:
            note_loaded_step(tmp_path, 10)
        return 1

    assert with_restarts(plan, start, ()) == 1 and seen == [first, "auto" if changes else first]


def test_a_killed_process_is_not_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not Start(0.0, pid=child.pid, host=socket.gethostname()).is_running
    assert not Start(0.0, pid=os.getpid(), host="another host").is_running
    assert Start(0.0, pid=os.getpid(), host=socket.gethostname()).is_running


def test_damaged_lines_are_counted_and_kept(tmp_path: Path) -> None:
    lines = ['{"event": "end", "time": 1}', "oops", '{"time": NaN, "event": "start"}', '{"event": "start", "time', ""]
    (tmp_path / STARTS_FILE).write_text("\n".join(lines[:4]))
    log_start(plan_in(tmp_path))
    log_end(tmp_path, 0)
    log_end(tmp_path / "renamed", 0)
    starts, invalid = read_starts(tmp_path)
    assert len(starts) == 1 and starts[0].reason == "done" and invalid == 4 and not (tmp_path / "renamed").exists()
    assert (tmp_path / STARTS_FILE).read_text().startswith("\n".join(lines)), "nothing is deleted"
    strange = {"event": "start", "time": 1, "step": "x", "command": [], "host": 3, "pid": 1e300}
    end = {"event": "end", "time": 2, "step": None, "status": "x", "reason": {}}
    (tmp_path / STARTS_FILE).write_text(f"{json.dumps(strange)}\n{json.dumps(end)}\n")
    assert only(tmp_path) == Start(1, None, "", "", 0, 2, None, None, "")


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_something_else_in_its_place(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / STARTS_FILE, tmp_path / "target"
    target.write_text("theirs\n")
    if kind == "link":
        path.symlink_to(target)
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    log_start(plan_in(tmp_path))
    log_end(tmp_path, 0)
    warning = capsys.readouterr().err
    assert target.read_text() == "theirs\n"
    if kind == "link":
        assert not path.is_symlink() and len(read_starts(tmp_path)[0]) == 1 and not warning
    else:
        assert warning.count("\n") == 1 and warning.startswith(f"WARNING: {path} was not written: ")


def test_the_reason_of_a_rank() -> None:
    assert Report(1, "Traceback (most recent call last):\n  File x\nValueError: no\n\nway").reason == "way"
    assert Report(1, "stack\n\nkilled by\nSIGKILL").reason == "killed by\nSIGKILL"
    assert Report(2, "a\n\nb").reason == "a\n\nb" and Report(0).reason == ""


def fail() -> None:
    raise RuntimeError("the work failed")


def reject() -> None:
    raise ConfigError([Problem("trainer.tp", 3, "is odd", "write 2")])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, tuple[Callable[[], None], int, str]] = {
    "done": (lambda: None, 0, "done"),
    "error": (fail, 1, "rank 0 failed: RuntimeError: the work failed"),
    "rejected": (reject, 2, "trainer.tp"),
    "killed": (die, 1, "rank 0 failed: rank 0 was killed by SIGKILL"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_launcher_notes_the_reason(launcher: MakeLauncher, tmp_path: Path, end: str) -> None:
    work, status, reason = ENDS[end]
    folder = tmp_path / "run"
    launcher(lambda: run_here(plan_in(folder), partial(without_plan, work)), status=status)
    start = only(folder)
    assert start.status == status and reason in start.reason


def test_restarts_fork_without_threads(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of the previous start has a thread, which ends with it. Each restart is a start."""
    start_rank = start_module.Rank.start
    hosted: list[str] = []

    def host(*args: Any) -> Any:
        store = host_store(*args)
        hosted.extend(foreign_threads())
        return store

    def check(number: int, *args: Any) -> start_module.Rank:
        (tmp_path / f"start{len(list(tmp_path.glob('start*')))}").write_text(f"{foreign_threads()} {hosted}")
        return start_rank(number, *args)

    host_store = start_module._host_store
    monkeypatch.setattr(start_module, "_host_store", host)
    monkeypatch.setattr(start_module.Rank, "start", check)
    job = launcher(lambda: run_here(plan_in(tmp_path / "run", restarts=2), partial(without_plan, fail)), status=1)
    starts = [path.read_text() for path in sorted(tmp_path.glob("start*"))]
    store = "pt_tcpstore_uv"
    assert starts == ["[] []", f"[] ['{store}']", f"[] ['{store}', '{store}']"], job.errors
    assert [start.status for start in read_starts(tmp_path / "run")[0]] == [1, 1, 1]


def test_a_signal_after_the_wait_for_a_rank_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_threads()
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    file = tempfile.TemporaryFile()
    rank = start_module.Rank(0, pid, file, file, PhaseFile(), None)
    wait = os.waitpid

    def wait_interrupted(*args: int) -> tuple[int, int]:
        ended = wait(*args)
        if ended[0]:
            rank.send(signal.SIGTERM)  # as the launcher's handler does
        return ended

    monkeypatch.setattr(os, "waitpid", wait_interrupted)
    while not rank.poll():
        pass
    assert rank.exit_code == 3


def test_a_signal_is_named(launcher: MakeLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        save_and_leave(tmp_path, ready=lambda: os.kill(os.getppid(), signal.SIGTERM))  # the start forwards it

    plan = plan_in(tmp_path / "run")
    plan.config.hook.on_event = f"cat >> {tmp_path}/events"
    log_start(plan)
    log_end(plan.run_dir, 1, "rank 0 failed: x")
    monkeypatch.setenv(RESTART_COUNTS[0], "2")  # as under torchrun
    launcher(lambda: run_here(plan, partial(without_plan, work)), status=75)
    reason = "stopped by SIGTERM after saving"
    assert read_starts(tmp_path / "run")[0][-1].reason == reason
    wait_until(lambda: len((tmp_path / "events").read_text().splitlines()) == 2)
    restart, stop = map(json.loads, (tmp_path / "events").read_text().splitlines())
    assert {"event": "restart", "restarts": 2, "status": 1, "reason": "rank 0 failed: x"}.items() <= restart.items()
    assert {"event": "stop", "status": 75, "reason": reason}.items() <= stop.items()


@pytest.mark.parametrize("end", ["done", "error", "rejected"])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_of_another_launcher_notes_it(
    launcher: MakeLauncher, tmp_path: Path, end: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_llama.launch.rank.CONSEQUENCE_DELAY_SECONDS", 0.0)
    work, status, reason = ENDS[end]
    launcher(lambda: run_as_rank(plan_in(tmp_path), rank, partial(without_plan, work)), status=status)
    if rank:
        assert not (tmp_path / STARTS_FILE).exists()
    else:
        start = only(tmp_path)
        assert start.status == status and reason in start.reason


def test_train_py_writes_starts_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for _ in range(2):  # the second resumes from step 1, because step 2 is damaged
        status, output = run_train_py(folder, *TINY, "checkpoint.every_steps=1")
        assert status == 0 and "WARNING" not in output, output
        assert f"  report          {folder}/report.html" in output
        (folder / "checkpoints/step_00000002/checkpoint.json").write_text("{")
    starts, invalid = read_starts(folder)
    assert [(start.step, start.reason) for start in starts] == [(0, "done"), (1, "done")] and not invalid
    assert "done, step 2 of 2" in (folder / "report.html").read_text(encoding="utf-8")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    cli._write_report(folder)
    assert capsys.readouterr().err == f"WARNING: {folder}/report.html was not written: is a folder\n"


@pytest.mark.parametrize("error", [RuntimeError("a\nb"), KeyboardInterrupt(), MemoryError()])
def test_no_error_of_a_report_leaves_it(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path) -> None:
        raise error

    monkeypatch.setattr(cli.optional_tools, "load", lambda tool: fails)
    cli._write_report(tmp_path)
    reason = "a b" if str(error) else type(error).__name__
    assert capsys.readouterr().err == f"WARNING: {tmp_path}/report.html was not written: {reason}\n"
    monkeypatch.setattr(cli.optional_tools, "load", lambda tool: None)
    cli._write_report(tmp_path)
    assert not capsys.readouterr().err, "without tools"


@pytest.mark.parametrize(("status", "writes"), [(0, True), (1, True), (2, False), (75, False), (130, False)])
def test_a_stop_writes_no_report(tmp_path: Path, status: int, writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(cli, "note_command", lambda *_: None)
    monkeypatch.setattr(cli, "_run", lambda *_: (status, tmp_path))
    monkeypatch.setattr(cli, "_write_report", written.append)
    assert cli.main(["data=mock", "device=cpu"]) == status
    assert written == [tmp_path] * writes


def test_compile_processes_end_with_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    inductor = SimpleNamespace(_pool_set=[SimpleNamespace(process=process)])
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", inductor)  # its import starts processes
    rank._end_compile_processes()
    assert process.wait() == -signal.SIGKILL
    source = Path(torch.__file__).with_name("_inductor") / "async_compile.py"
    assert "_pool_set" in source.read_text(encoding="utf-8")
