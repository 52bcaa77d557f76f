"""Every row of docs/reference/signals.md: what a signal does in each part of a run, and a console that is lost."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.checkpoint import saving
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.launch import other_launchers, supervise
from megatron_llama.launch import run_dir as run_dir_module
from megatron_llama.launch import start as start_module
from megatron_llama.plan import Plan
from megatron_llama.system.output import FILE
from megatron_llama.system.signals import exit_on_signal, ignore_signals
from megatron_llama.train import loop, run_rank
from tests.checkpoint.runner import SMALL, Job, leftovers, losses, run_job
from tests.paths import TRAIN_PY
from tests.processes import children, environment, run_forked, status_of_fork

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
RUN = ["trainer.steps=4", "checkpoint.every_steps=2", "trainer.val_every_steps=3", "trainer.val_steps=1"]


def test_after_the_end_the_status_is_what_counts() -> None:
    def work() -> None:
        exit_on_signal()
        ignore_signals()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        os._exit(75)

    assert status_of_fork(work) == 75


def signal_launcher(number: int) -> None:
    """Signals this rank's launcher; returns when the signal has come here."""
    arrived: list[int] = []
    handler: Any = signal.getsignal(number)
    signal.signal(number, lambda *arguments: [arrived.append(1), handler(*arguments)])
    os.kill(os.getppid(), number)
    while not arrived:
        time.sleep(0.01)


