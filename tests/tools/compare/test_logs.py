"""Logs of this project and other programs, complete and damaged, have the same curve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.tools.compare.cli import labels
from tests.tools.compare.helpers import BATCH, compared, events, falling, identity, problems, write_metrics

STEPS = 60
LOSSES = falling(STEPS)


def loss(step: int) -> float:
    return float(LOSSES[step - 1])


def samples(step: int) -> float:
    return step * BATCH


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return write_metrics(tmp_path / "reference", LOSSES)


def agrees(reference: str, other: str, **options: Sequence[str]) -> None:
    """Assert that the other run has the same curve over the same samples."""
    result = compared(reference, other, tolerance=1e-6, **options)  # an event file holds float32
    assert result.agree and result.grid.bins == STEPS, result.compared[0].run
    assert result.compared[0].run.samples[-1] == STEPS * BATCH


def nemo(folder: Path, steps: range = range(1, STEPS + 1), purge: int | None = None, factor: float = 1.0) -> str:
    scalars = [
        ("reduced_train_loss", lambda step: factor * loss(step), identity),
        ("consumed_samples", samples, identity),
        ("global_step", identity, identity),
        ("train_step_timing in s", lambda step: 0.25, identity),
    ]
    return events(folder, steps, scalars, purge)


def test_nemo(tmp_path: Path, reference: str) -> None:
    nemo(tmp_path / "nemo" / "2024-01-01")
    agrees(reference, str(tmp_path / "nemo"))  # event files are in a subfolder
    assert compared(reference, str(tmp_path / "nemo")).compared[0].speed_ratio == pytest.approx(2)


def test_a_run_folder_with_tensorboard_metrics(tmp_path: Path, reference: str) -> None:
    nemo(tmp_path / "run" / "tensorboard")
    agrees(reference, str(tmp_path / "run"))
    file = next((tmp_path / "run" / "tensorboard").iterdir())
    agrees(reference, str(file))


@pytest.mark.parametrize("how", ["over samples", "batch size"])
def test_megatron_lm(tmp_path: Path, reference: str, how: str) -> None:
    scalars: list[Any] = [("lm loss", loss, identity), ("throughput", identity, identity)]
    scalars += [("iteration-time", lambda step: 0.125, identity)]
    scalars += (
        [("lm loss vs samples", loss, samples)] if how == "over samples" else [("batch-size", lambda _: 8, identity)]
    )
    run = events(tmp_path / "megatron", range(1, STEPS + 1), scalars)
    agrees(reference, run)
    one = compared(reference, run).compared[0].run
    assert one.program == "Megatron-LM" and one.speed == pytest.approx(64), "its throughput is TFLOP/s, not samples"


def test_hugging_face_trainer(tmp_path: Path, reference: str) -> None:
    run = events(tmp_path / "runs" / "host", range(1, STEPS + 1), [("train/loss", loss, identity)])
    (problem,) = problems(reference, run)
    assert "logs no consumed samples" in problem.rule and f"--samples-per-step {run}=N" in problem.instead
    agrees(reference, run, samples_per_step=["8"])
    agrees(reference, run, samples_per_step=["99", f"{run}=8"])


@pytest.mark.parametrize(("tag", "every"), [("train_loss", 1), ("train_loss", 5), ("my/loss", 1)])
def test_lightning_counts_steps_from_zero(tmp_path: Path, tag: str, every: int) -> None:
    """The first batch is logged at step 0, or with log_every_n_steps=5 the fifth at step 4."""
    logged = range(every, STEPS + 1, every)
    run = events(tmp_path / "lightning", logged, [(tag, loss, lambda step: step - 1)])
    reference = events(
        tmp_path / "nemo", logged, [("reduced_train_loss", loss, identity), ("consumed_samples", samples, identity)]
    )
    result = compared(
        reference, run, tolerance=1e-6, samples_per_step=["8"], tag=[f"loss={tag}", "loss=reduced_train_loss"]
    )
    assert result.compared[0].largest == 0 and result.compared[0].run.samples[-1] == STEPS * BATCH


def test_trainer_state(tmp_path: Path, reference: str) -> None:
    history = [{"step": step, "epoch": step / STEPS, "loss": loss(step)} for step in range(1, STEPS + 1)]
    # The last record of Trainer has the mean loss of the run, which is not a point of the curve.
    history.append({"step": STEPS, "train_loss": 9.9, "train_samples_per_second": 48.0})
    for number, records in ((9, history[:9]), (60, history)):
        folder = tmp_path / "hf" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    for path in (tmp_path / "hf", folder, folder / "trainer_state.json"):
        agrees(reference, str(path), samples_per_step=["8"])
    one = compared(reference, str(tmp_path / "hf"), samples_per_step=["8"]).compared[0].run
    assert one.speed == 48 and one.program == "Hugging Face Trainer"


def test_custom_tags(tmp_path: Path, reference: str) -> None:
    run = events(tmp_path / "own", range(1, STEPS + 1), [("my/loss", loss, identity), ("my/seen", samples, identity)])
    tags = ["loss=my/loss", "loss=reduced_train_loss", "samples=my/seen", "samples=consumed_samples"]
    agrees(reference, run, tag=tags)
    missing = problems(reference, run, tag=["loss=my/loss"])
    rules = [(problem.value, problem.rule) for problem in missing]
    assert len(missing) == 2, "the reference has no my/loss, the other no samples"
    assert "names tried: my/loss" in rules[0][1] and "logs no consumed samples" in rules[1][1]


@pytest.mark.parametrize("purge", [41, None], ids=["purged", "overlapping"])
def test_the_later_attempt_of_a_resumed_run_counts(tmp_path: Path, reference: str, purge: int | None) -> None:
    """The first attempt has wrong losses from step 41 to 50; the second starts at step 41."""
    folder = tmp_path / "resumed"
    nemo(folder, range(1, 41))
    nemo(folder, range(41, 51), factor=3.0)
    nemo(folder, range(41, STEPS + 1), purge=purge)
    agrees(reference, str(folder))
    run = compared(reference, str(folder)).compared[0].run
    assert np.all(np.diff(run.samples) > 0) and "10 steps were logged twice" in run.notes[0]


def test_purged_points_of_a_resumed_run_are_dropped(tmp_path: Path, reference: str) -> None:
    folder = tmp_path / "resumed"
    nemo(folder, range(1, 51))
    nemo(folder, range(0), purge=41)  # has no step yet
    assert compared(reference, str(folder)).compared[0].run.samples[-1] == 40 * BATCH
    nemo(folder, range(41, 44), purge=41)
    assert compared(reference, str(folder)).compared[0].run.samples[-1] == 43 * BATCH


def test_a_purge_mark_does_not_cut_series_over_samples(tmp_path: Path, reference: str) -> None:
    folder = tmp_path / "megatron"
    events(folder, range(1, 51), [("lm loss", loss, identity), ("lm loss vs samples", loss, samples)])
    events(folder, range(0), [], purge=41)
    run = compared(reference, str(folder)).compared[0].run
    assert run.samples[-1] == 50 * BATCH, "the mark counts steps, not samples"


def test_repeated_samples_are_one_point(tmp_path: Path, reference: str) -> None:
    """Event files store float32, so two steps can have the same samples above 2^24."""
    count = lambda step: samples(step - step % 2)  # noqa: E731
    scalars = [("reduced_train_loss", loss, identity), ("consumed_samples", count, identity)]
    run = compared(reference, events(tmp_path / "coarse", range(1, STEPS + 1), scalars)).compared[0].run
    assert np.all(np.diff(run.samples) > 0) and len(run.samples) == STEPS // 2 + 1


def test_truncated_logs(tmp_path: Path, reference: str) -> None:
    metrics = Path(reference, "metrics.jsonl")
    half = tmp_path / "half" / "metrics.jsonl"
    half.parent.mkdir()
    half.write_bytes(metrics.read_bytes() + metrics.read_bytes()[:70])
    agrees(reference, str(half))
    folder = tmp_path / "cut"
    nemo(folder)
    file = next(folder.iterdir())
    file.write_bytes(file.read_bytes()[:-5])
    run = compared(reference, str(folder)).compared[0].run
    assert run.samples[-1] >= (STEPS - 1) * BATCH
    broken = tmp_path / "broken" / "metrics.jsonl"
    broken.parent.mkdir()
    broken.write_bytes(metrics.read_bytes()[:70] + b"\n" + metrics.read_bytes())
    (problem,) = problems(reference, str(broken))
    assert "line 1" in problem.rule


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_step").mkdir()
    (tmp_path / "no_step" / "metrics.jsonl").touch()
    steps = range(1, 5)
    untagged = events(tmp_path / "untagged", steps, [("val/acc", identity, identity), ("speed", identity, identity)])
    for name in ("one", "two"):
        events(tmp_path / "several" / name, steps, [("loss", identity, identity)])
    paths = [str(tmp_path / name) for name in ("gone", "empty", "no_step", "several")]
    all_problems = problems(
        *paths, untagged, tag=["los=x"], samples_per_step=["0", "other=3"], tolerance=-1.0, window=0.0
    )
    messages = {(one.field, str(one.value)): f"{one.rule} {one.instead}" for one in all_problems}
    assert len(all_problems) == len(messages) == 10
    for path, words in zip(paths, ("no such file", "has no metrics.jsonl", "no steps yet", "one, two"), strict=True):
        assert words in messages["run", path]
    assert "available: speed, val/acc" in messages["run", untagged]
    assert "a role of loss, samples" in messages["--tag", "los=x"]
    assert {field for field, _ in messages} == {"run", "--tag", "--samples-per-step", "--tolerance", "--window"}


def test_labels_are_unique() -> None:
    assert labels(["runs/a", "runs/b/metrics.jsonl"]) == ["a", "b"]
    assert labels(["x/a/tensorboard", "y/a"]) == ["x/a", "y/a"]
    assert labels(["runs/a", "runs/a"]) == ["runs/a", "runs/a (2)"]
    assert labels([".", "\x1b[31m\udcff"]) == [".", r"\x1b[31m\udcff"]
    assert labels(["/runs/a", "runs/a"]) == ["/runs/a", "runs/a"]
    assert labels(["/runs/a", "/runs/a", "/"]) == ["/runs/a", "/runs/a (2)", "/"]
