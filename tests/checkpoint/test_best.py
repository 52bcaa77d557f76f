"""The checkpoint with the lowest validation loss is named by ``best`` and never deleted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_llama.checkpoint import folder
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.export import export
from megatron_llama.checkpoint.folder import best_checkpoint, find_checkpoint, read_pointer, saved_steps
from megatron_llama.checkpoint.manifest import read_manifest
from tests.checkpoint.jobs import Job
from tests.checkpoint.runner import run
from tests.ranks import RankFailed

KEEP = ["checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.keep_best=true", "trainer.val_every_steps=1"]
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0, 6: math.nan, 8: 2.0}
"""By step; the others are not validated."""


def validating(losses: dict[int, float]) -> Callable[[Checkpointer], None]:
    """Makes the run report these validation losses."""

    def tamper(checkpointer: Checkpointer) -> None:
        after_step = checkpointer.after_step

        def noted(step: int, stop: bool = False, *_: object) -> bool:
            return after_step(step, stop, losses.get(step))

        checkpointer.after_step = noted  # type: ignore[method-assign]

    return tamper


def best(run_dir: Path) -> str:
    """The content of the pointer file ``best``."""
    return (run_dir / "checkpoints" / "best").read_text()


def test_it_is_never_pruned(tmp_path: Path) -> None:
    run(2, tmp_path, *KEEP, until=7, tamper=validating(LOSSES))
    assert saved_steps(tmp_path / "checkpoints") == [7, 2]  # the first of two that are equal
    assert best(tmp_path) == "step_00000002\n"
    kept_steps = find_checkpoint(tmp_path / "checkpoints" / "best")
    assert read_manifest(kept_steps).state.val_loss == 3.0
    assert find_checkpoint(tmp_path).name == "step_00000007"


def test_a_resumed_run_keeps_it_until_there_is_a_better_one(tmp_path: Path) -> None:
    run(1, tmp_path, *KEEP, until=5, tamper=validating(LOSSES))
    assert run(1, tmp_path, *KEEP, until=7, tamper=validating(LOSSES)).started_at == 5
    assert saved_steps(tmp_path / "checkpoints") == [7, 2]
    run(1, tmp_path, *KEEP, until=9, tamper=validating(LOSSES))
    assert saved_steps(tmp_path / "checkpoints") == [9, 8]
    assert best(tmp_path) == "step_00000008\n"
    back = f"checkpoint.resume={tmp_path}/checkpoints/best"
    assert run(1, tmp_path, *KEEP, back, until=8, tamper=validating(LOSSES)).started_at == 8


def test_without_a_loss_there_is_no_best(tmp_path: Path) -> None:
    run(1, tmp_path, *KEEP, until=3)
    assert saved_steps(tmp_path / "checkpoints") == [3]
    assert not (tmp_path / "checkpoints" / "best").exists()
    run(1, tmp_path / "other", *KEEP[:2], until=3, tamper=validating(LOSSES))  # without keep_best
    assert saved_steps(tmp_path / "other" / "checkpoints") == [3]


def exporting(losses: dict[int, float]) -> Callable[[Checkpointer], None]:
    """Return a change of the checkpointer that exports at the end of a run with these validation losses."""

    def change(checkpointer: Checkpointer) -> None:
        validating(losses)(checkpointer)
        finish = checkpointer.finish

        def then_export(step: int) -> None:
            finish(step)
            checkpointer.export()

        checkpointer.finish = then_export  # type: ignore[method-assign]

    return change


@pytest.mark.parametrize(
    ("losses", "step", "message"),
    [(LOSSES, 2, "step_00000002 (best validation loss) "), ({}, 3, "step_00000003 (last) ")],
    ids=["validated", "never"],
)
def test_the_best_is_what_is_exported(
    losses: dict[int, float], step: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(1, tmp_path, *KEEP, "checkpoint.export_hf=true", until=3, tamper=exporting(losses))
    assert f"exported {message}" in capfd.readouterr().err
    expected = export(tmp_path / "checkpoints" / f"step_{step:08d}", tmp_path / "expected").folder
    ours = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert ours == (expected / "model.safetensors").read_bytes()


def test_extended_run_keeps_its_first_export(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exports = ("checkpoint.export_hf=true", "checkpoint.keep=2")
    for steps, message in ((2, "exported step_00000002"), (2, "hf exists"), (3, "hf_step_00000003"), (3, "hf exists")):
        run(1, tmp_path, f"trainer.steps={steps}", *exports, until=steps, tamper=exporting({}))
        assert message in capfd.readouterr().err
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "hf_step_00000003"))
    assert first != second and len([*tmp_path.glob("hf*")]) == 2


@pytest.mark.parametrize("moment", ["before the marker", "before the pruning"])
def test_killed_while_it_changes(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(1, tmp_path, *KEEP, until=7, tamper=validating(LOSSES))

    def killed(*arguments: object) -> None:
        raise OSError(5, "killed", "here")

    name = "point_to_best" if moment == "before the marker" else "prune"

    def kill(checkpointer: Checkpointer) -> None:
        validating(LOSSES)(checkpointer)
        resume = checkpointer.resume

        def resume_first() -> int:  # it looks at the marker too
            step = resume()
            monkeypatch.setattr(folder, name, killed)
            return step

        checkpointer.resume = resume_first  # type: ignore[method-assign]

    with pytest.raises(RankFailed, match="killed"):
        run(1, tmp_path, *KEEP, until=8, tamper=kill)
    monkeypatch.undo()
    checkpoints = tmp_path / "checkpoints"
    assert saved_steps(checkpoints) == [8, 7, 2]
    assert best(tmp_path) == ("step_00000002\n" if moment == "before the marker" else "step_00000008\n")
    run(1, tmp_path, *KEEP, until=9, tamper=validating(LOSSES))
    assert (saved_steps(checkpoints), best(tmp_path)) == ([9, 8], "step_00000008\n")


@pytest.mark.parametrize("marker", ["step_00000077\n", "../../elsewhere\n", "\n", None])
def test_a_marker_that_is_wrong_is_mended(tmp_path: Path, marker: str | None) -> None:
    run(1, tmp_path, *KEEP, until=4, tamper=validating(LOSSES))
    path = tmp_path / "checkpoints" / "best"
    path.unlink() if marker is None else path.write_text(marker)
    run(1, tmp_path, *KEEP, until=5, tamper=validating(LOSSES))
    assert best(tmp_path) == "step_00000002\n"


def test_the_loop_says_its_validation_losses(tmp_path: Path) -> None:
    every = ["trainer.steps=9", "checkpoint.every_steps=2", "checkpoint.keep_best=true", "trainer.val_every_steps=3"]
    job = Job(tmp_path / "run", *every, "trainer.val_steps=1", "optim.lr=0.05", "trainer.tp=2")
    assert job.wait() == 0, job.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kept_steps = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    checkpoints = tmp_path / "run" / "checkpoints"
    assert saved_steps(checkpoints) == [9, 8, 6, 4, 2] and sorted(kept_steps) == [3, 6, 9]
    for step in saved_steps(checkpoints):
        assert read_manifest(checkpoints / f"step_{step:08d}").state.val_loss == kept_steps.get(step)
    lowest = min((kept_steps[step], step) for step in (6, 9))[1]
    assert read_pointer(checkpoints, "best") == best_checkpoint(checkpoints) == checkpoints / f"step_{lowest:08d}"
