"""A resumed run equals an uninterrupted run; selection of the checkpoint to resume from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import find_checkpoint, saved_steps
from megatron_llama.checkpoint.manifest import NAME, _checksum
from tests.checkpoint.runner import Tamper, assert_same, run
from tests.messages import raises_with_message
from tests.ranks import RankFailed

ONE_BIT = ["optim.name=onebit_adam", "trainer.zero=0", "optim.freeze_step=2"]
MUON = ["optim.name=muon", "trainer.tp=2"]
ALL_INT8 = ["trainer.zero=3", "trainer.grad_reduce=int8", "trainer.param_gather=int8"]
ADAM = ["optim.lr=0.01", "optim.warmup_steps=2", "trainer.steps=8"]


def _seed(checkpointer: Checkpointer) -> None:
    torch.manual_seed(77 + checkpointer.topology.rank)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, [], id="one"),
        pytest.param(4, ["trainer.tp=2", "trainer.pp=2"], id="tp2pp2", marks=pytest.mark.slow),
        pytest.param(2, ["trainer.zero=3"], id="dp2zero3"),
        pytest.param(1, ["optim.name=sgd"], id="sgd"),
        pytest.param(2, ONE_BIT, id="1-bit Adam, signs"),
        pytest.param(2, MUON, id="muon"),
        pytest.param(2, ALL_INT8, id="dp2, sent in int8", marks=pytest.mark.slow),
    ],
)
def test_losses_after_a_resume_are_the_uninterrupted_runs(ranks: int, layout: list[str], tmp_path: Path) -> None:
    whole = run(ranks, tmp_path / "whole", *ADAM, *layout, until=6, tamper=_seed)
    first = run(ranks, tmp_path / "halves", *ADAM, *layout, until=3, tamper=_seed)
    second = run(ranks, tmp_path / "halves", *ADAM, *layout, until=6)
    assert second.started_at == 3 and list(second.losses) == [4, 5, 6]
    assert first.losses | second.losses == whole.losses  # floats, all bits
    assert_same(second.tensors, whole.tensors)
    assert (second.lr, second.updates, second.random) == (whole.lr, whole.updates, whole.random)


def _without_schedule(checkpointer: Checkpointer) -> None:
    restore = checkpointer.optimizer.restore
    checkpointer.optimizer.restore = lambda updates, steps: restore(updates, 0)  # type: ignore[method-assign]


def _without_count(checkpointer: Checkpointer) -> None:
    restore = checkpointer.optimizer.restore
    checkpointer.optimizer.restore = lambda updates, steps: restore(0, steps)  # type: ignore[method-assign]


@pytest.mark.parametrize("tamper", [_without_schedule, _without_count], ids=["schedule", "count"])
def test_a_state_that_is_forgotten_would_be_seen(tamper: Tamper, tmp_path: Path) -> None:
    whole = run(1, tmp_path / "whole", *ADAM, until=6)
    run(1, tmp_path / "halves", *ADAM, until=3)
    second = run(1, tmp_path / "halves", *ADAM, until=6, tamper=tamper)
    assert second.losses[4] == whole.losses[4]  # the weights are right
    assert second.losses[6] != whole.losses[6]


def _without_errors(checkpointer: Checkpointer) -> None:
    checkpointer.optimizer.inner.load_extra_states = lambda states: None  # type: ignore[method-assign]


def test_errors_of_signs_that_are_forgotten_would_be_seen(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "whole", *ADAM, *ONE_BIT, until=6)
    run(2, tmp_path / "halves", *ADAM, *ONE_BIT, until=3)
    second = run(2, tmp_path / "halves", *ADAM, *ONE_BIT, until=6, tamper=_without_errors)
    assert second.losses[4] == whole.losses[4] and second.losses[6] != whole.losses[6]


def test_errors_of_signs_begin_at_zero_in_another_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(2, tmp_path / "run", *ADAM, *ONE_BIT, until=3)
    assert "errors" not in capfd.readouterr().err
    second = run(2, tmp_path / "run", *ADAM, *ONE_BIT, "trainer.tp=2", until=4)
    assert second.started_at == 3
    assert (
        "the errors of 1-bit Adam's compression start at zero: the layout differs from the checkpoint"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_another_layout_goes_on_within_the_layout_tolerance(optimizer: str, tmp_path: Path) -> None:
    settings = [*ADAM, f"optim.name={optimizer}"]
    whole = run(1, tmp_path / "whole", *settings, until=6)
    run(1, tmp_path / "halves", *settings, until=3)
    second = run(4, tmp_path / "halves", *settings, "trainer.tp=2", "trainer.pp=2", until=6)
    assert second.started_at == 3
    for step, loss in second.losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=1e-5)


def test_which_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    run(1, tmp_path / "run", "checkpoint.every_steps=2", until=5)
    assert saved_steps(checkpoints) == [5, 4, 2]
    assert (checkpoints / "latest").read_text() == "step_00000005\n"
    assert run(1, tmp_path / "run", until=5).started_at == 5  # the newest
    back = f"checkpoint.resume={checkpoints}/step_00000002"
    assert run(1, tmp_path / "run", back, "checkpoint.save_last=false").started_at == 2  # a checkpoint of this run
    assert run(1, tmp_path / "other", back, until=3).started_at == 2  # another run's
    assert run(1, tmp_path / "other", back, until=3).started_at == 3  # a restart resumes from its newest checkpoint
    assert run(1, tmp_path / "run", "checkpoint.resume=never", until=1).started_at == 0
    assert saved_steps(checkpoints) == [1]
    assert saved_steps(tmp_path / "run" / "checkpoints.1") == [5, 4, 2]  # nothing is lost


def test_keep(tmp_path: Path) -> None:
    every = ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.keep_every=3"]
    run(2, tmp_path, *every, "trainer.zero=1", until=7)
    assert saved_steps(tmp_path / "checkpoints") == [7, 6, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")) == []


def test_no_steps_saves_what_a_run_starts_from(tmp_path: Path) -> None:
    start = run(2, tmp_path, "trainer.tp=2", "trainer.steps=0")
    assert saved_steps(tmp_path / "checkpoints") == [0]
    restarted = run(1, tmp_path, "trainer.steps=0")
    assert_same(restarted.tensors, start.tensors)
    assert saved_steps(tmp_path / "checkpoints") == [0]


def test_blocking_saves_are_the_same(tmp_path: Path) -> None:
    one = run(1, tmp_path / "async", "checkpoint.every_steps=1", until=2)
    other = run(1, tmp_path / "sync", "checkpoint.every_steps=1", "checkpoint.asynchronous=false", until=2)
    assert_same(one.tensors, other.tensors)
    step = Path("checkpoints/step_00000001/rank_00000.safetensors")
    assert (tmp_path / "async" / step).read_bytes() == (tmp_path / "sync" / step).read_bytes()


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("one_step")
    run(1, folder, until=1)
    return folder


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.hidden_size=64", "model.hidden_size"),
        ("optim.name=sgd", "optim.name"),
        ("trainer.global_batch_size=4", "trainer.global_batch_size"),
        ("trainer.seed=1", "trainer.seed"),
        ("data.seq_length=8", "data.seq_length"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(one_step: Path, override: str, named: str) -> None:
    with raises_with_message(RankFailed, f"ConfigError.*{named}"):
        run(1, one_step, override, until=2)
    assert saved_steps(one_step / "checkpoints") == [1]


NEWER = {
    "model": ["model_type"],
    "trainer": ["cp", "cp_comm", "float8", "z_loss"],
    "optim": ["momentum", "matrix_lr", "adjust_lr", "split_heads", "qk_clip"],
    "finetune": ["use_rslora", "use_dora"],
}
"""Settings that checkpoints of older versions lack."""


def test_a_checkpoint_without_newer_settings_is_read(tmp_path: Path) -> None:
    whole = run(1, tmp_path / "whole", *ADAM, until=4)
    run(1, tmp_path / "old", *ADAM, until=2)
    folder = find_checkpoint(tmp_path / "old")
    body = json.loads((folder / NAME).read_text())
    del body["checksum"]
    for section, names in NEWER.items():
        for name in names:
            del body["state"]["settings"][section][name]
    (folder / NAME).write_text(json.dumps({**body, "checksum": _checksum(body)}))
    export(folder, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "llama"
    second = run(1, tmp_path / "old", *ADAM, until=4)
    assert second.started_at == 2 and second.losses == {step: whole.losses[step] for step in (3, 4)}
