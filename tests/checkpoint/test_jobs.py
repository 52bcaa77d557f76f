"""Signals, kills, faults, hangs and restarts of whole runs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from megatron_llama.config import Plan
from megatron_llama.parallel import ParallelModel
from megatron_llama.train import run_rank
from tests.checkpoint.jobs import Job, final_tensors, leftovers, losses
from tests.checkpoint.runner import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TP2 = ["trainer.tp=2"]
RUN = [*TP2, "trainer.steps=8", "checkpoint.every_steps=1", "checkpoint.keep=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    job = Job(folder, *RUN)
    assert job.wait() == 0, job.said
    assert len(losses(folder)) == 8
    return folder


def assert_as_if_nothing_had_happened(run_dir: Path, whole: Path) -> None:
    assert losses(run_dir) == losses(whole)  # each step once, all bits
    assert_same(final_tensors(run_dir), final_tensors(whole))
    assert leftovers(run_dir) == []


def test_killed_at_any_moment(tmp_path: Path, whole: Path) -> None:
    # Few kills, each in another part of a run; scripts/kill_test.py does many on the real command.
    folder, chance = tmp_path / "run", random.Random(4)
    reached = 0
    for _ in range(3):
        job = Job(folder, *RUN)
        job.until(lambda: len(losses(folder)) > reached)  # noqa: B023  called at once
        time.sleep(chance.uniform(0, 0.4))
        job.kill()
        reached = max(reached, len(losses(folder)))
    job = Job(folder, *RUN)
    assert job.wait() == 0, job.said
    assert "going on from" in job.said
    assert_as_if_nothing_had_happened(folder, whole)


def _slow(plan: Plan) -> None:
    """A rank whose steps take a while."""
    inner = ParallelModel.forward_backward

    def slow(self, *arguments, **keywords):
        time.sleep(0.3)
        return inner(self, *arguments, **keywords)

    ParallelModel.forward_backward = slow  # type: ignore[method-assign]
    run_rank(plan)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, whole: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    only_on_signal = [setting for setting in RUN if "every_steps" not in setting]
    job = Job(folder, *only_on_signal, work=_slow)
    job.until(lambda: len(losses(folder)) >= 2)
    os.kill(job.pid, number)
    assert job.wait() == 75, job.said
    last = losses(folder)[-1][0]
    assert 2 <= last < 8
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == [f"step_{last:08d}"]
    job = Job(folder, *only_on_signal)
    assert job.wait() == 0, job.said
    assert_as_if_nothing_had_happened(folder, whole)


def _stuck(plan: Plan) -> None:
    """A rank that needs long for its third step."""
    inner, calls = ParallelModel.forward_backward, []

    def stuck_in_the_third_step(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == 3 and (os.environ["RANK"] == "1" or "all" in plan.config.data.name):
            for _ in range(600):
                time.sleep(0.1)
        return inner(self, *arguments, **keywords)

    ParallelModel.forward_backward = stuck_in_the_third_step  # type: ignore[method-assign]
    run_rank(plan)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, *TP2, "data.name=all", work=_stuck)
    job.until(lambda: len(losses(folder)) >= 2)
    os.kill(job.pid, signal.SIGTERM)
    os.kill(job.pid, signal.SIGTERM)  # an echo of the same wish
    time.sleep(1.5)
    assert os.waitpid(job.pid, os.WNOHANG)[0] == 0, "the first one waits for the step"
    begin = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 10


def test_a_hang_prints_every_ranks_stacks_and_fails(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", *TP2, "trainer.hang_timeout_seconds=3", work=_stuck)
    begin = time.monotonic()
    assert job.wait(60) == 1
    assert time.monotonic() - begin < 45
    assert "rank 1: no progress for 3 s, in step 3" in job.said and "stuck_in_the_third_step" in job.said
    assert "rank 0: no progress for 3 s, in step 3" in job.said


def _dies_once(plan: Plan) -> None:
    """Rank 1 fails in its fifth step, in the first attempt only."""
    inner, calls = ParallelModel.forward_backward, []
    marker = Path(str(plan.config.run.dir)) / "failed_once"

    def fails(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == 5 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            raise RuntimeError("a fault of the moment")
        return inner(self, *arguments, **keywords)

    ParallelModel.forward_backward = fails  # type: ignore[method-assign]
    run_rank(plan)


def test_restarts_from_the_last_checkpoint(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, *RUN, "trainer.max_restarts=1", work=_dies_once)
    assert job.wait() == 0, job.said
    assert "a fault of the moment" in job.said and "Starting again, 1 of 1" in job.said
    assert_as_if_nothing_had_happened(folder, whole)


def test_without_restarts_a_fault_is_the_end(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", *RUN, work=_dies_once)
    assert job.wait() == 1
    assert "a fault of the moment" in job.said


def _nan_on_rank_1(plan: Plan) -> None:
    """A gradient on rank 1 is no number in steps 3 and 5."""
    inner, calls = ParallelModel.forward_backward, []

    def poisoned(self, *arguments, **keywords):
        calls.append(1)
        loss = inner(self, *arguments, **keywords)
        if len(calls) in (3, 5) and os.environ["RANK"] == "1":
            next(s for s in self.shards if s.name == "layers.2.mlp.down_proj.weight").grad[0, 0] = torch.nan
        return loss

    ParallelModel.forward_backward = poisoned  # type: ignore[method-assign]
    run_rank(plan)


def test_a_gradient_that_is_no_number_stops_the_run_before_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, *RUN, work=_nan_on_rank_1)
    assert job.wait() == 1
    assert "step 3" in job.said and "rank 1: the gradient of layers.2.mlp.down_proj.weight not finite" in job.said
    assert all(tensor.float().isfinite().all() for tensor in final_tensors(folder).values())


def test_steps_can_be_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = Job(folder, *RUN, "trainer.skip_nonfinite_steps=2", work=_nan_on_rank_1)
    assert job.wait() == 0, job.said
    assert job.said.count("left out step") == 2
    assert [step for step, _ in losses(folder)] == list(range(1, 9))
    job = Job(tmp_path / "other", *RUN, "trainer.skip_nonfinite_steps=1", work=_nan_on_rank_1)
    assert job.wait() == 1 and "step 5" in job.said
