"""The user's command at events of a run (hook.on_event): what it gets, and that no command stops or delays a run."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import tests.warm  # noqa: F401  before the first fork
from megatron_llama import event_hook
from megatron_llama.checkpoint import saving
from megatron_llama.train import loop, stragglers
from tests.launch.small_runs import SMALL
from tests.processes import gone, run_train_py, steps, wait_until


def test_events_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 cannot be saved, rank 1 is slow, and step 5 fails once. The command runs in the folder of the start."""
    folder, failed = tmp_path / "run", tmp_path / "failed"
    save_part, training_step, compare = saving.save_part, loop.training_step, stragglers.Stragglers.update

    def save(tensors: Any, part: Path, *rest: Any) -> None:
        if "00000001" in part.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_part(tensors, part, *rest)

    def step(number: int, *rest: Any) -> dict[str, float]:
        if number == 5 and not failed.exists() and os.environ["RANK"] == "0":
            failed.touch()
            raise RuntimeError("planted")
        return training_step(number, *rest)

    monkeypatch.setattr(saving, "save_part", save)
    monkeypatch.setattr(loop, "training_step", step)
    monkeypatch.setattr(stragglers, "WINDOW_STEPS", 1)
    monkeypatch.setattr(stragglers.Stragglers, "update", lambda self, measured: compare(self, [1.0, 2.0]))
    monkeypatch.chdir(tmp_path)
    words = ["trainer.steps=6", "checkpoint.every_steps=1", "checkpoint.save_timeout_seconds=0"]
    words += ["trainer.max_restarts=1", 'hook.on_event="cat >> events; exit 3"', "checkpoint.asynchronous=false"]
    status, output = run_train_py(folder, *SMALL, *words)
    assert status == 0, output
    sent = sorted(map(json.loads, (tmp_path / "events").read_text().splitlines()), key=lambda each: float(each["time"]))
    assert {each["run_dir"] for each in sent} == {str(folder)} and {each["host"] for each in sent} == {os.uname()[1]}
    first = {each["event"]: each for each in reversed(sent)}
    assert [sent[0]["event"], sent[-1]["event"], *sorted(first)[2:4]] == ["start", "end", "restart", "start"]
    cause = {"step": 4, "restarts": 1, "status": 1, "reason": "rank 0 failed: RuntimeError: planted"}
    assert cause.items() <= first["restart"].items() and first["start"]["step"] == 0
    assert {"step": 6, "status": 0, "reason": "done"}.items() <= first["end"].items()
    assert first["failed_save"]["step"] == 1 and "No space left on device" in first["failed_save"]["reason"]
    assert first["straggler"]["ranks"] == [1] and first["straggler"]["ratio"] == 2.0
    assert "hook.on_event: the command failed with status 3 at the event restart\n" in output
    assert "cat >> events; exit 3 (hook.on_event)\n" in output, "the plan"
    assert "Restart 1 of 1" in output and steps(folder) == [1, 2, 3, 4, 5, 6], "each step once"


def test_commands_that_fail_or_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_hook, "_hook", None)
    monkeypatch.setattr(event_hook, "MOST_RUNNING", 2)
    command = f"read event; case $event in *end*) exit 3;; esac; echo $$ >> {tmp_path}/pids; sleep 1000; :"
    assert event_hook.listen(command, tmp_path) and not event_hook.listen("true", tmp_path), "one command of a process"
    for event in ("end", "first", "second", "third"):
        event_hook.send(event, large="x" * 1000)
        wait_until(lambda event=event: event != "end" or not event_hook._own_hook().running())  # type: ignore
    wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().count("\n") == 2)
    monkeypatch.setattr(event_hook, "END_SECONDS", 600.0)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()  # ends the wait
    event_hook.finish()
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert capfd.readouterr().err.splitlines() == [
        "hook.on_event: the command failed with status 3 at the event end",
        "hook.on_event: 2 commands still run; none was started for third",
        "hook.on_event: killed the command of the event first 0 s after the end",
        "hook.on_event: killed the command of the event second 0 s after the end",
    ]
    monkeypatch.setattr(event_hook, "END_SECONDS", 0.0)
    event_hook.send("first")
    event_hook.finish()
    assert capfd.readouterr().err.count("killed the command") == 1
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert event_hook._own_hook() is None, "a fork"
