"""Signals that stop a run, and the last lines of a stopped or finished run."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_llama.system import rerun_command
from megatron_llama.train import stop_signals
from tests.checkpoint.runner import SMALL
from tests.processes import plan_of, run_train_py, status_of_fork


@pytest.mark.parametrize(
    ("job", "later", "end"),
    [
        (None, [(2.0, signal.SIGTERM)], -signal.SIGTERM),
        (None, [(0.9, signal.SIGUSR1)], 0),
        (None, [(0.9, signal.SIGUSR1), (1.1, signal.SIGUSR1)], -signal.SIGUSR1),
        ("7", [(2.0, signal.SIGTERM)], 0),
        (None, [(2.0, signal.SIGHUP)], 0),
        (None, [(2.0, signal.SIGXCPU)], 0),
        (None, [(2.0, signal.SIGUSR2)], -signal.SIGUSR2),
        (None, [(2.0, signal.SIGINT)], -signal.SIGINT),
        ("7", [(2.0, signal.SIGINT)], -signal.SIGINT),
    ],
    ids=[
        *("by hand", "an echo", "after an echo", "under Slurm", "a terminal", "a limit", "submitit", "Ctrl-C"),
        "Ctrl-C under Slurm",
    ],
)
def test_later_signals(
    monkeypatch: pytest.MonkeyPatch, job: str | None, later: list[tuple[float, int]], end: int
) -> None:
    """Signals at these seconds after the first. Slurm only repeats the first, and so does a terminal that closes."""
    now = [10.0]
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)

    def work() -> None:
        with stop_signals.StopSignals(plan_of(1), reports=False) as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            received = signals.received
            for seconds, number in later:
                now[0] = 10.0 + seconds
                os.kill(os.getpid(), number)
            os._exit(0 if received else 1)

    assert status_of_fork(work) == end


WORDS = ["model=llama_2m", "run.dir=my runs/one"]
RANK = ["python", "-u", "train.py", *WORDS]
TORCHRUN = ["/usr/bin/python", "/opt/bin/torchrun", "--nproc_per_node", "2", "train.py", *WORDS]


@pytest.mark.parametrize(
    ("launcher", "words", "parent", "ending"),
    [
        (None, ["python", "train.py", *WORDS], [], "resume with: python train.py {}"),
        (None, ["python", "-m", "megatron", "train", *WORDS], [], "resume with: python -m megatron train {}"),
        (None, ["/usr/bin/python", "/opt/bin/torchrun", *WORDS], [], "resume with: torchrun {}"),
        (None, ["pytest"], [], "to resume, run the same command with {}"),
        (("torchrun", 1), RANK, TORCHRUN, "resume with: torchrun --nproc_per_node 2 train.py {}"),
        (("torchrun", 2), RANK, TORCHRUN, "to resume, run the same torchrun command with {}"),
        (("srun", 1), RANK, ["slurmstepd: [7.0]"], "to resume, run the same srun command with {}"),
    ],
)
def test_the_command_to_resume(
    monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, int] | None, words: list[str], parent: list[str], ending: str
) -> None:
    """A known command is complete, quoted for a shell, and fits the terminal."""
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(rerun_command, "_read_parent", lambda: parent)
    monkeypatch.setattr(rerun_command.shutil, "which", lambda name: f"/opt/bin/{name}")
    for name in (rerun_command.COMMAND, rerun_command.LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    rerun_command.note_command(WORDS, launcher)
    plan = plan_of(1)
    plan.config.run.dir = "my runs/one"
    text = stop_signals.describe_stop(plan, 36, signal.SIGTERM)
    quoted = shlex.quote('run.dir="my runs/one"')
    assert text.startswith("Stopped by SIGTERM at step 36, saved my runs/one/checkpoints/step_00000036;\n")
    assert text.replace("\n  ", " ").endswith(ending.format(quoted)) and max(map(len, text.splitlines())) <= 79
    text = stop_signals.describe_finished(replace(plan, start=replace(plan.start, step=40)))
    assert text.startswith("my runs/one is finished at step 40;\n") and text.endswith(f"{quoted} trainer.steps=80")


def test_a_folder_resumes_and_extends_its_run(tmp_path: Path) -> None:
    """The real train.py: stopped and finished, its folder is enough."""
    folder, quiet = tmp_path / "run", ("device.peak_tflops=0.01", "logging.tensorboard=false")
    assert run_train_py(folder, *SMALL, *quiet, "optim.clip=0.5", "trainer.steps=2")[0] == 0
    status, output = run_train_py(folder)
    assert status == 0 and f"{folder} is finished at step 2;" in output.replace("\n  ", " "), output
    assert f"settings from {folder}/config.yaml" in " ".join(output.split()), output
    status, output = run_train_py(folder, "trainer.steps=3")
    assert status == 0 and "step 3/3" in output and "clip 0.5" in output, output
    assert "except trainer.steps=3" in " ".join(output.split())
