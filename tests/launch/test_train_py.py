"""The real ``train.py``, as a user starts it: by hand, by torchrun, stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.small_run import SMALL, TRAIN, wait_for_step
from tests.processes import PATIENCE_SECONDS, children, environment, gone, losses, steps

BY_HAND = [sys.executable, TRAIN]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", TRAIN]

pytestmark = pytest.mark.timeout(600)


def start(command: list[str], *overrides: str) -> subprocess.Popen[str]:
    """Starts a run in the background."""
    return subprocess.Popen(
        [*command, *SMALL, *overrides],
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.slow
def test_by_hand_and_by_torchrun_is_the_same_run(tmp_path: Path) -> None:
    for name, command in (("hand", BY_HAND), ("torchrun", TORCHRUN)):
        run = start(command, "trainer.steps=3", f"run.dir={tmp_path}/{name}")
        out, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
        assert "rank grid" in out and "step 3/3" in out
        assert {"config.yaml", "plan.txt", "metrics.jsonl", "loss.png"} <= {p.name for p in (tmp_path / name).iterdir()}
    assert losses(tmp_path / "hand") == losses(tmp_path / "torchrun")
    assert len(losses(tmp_path / "hand")) == 3


@pytest.mark.slow
def test_stopped_by_a_signal_it_saves_asks_to_be_started_again_and_goes_on(tmp_path: Path) -> None:
    arguments = (f"run.dir={tmp_path}/run", "optim=constant", "optim.warmup_steps=0")
    run = start(BY_HAND, "trainer.steps=100000", *arguments)
    wait_for_step(run, tmp_path / "run", 3)
    run.send_signal(signal.SIGTERM)
    out, errors = run.communicate(timeout=150)
    assert run.returncode == 75, errors
    assert "Traceback" not in errors
    done = steps(tmp_path / "run")[-1]
    restarted = start(BY_HAND, f"trainer.steps={done + 2}", *arguments)
    out, errors = restarted.communicate(timeout=200)
    assert restarted.returncode == 0, errors
    assert steps(tmp_path / "run") == list(range(1, done + 3)), "each step is logged once"


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    run = start(BY_HAND, "trainer.steps=100000", f"run.dir={tmp_path}/run")
    wait_for_step(run, tmp_path / "run", 2)
    ranks = children(run.pid)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 75, errors
    assert "Stopped by SIGINT at step" in errors and "Traceback" not in errors
    assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize("command", [BY_HAND, TORCHRUN], ids=["hand", "torchrun"])
def test_ranks_die_with_a_starter_that_is_killed(tmp_path: Path, command: list[str]) -> None:
    run = start(command, "trainer.steps=100000", f"run.dir={tmp_path}/run")
    wait_for_step(run, tmp_path / "run", 2)
    ranks = children(run.pid)
    assert len(ranks) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert all(gone(pid) for pid in ranks)


@pytest.mark.slow
def test_a_killed_rank_is_named_last(tmp_path: Path) -> None:
    run = start(BY_HAND, "trainer.steps=100000", f"run.dir={tmp_path}/run")
    wait_for_step(run, tmp_path / "run", 2)
    victim = max(children(run.pid))
    os.kill(victim, signal.SIGKILL)
    _, errors = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 1
    assert errors.rstrip().splitlines()[-1].endswith("was killed by SIGKILL (the system may be out of memory)")
    assert "Traceback" not in errors, "the other rank's complaint is a consequence"


def test_warnings_of_other_packages_are_no_errors() -> None:
    """``-W error`` holds for this project's modules."""
    program = f"""
import sys, warnings
sys.modules["__main__"].__file__ = {TRAIN!r}
import megatron_llama
for module in ("megatron.core.inference", "torch._jit", "megatron_llama.cli"):
    warnings.warn_explicit("old", DeprecationWarning, "file", 1, module)
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.stderr.count("file:1: DeprecationWarning: old\n") == 2, done.stderr
    assert done.stderr.endswith("\nDeprecationWarning: old\n") and done.returncode == 1