def first(
    owner: Any, name: str, act: Callable[[], Any], call: int = 1, patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Make the ``call``-th call of a function start with ``act``."""
    inner, calls = getattr(owner, name), []

    def acting(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            act()
        return inner(*arguments, **keywords)

    patch(owner, name, acting)


def in_a_phase(owner: Any, name: str, number: int, call: int = 1) -> Callable[[Plan], None]:
    """The work of a rank that signals its launcher in a phase."""

    def work(plan: Plan) -> None:
        first(owner, name, lambda: signal_launcher(number), call)
        run_rank.run_rank(plan)

    return work


@pytest.mark.parametrize(
    ("owner", "name", "number", "status", "saved"),
    [
        pytest.param(loop, "training_step", signal.SIGTERM, 75, 1, id="first step", marks=pytest.mark.slow),
        pytest.param(loop, "validate", signal.SIGHUP, 75, 3, id="validation"),
        pytest.param(saving.Saver, "start", signal.SIGUSR1, 75, 3, id="a save"),
        pytest.param(loop, "continue_prompts", signal.SIGTERM, 0, 4, id="end"),
        pytest.param(loop, "training_step", signal.SIGINT, 75, 1, id="Ctrl-C in the first step"),
        pytest.param(loop, "validate", signal.SIGINT, 75, 3, id="Ctrl-C in validation", marks=pytest.mark.slow),
        pytest.param(loop, "continue_prompts", signal.SIGINT, 0, 4, id="Ctrl-C at the end", marks=pytest.mark.slow),
    ],
)
def test_in_training(tmp_path: Path, owner: Any, name: str, number: signal.Signals, status: int, saved: int) -> None:
    output = run_job(tmp_path / "run", *RUN, work=in_a_phase(owner, name, number), status=status)
    assert "Traceback" not in output
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step_{saved:08d}\n"
    assert losses(tmp_path / "run")[-1][0] == saved and leftovers(tmp_path / "run") == []
    assert (tmp_path / "run/loss.png").exists()
    last = (
        f"Stopped by {number.name} at step {saved}, saved {tmp_path}/run/checkpoints/step_{saved:08d}; "
        f"to resume, run the same command with run.dir={tmp_path}/run"
    )
    assert status == 0 or " ".join(output.split()).endswith(last), output


def signal_all(number: int) -> None:
    """Signal the launcher and all ranks, as a terminal does."""
    for pid in (os.getppid(), *children(os.getppid())):
        os.kill(pid, number)


@pytest.mark.parametrize(("times", "status"), [(1, 75), (2, 130)])
def test_ctrl_c_to_all_processes(tmp_path: Path, times: int, status: int) -> None:
    """One counts once, although each rank gets it from the terminal and from its launcher; two end the run."""

    def work(plan: Plan) -> None:
        def act() -> None:
            if os.environ["RANK"] == "0":
                for _ in range(times):
                    signal_all(signal.SIGINT)
                    while times == 2 and not (tmp_path / "first").exists():
                        time.sleep(0.01)
            if times == 2:
                time.sleep(600)

        first(loop, "training_step", act, call=2)
        run_rank.run_rank(plan)

    def prepare() -> None:
        supervise._ECHO_SECONDS = -1.0  # a second signal counts at once
        announce = supervise.Signals._receive

        def note(self: supervise.Signals, *arguments: Any) -> None:
            announce(self, *arguments)
            (tmp_path / "first").touch()

        supervise.Signals._receive = note  # type: ignore[method-assign]

    output = run_job(tmp_path / "run", *RUN, "trainer.tp=2", work=work, prepare=prepare, status=status)
    assert "Traceback" not in output
    assert (tmp_path / "run/loss.png").exists() and len(losses(tmp_path / "run")) == (2 if times == 1 else 1)
    if times == 1:
        assert (tmp_path / "run/checkpoints/latest").read_text() == "step_00000002\n"
    else:
        assert output.splitlines()[-1] == "Stopped by SIGINT."


@pytest.mark.parametrize(
    ("owner", "name", "steps"),
    [(run_rank, "build_optimizer", 0), pytest.param(Checkpointer, "export", 1, marks=pytest.mark.slow)],
)
def test_before_and_after_training(tmp_path: Path, owner: Any, name: str, steps: int) -> None:
    def work(plan: Plan) -> None:
        first(owner, name, lambda: [os.kill(os.getppid(), signal.SIGTERM), time.sleep(600)])
        run_rank.run_rank(plan)

    output = run_job(tmp_path / "run", *RUN, "trainer.steps=1", work=work, status=128 + signal.SIGTERM)
    assert output.splitlines()[-1] == "Stopped by SIGTERM." and "Traceback" not in output
    assert len(losses(tmp_path / "run")) == steps


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    def work(plan: Plan) -> None:
        def hang_up() -> None:
            for pid in (os.getppid(), os.getpid()):
                os.kill(pid, signal.SIGHUP)

        first(loop, "training_step", hang_up, call=2)
        run_rank.run_rank(plan)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = Job(tmp_path / "run", *RUN, work=work)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert job.wait() == 0, job.output
    assert len(losses(tmp_path / "run")) == 4


@pytest.mark.parametrize("moment", [pytest.param("claiming the folder", marks=pytest.mark.slow), "between two forks"])
def test_before_the_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    patch = monkeypatch.setattr
    if moment == "claiming the folder":
        first(run_dir_module, "format_plan", lambda: signal.raise_signal(signal.SIGTERM), 1, patch)
        expected, last = 128 + signal.SIGTERM, "Stopped by SIGTERM."
    else:
        first(start_module.Rank, "start", lambda: signal.raise_signal(signal.SIGINT), 2, patch)
        expected, last = 130, "Stopped by SIGINT."
    output = run_job(tmp_path / "run", *RUN, "trainer.tp=2", prepare=exit_on_signal, status=expected)
    assert output.splitlines()[-1] == last and "Traceback" not in output
    assert leftovers(tmp_path / "run") == []


def test_while_the_processes_of_a_job_meet(tmp_path: Path) -> None:
    def prepare() -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "15001"}
        exit_on_signal()
        first(other_launchers, "Rendezvous", lambda: signal.raise_signal(signal.SIGINT))

    output = run_job(tmp_path / "run", *RUN[1:], "trainer.tp=2", prepare=prepare, status=130)
    assert output == "Stopped by SIGINT.\n"


def test_what_a_killed_start_left_half_written_is_deleted(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run/checkpoints"
    checkpoints.mkdir(parents=True)
    for path in (tmp_path / "run/.config.yaml.here.1.draft", checkpoints / ".latest.here.1.draft"):
        path.touch()
    run_job(tmp_path / "run", *RUN, "trainer.steps=1")
    assert leftovers(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("lost", "status", "message"),
    [(True, 141, ""), (False, 1, "The output could not be written: No space left on device\n")],
    ids=["reader", "disk"],
)
def test_a_plan_that_cannot_be_printed_is_no_success(lost: bool, status: int, message: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if lost else "/dev/full", "w") as output:
        words = ["--help"] if lost else ["-m", "--dry-run", "data=mock", "optim.lr=1,2"]
        command = [sys.executable, str(TRAIN_PY), *words]
        done = subprocess.run(command, env=environment(), stdout=output, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (status, message)


def train_without_console(folder: Path) -> None:
    """Run train.py with a reader that has gone, a closed stderr, and a locale that has only ASCII."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.close(2)
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)
    sys.argv = [str(TRAIN_PY), *SMALL, *RUN, "logging.every_steps=1", f"run.dir={folder}"]
    runpy.run_path(str(TRAIN_PY), run_name="__main__")


def test_a_lost_console_does_not_end_training(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_forked(partial(train_without_console, folder), tmp_path / "out", tmp_path / "err", 200) == 0
    text = (folder / FILE).read_text()
    assert "stdout is lost: Broken pipe" in text and "step 4/4" in text
    assert len(losses(folder)) == 4 and (folder / "loss.png").exists()
