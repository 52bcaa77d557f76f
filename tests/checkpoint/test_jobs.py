"""Kills, faults and restarts of whole runs; tests/launch/test_signals.py has the signals."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.checkpoint import saving
from megatron_llama.checkpoint.folder import saved_steps
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.optim import Optimizer
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan
from megatron_llama.system import phase
from megatron_llama.train.run_rank import run_rank
from tests.checkpoint.runner import (
    Work,
    assert_same,
    final_tensors,
    kill_in_each_part,
    leftovers,
    losses,
    run_job,
    with_each_step,
)
from tests.processes import rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(900),  # more than the limits in runner.py add up to
]
TP2 = ["trainer.tp=2"]
RUN = [*TP2, "trainer.steps=6", "checkpoint.every_steps=1", "checkpoint.keep=3"]


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    # Few kills, each in another part of a run; python -m tests.chaos does hundreds.
    whole, folder, chance = tmp_path / "whole", tmp_path / "run", random.Random(4)
    kill_in_each_part(folder, chance, *RUN)
    for run_dir in (folder, whole):
        output = run_job(run_dir, *RUN)
        assert ("resuming from" in output) == (run_dir == folder)
    assert losses(folder) == losses(whole) and len(losses(whole)) == 6  # each step once, all bits
    assert_same(final_tensors(folder), final_tensors(whole))
    assert leftovers(folder) == []


def _fails_while_it_saves(kind: str) -> Work:
    """Rank 1 fails in step 3 while the files of step 2 are written. If it is killed, its own file is complete."""

    def act(step: int, run_dir: Path) -> None:
        if step == 3 and rank() == 1:
            if kind == "killed":
                while not list(run_dir.glob("checkpoints/.step_00000002.partial/rank_00001.json")):
                    time.sleep(0.01)
            (run_dir / "failing").touch()
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 fails")

    def work(plan: Plan) -> None:
        save, failing = saving.save_part, Path(str(plan.config.run.dir)) / "failing"

        def save_part(tensors: Any, folder: Path, number: int, writer: str) -> None:
            while "00000002" in folder.name and not failing.exists() and not (kind == "killed" and number == 1):
                time.sleep(0.01)
            save(tensors, folder, number, writer)

        saving.save_part = save_part
        with_each_step(act)(plan)

    return work


@pytest.mark.parametrize("kind", ["failed", "killed"])
def test_a_failing_step_finishes_the_save_of_the_previous_step(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    output = run_job(folder, *RUN, work=_fails_while_it_saves(kind), status=1)
    assert saved_steps(folder / "checkpoints") == [2, 1], output
    read_manifest(folder / "checkpoints/step_00000002").check_sizes()
    assert leftovers(folder) == []


@pytest.mark.slow
def test_adapters_of_a_shared_head_stay_equal_under_1bit_adam(tmp_path: Path) -> None:
    onebit = ["optim.name=onebit_adam", "optim.freeze_step=2", "trainer.zero=0", "trainer.dp=2"]
    settings = [*RUN, *onebit, "model.num_key_value_heads=1", "finetune=lora"]
    run_job(tmp_path / "run", *settings)  # the run compares copies before each save


PHASES = (  # of a run, in order
    "opening the device; meeting the other ranks; building the model; opening the data; building the optimizer; "
    "loading; the first measurements; step 1; validation after step 1; validation after step 1: sequence 0 of 8; "
    "saving step 1; saving step 1, the last; the last checks and samples; exporting; leaving the other ranks"
).split("; ")
ALL_PHASES = [*TP2, "trainer.steps=1", "trainer.val_every_steps=1", "trainer.val_steps=1", "checkpoint.every_steps=1"]


def _noting_phases(plan: Plan) -> None:
    folder, enter = Path(str(plan.config.run.dir)), phase.enter

    def noted(label: str, patience: float = 1.0) -> None:
        enter(label, patience)
        with (folder / f"phases{rank()}").open("a") as file:
            file.write(f"{label}\n")

    phase.enter = noted  # type: ignore[assignment]
    run_rank(plan)


def test_every_part_of_a_run_is_a_phase_and_all_ranks_enter_the_same(tmp_path: Path) -> None:
    """tests/launch/test_watchdog.py stops ranks in phases."""
    run_job(tmp_path / "run", *ALL_PHASES, work=_noting_phases)
    for number in (0, 1):
        assert (tmp_path / "run" / f"phases{number}").read_text().splitlines() == PHASES


def test_a_fault_after_a_stop_signal_does_not_restart(tmp_path: Path) -> None:
    def fails(step: int, run_dir: Path) -> None:
        if step == 3 and rank() == 1:
            os.kill(os.getppid(), signal.SIGTERM)
            raise RuntimeError("a fault while it stops")

    output = run_job(tmp_path / "run", *RUN, "trainer.max_restarts=1", work=with_each_step(fails), status=1)
    assert "a fault while it stops" in output and "Restart" not in output


def _nan_on_rank_1(plan: Plan) -> None:
    """A gradient on rank 1 is NaN in steps 3 and 5."""
    inner, calls = ParallelModel.forward_backward, []

    def poisoned(self: ParallelModel, *arguments: Any, **keywords: Any) -> torch.Tensor:
        calls.append(1)
        loss = inner(self, *arguments, **keywords)
        if len(calls) in (3, 5) and rank() == 1:
            grad = next(s for s in self.shards if s.name == "layers.2.mlp.down_proj.weight").grad
            assert grad is not None
            grad[0, 0] = torch.nan
        return loss

    ParallelModel.forward_backward = poisoned  # type: ignore[method-assign]
    run_rank(plan)


def test_a_nan_gradient_is_skipped_and_the_next_stops_the_run_before_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    output = run_job(folder, *RUN, "trainer.skip_nonfinite_steps=1", work=_nan_on_rank_1, status=1)
    assert output.count("skipped step") == 1 and [step for step, _ in losses(folder)] == [1, 2, 3, 4]
    assert "step 5" in output and "rank 1: the gradient of layers.2.mlp.down_proj.weight not finite" in output
    assert all(tensor.float().isfinite().all() for tensor in final_tensors(folder).values())


def _flipped_on_rank_1(plan: Plan) -> None:
    """The last bit of a state on rank 1 flips after step 5."""
    inner, calls = Optimizer.advance, []

    def flipped(self: Optimizer, *, updated: bool = True) -> None:
        inner(self, updated=updated)
        calls.append(1)
        if len(calls) == 5 and rank() == 1:
            state = next(state for kind, s, state in self.states() if (kind, s.name) == ("exp_avg_sq", "norm.weight"))
            assert isinstance(state, torch.Tensor)
            state.view(torch.int32)[7] ^= 1

    Optimizer.advance = flipped  # type: ignore[method-assign, assignment]
    run_rank(plan)


@pytest.mark.parametrize("every", [1, 0])
def test_a_flipped_bit_stops_the_run_before_a_checkpoint_has_it(tmp_path: Path, every: int) -> None:
    """Without comparisons in between, the save of step 6 compares."""
    folder, saves = tmp_path / "run", ["checkpoint.every_steps=2", "checkpoint.keep=9"]
    command = [*TP2, "trainer.steps=8", *saves, f"trainer.check_copies_every={every}"]
    output = run_job(folder, *command, work=_flipped_on_rank_1, status=1)
    last, text = (5, "step 5") if every == 1 else (6, "step 6 is not saved")
    assert f"{text}: the copies of exp_avg_sq of model.norm.weight (offset [0], size [32])" in output
    assert "on rank 0 and rank 1 differ" in output
    assert saved_steps(folder / "checkpoints") == [4, 2]
    assert len(losses(folder)) == last, "the step itself is logged"
    if every == 1:
        for run_dir in (folder, tmp_path / "undisturbed"):
            run_job(run_dir, *command)
        assert_same(final_tensors(folder), final_tensors(tmp_path / "undisturbed"))


def test_a_rejected_start_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_job(run, "trainer.steps=1", "checkpoint.export_hf=true")
    weights = run / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])

    def content() -> dict[Path, bytes]:
        names = (path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", "starts.jsonl"))
        return {path: path.read_bytes() for path in names}

    before = content()
    another = ("trainer.steps=2", "trainer.tp=2", "optim.name=sgd")
    damaged = ("checkpoint.resume=never", f"init_from={run}/hf")
    for overrides, message in ((another, "was trained with adamw"), (damaged, "model.safetensors")):
        output = run_job(run, *overrides, status=2)
        assert output.count(message) == 1 and "Traceback" not in output, "said by one rank"
        assert content() == before
    run_job(run, "trainer.steps=2")
    assert "is finished at step 2" in run_job(run, "trainer.steps=1")
    run_job(run, "trainer.steps=2")
    assert "steps: 2" in (run / "config.yaml").read_text()
