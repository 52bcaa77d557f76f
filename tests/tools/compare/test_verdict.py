"""Verdicts on curves with a known answer."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.config import ConfigError, Problem
from megatron_llama.tools.compare.cli import compare_runs, labels, main, parser
from megatron_llama.tools.compare.report import as_text
from megatron_llama.tools.compare.verdict import Comparison, degrees_of_freedom, persistence, student_t
from megatron_llama.train.loss_curve import Floats
from tests.golden import GoldenFiles

STEPS, BATCH = 400, 8


def falling(steps: int = STEPS, batch: int = BATCH) -> Floats:
    """Return a smooth loss that falls from 6 to 2 over samples, independent of the batch size."""
    samples = batch * np.arange(1, steps + 1)
    return 2 + 4 * np.exp(-samples / 800)


def noisy(curve: Floats, seed: int, size: float = 0.02) -> Floats:
    """Add independent normal noise of relative standard deviation ``size`` to each step."""
    return curve * (1 + size * np.random.default_rng(seed).standard_normal(len(curve)))


def write_metrics(path: Path, losses: Iterable[float], batch: int = BATCH, seconds: float = 0.5) -> str:
    """Write a run folder with a metrics.jsonl like the trainer, NaN as null."""
    path.mkdir(parents=True)
    lines = [
        {
            "step": step,
            "consumed_samples": step * batch,
            "consumed_tokens": step * batch * 128,
            "reduced_train_loss": float(loss) if math.isfinite(loss) else None,
            "step_time_s": seconds,
        }
        for step, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


Scalars = Sequence[tuple[str, Callable[[int], float], Callable[[int], float]]]


def events(folder: Path, steps: Iterable[int], scalars: Scalars, purge: int | None = None) -> str:
    """Write TensorBoard events; ``scalars`` are (tag, value of a step, axis of a step)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{len(list(folder.glob('*')))}")
    for step in steps:
        for tag, value, axis in scalars:
            writer.add_scalar(tag, value(step), axis(step))
    writer.close()
    return str(folder)


def identity(step: int) -> float:
    return step


def compared(*runs: str, **options: float | Sequence[str]) -> Comparison:
    """Compare ``runs`` as scripts/compare.py does; list options are repeated, except ``seeds``."""
    arguments = list(runs)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, int | float):
            arguments.append(f"{option}={value}")
        elif name == "seeds":
            arguments += [option, *value]
        else:
            arguments += [f"{option}={one}" for one in value]
    return compare_runs(parser().parse_args(arguments))


def problems(*runs: str, **options: float | Sequence[str]) -> list[Problem]:
    try:
        compared(*runs, **options)
    except ConfigError as error:
        return list(error.problems)
    return []


SAMPLES = STEPS * BATCH
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda name, losses, **options: write_metrics(tmp_path / name, losses, **options)


@pytest.mark.parametrize("gap", [0.0, 0.0099, 0.0101, -0.0099, -0.0101])
@pytest.mark.parametrize("steps", [16, 20, STEPS])
def test_a_constant_gap_is_measured_and_judged(write: Write, gap: float, steps: int) -> None:
    a = write("a", falling(steps))
    result = compared(a, write("b", falling(steps) * (1 + gap)), tolerance=0.01)
    one = result.compared[0]
    assert result.agree is (abs(gap) < 0.01)
    assert one.largest == pytest.approx(gap) and one.area == pytest.approx(abs(gap))
    assert one.final / result.reference_final - 1 == pytest.approx(gap)
    if not result.agree:
        assert one.divergence is not None and one.divergence.end is None
        assert one.divergence.start == pytest.approx(result.grid.window * BATCH / 2), "the first window"


@pytest.mark.parametrize("where", [5, STEPS // 2, STEPS - 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_spike_is_not_a_divergence(write: Write, where: int, steps: int) -> None:
    losses = falling()
    losses[where : where + steps] = 50.0
    one = compared(write("a", falling()), write("b", losses)).compared[0]
    assert one.divergence is None and one.largest > 0.3, "the gap is reported, but is not a divergence"


@pytest.mark.parametrize(
    ("first", "last", "factor", "starts", "ends"),
    [
        # The gap reaches 1 % after 20 steps; the mean of a line over a window is its center.
        (200, STEPS, 1 + 0.0005 * np.arange(1, STEPS - 199), (217, 223), None),
        (100, 200, 1.05, (90, 105), (195, 210)),
        (STEPS - 8, STEPS, 1.5, (0.9 * STEPS, STEPS), None),  # two fifths of a window
        (200, 212, np.nan, (195, 206), (200, 230)),  # more than half of a window
    ],
)
def test_divergences(
    write: Write, first: int, last: int, factor: Any, starts: tuple[float, float], ends: tuple[float, float] | None
) -> None:
    losses = falling()
    losses[first:last] *= factor
    divergence = compared(write("a", falling()), write("b", losses)).compared[0].divergence
    assert divergence is not None and starts[0] * BATCH < divergence.start < starts[1] * BATCH
    assert (divergence.end is None) == (ends is None)
    assert divergence.end is None or ends is None or ends[0] * BATCH < divergence.end < ends[1] * BATCH
    assert ("not finite" in divergence.reason) == bool(np.isnan(factor).any())


def test_noise_within_the_spread_of_seeds_agrees(write: Write) -> None:
    """2 % noise causes smoothed gaps of 1 %, which the seeds allow; a shift of 4 % is rejected."""
    drawn = [write(f"seed{seed}", noisy(falling(), seed)) for seed in range(4)]
    honest = [write(f"b{seed}", noisy(falling(), seed)) for seed in range(10, 30)]
    shifted = write("shifted", noisy(falling(), 99) * 1.04)
    result = compared(drawn[0], *honest, shifted, seeds=drawn[1:], tolerance=0.001)
    assert [one.divergence is None for one in result.compared] == [True] * 20 + [False]
    blind = compared(drawn[0], *honest, tolerance=0.001)
    assert sum(one.divergence is None for one in blind.compared) < 10, "without seeds most runs are rejected"
    assert 0.001 < float(result.band.mean()) < 0.03


def test_seeds_average_the_reference_and_extend_the_band(write: Write) -> None:
    seeds = [write(f"seed{i}", falling() * (1 + shift)) for i, shift in enumerate((-0.02, 0.02))]
    middle = write("middle", falling())
    result = compared(seeds[0], middle, seeds=seeds[1:], tolerance=0.01)
    assert abs(result.compared[0].largest) < 1e-12 and result.reference_final == pytest.approx(falling()[-20:].mean())
    without = compared(seeds[0], middle, seeds=seeds[1:], tolerance=0.0)
    assert result.band == pytest.approx(without.band + 0.01)


def test_separate_seeds_extend_the_band(write: Write) -> None:
    """Four runs at constant distances are four samples, independent of the number of steps."""
    loose = [write(f"k{i}", falling() * (1 + 0.002 * i)) for i in range(4)]
    spread = 0.002 * np.std([0, 1, 2, 3], ddof=1) / 1.003
    result = compared(loose[0], write("same", falling()), seeds=loose[1:], tolerance=0.0)
    assert result.band == pytest.approx(student_t(0.995, 3) * spread * np.sqrt(1.25), rel=1e-3)


def test_students_t_and_its_degrees_of_freedom() -> None:
    # Values of the published tables.
    for freedom, value in ((1, 63.657), (2, 9.925), (3, 5.841), (10, 3.169), (100, 2.626)):
        assert student_t(0.995, freedom) == pytest.approx(value, abs=6e-4)
    assert degrees_of_freedom(4, 5, 0.0) == pytest.approx(15) and degrees_of_freedom(4, 5, 1.0) == pytest.approx(3)
    draws = np.random.default_rng(0)
    independent = draws.standard_normal((6, 4000))
    constant = draws.standard_normal((6, 1)) * np.ones((1, 4000))
    assert (
        persistence(independent - independent.mean(0), 1) < 0.02 and persistence(constant - constant.mean(0), 1) > 0.99
    )


def test_duplicate_seeds_are_rejected(write: Write) -> None:
    a, twin, b = (write(name, falling()) for name in ("a", "twin", "b"))
    (problem,) = problems(a, b, seeds=[twin])
    assert problem.field == "--seeds" and "has exactly the losses of" in problem.rule
    for twice in ([a], [b], [twin, twin]):
        assert any("given twice" in problem.rule for problem in problems(a, b, seeds=twice))
    assert [problem.field for problem in problems(a, b, a)] == ["run"]


@pytest.mark.parametrize("batch", [2, 16, 24])
def test_different_steps_are_aligned_on_samples(write: Write, batch: int) -> None:
    """Equal losses per sample in batches of different sizes, where a step has the mean over its samples."""
    fine = np.repeat(np.random.default_rng(3).uniform(1, 4, SAMPLES // 48), 48)  # a loss for each sample
    per_step = [fine.reshape(-1, size).mean(axis=1) for size in (BATCH, batch)]
    a = write("a", per_step[0])
    result = compared(a, write("b", per_step[1], batch=batch), tolerance=1e-9)
    assert result.grid.width == max(batch, BATCH)
    assert result.agree and result.compared[0].area < 1e-12


def test_no_samples_in_common(write: Write) -> None:
    a, late = write("a", falling(20)), write("late", falling(60))
    metrics = Path(late, "metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[30:]))
    (problem,) = problems(a, late)
    assert (
        "no consumed samples in common" in problem.rule and "8 to 160" in problem.rule and "248 to 480" in problem.rule
    )


def with_losses(losses: Floats, steps: slice | int, value: float) -> Floats:
    losses = losses.copy()
    losses[steps] = value
    return losses


def test_page_of_each_situation(write: Write) -> None:
    """Short, rare, late and failed runs, and many runs at once."""
    whole, steps = falling(), (2, 4, 15)
    a, quarter, four = write("a", whole), write("quarter", whole[: STEPS // 4]), write("four", falling(4))
    apart = write("apart", np.where(np.arange(STEPS) < STEPS // 2, whole, 2 * whole))
    skipped = with_losses(whole, 50, np.nan)
    one_nan, ended = write("skipped", skipped), write("ended", with_losses(skipped, slice(-2, None), np.inf))
    gaps = [write(f"gap_{gap}", whole * gap) for gap in (1.001, 1.2)]
    short = [(write(f"of_{n}", falling(n)), write(f"of_{n}_high", falling(n) * 1.1)) for n in (*steps, 40)]
    pairs = list(zip(steps, short[:3], strict=True))
    situations = {
        "a run that differs decides": compared(a, *gaps),
        "a run that ends early, required in part": compared(a, quarter, min_overlap=0.25),
        "a run that ends early": compared(a, quarter),
        "a reference that ends early": compared(quarter, a),
        "a run that differs after the end of the other": compared(apart, quarter, min_overlap=0.25),
        **{f"{n} steps": compared(*pair) for n, pair in pairs},
        **{f"{n} steps, equal": compared(pair[0], write(f"twin_{n}", falling(n))) for n, pair in pairs},
        "40 steps, a window of 24": compared(*short[3], window=24.0 * BATCH),
        "a short run": compared(a, four),
        "a short reference": compared(four, a),
        "200 steps that are logged every 50": compared(
            write("dense", falling(200)), write("rare", falling(4, 50 * BATCH), batch=50 * BATCH)
        ),
        "a short run that ends in NaN": compared(four, write("nan", with_losses(falling(4), -1, np.nan))),
        "a skipped step": compared(a, one_nan),
        "a run that has failed": compared(a, ended),
        "a reference that has failed": compared(ended, a),
        "many runs": compared(*(write(f"run_{number}", falling(40)) for number in range(6))),
    }
    page = ""
    for name, result in situations.items():
        text = as_text(result)
        assert max(map(len, text.splitlines())) <= 79, name
        page += f"== {name}\nagree: {result.agree}, differ: {result.differ}\n{text}\n"
    # Gaps of equal size: rounding decides where the largest is.
    GoldenFiles.check("tools/compare/verdicts.txt", page, {r"(gap +[-+][\d.]+%) at [\d,]+ samples": r"\1"})
    assert "The curve agrees" in as_text(compared(a, write("n" * 90, whole))), "names may be wider than the page"
    assert [problem.field for problem in problems(a, quarter, min_overlap=90)] == ["--min-overlap"]


LOGGED_STEPS = 60
LOSSES = falling(LOGGED_STEPS)


def loss(step: int) -> float:
    return float(LOSSES[step - 1])


def samples(step: int) -> float:
    return step * BATCH


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return write_metrics(tmp_path / "reference", LOSSES)


def agrees(reference: str, other: str, **options: Sequence[str]) -> None:
    result = compared(reference, other, tolerance=1e-6, **options)  # an event file holds float32
    assert result.agree and result.grid.bins == LOGGED_STEPS, result.compared[0].run
    assert result.compared[0].run.samples[-1] == LOGGED_STEPS * BATCH


def nemo(folder: Path, steps: range = range(1, LOGGED_STEPS + 1), purge: int | None = None, factor: float = 1.0) -> str:
    scalars = [
        ("reduced_train_loss", lambda step: factor * loss(step), identity),
        ("consumed_samples", samples, identity),
        ("global_step", identity, identity),
        ("train_step_timing in s", lambda step: 0.25, identity),
    ]
    return events(folder, steps, scalars, purge)


def test_nemo_and_tensorboard_metrics_of_a_run_folder(tmp_path: Path, reference: str) -> None:
    nemo(tmp_path / "nemo" / "2024-01-01")
    agrees(reference, str(tmp_path / "nemo"))  # event files are in a subfolder
    assert compared(reference, str(tmp_path / "nemo")).compared[0].speed_ratio == pytest.approx(2)
    nemo(tmp_path / "run" / "tensorboard")
    agrees(reference, str(tmp_path / "run"))
    agrees(reference, str(next((tmp_path / "run" / "tensorboard").iterdir())))


@pytest.mark.parametrize("how", ["over samples", "batch size"])
def test_megatron_lm(tmp_path: Path, reference: str, how: str) -> None:
    scalars: list[Any] = [("lm loss", loss, identity), ("throughput", identity, identity)]
    scalars += [("iteration-time", lambda step: 0.125, identity)]
    scalars += (
        [("lm loss vs samples", loss, samples)] if how == "over samples" else [("batch-size", lambda _: 8, identity)]
    )
    run = events(tmp_path / "megatron", range(1, LOGGED_STEPS + 1), scalars)
    agrees(reference, run)
    one = compared(reference, run).compared[0].run
    assert one.program == "Megatron-LM" and one.speed == pytest.approx(64), "its throughput is TFLOP/s, not samples"


def test_hugging_face_trainer(tmp_path: Path, reference: str) -> None:
    run = events(tmp_path / "runs" / "host", range(1, LOGGED_STEPS + 1), [("train/loss", loss, identity)])
    (problem,) = problems(reference, run)
    assert "logs no consumed samples" in problem.rule and f"--samples-per-step {run}=N" in problem.instead
    agrees(reference, run, samples_per_step=["8"])
    agrees(reference, run, samples_per_step=["99", f"{run}=8"])


@pytest.mark.parametrize(("tag", "every"), [("train_loss", 1), ("train_loss", 5), ("my/loss", 1)])
def test_lightning_counts_steps_from_zero(tmp_path: Path, tag: str, every: int) -> None:
    """The first batch is logged at step 0, or with log_every_n_steps=5 the fifth at step 4."""
    logged = range(every, LOGGED_STEPS + 1, every)
    run = events(tmp_path / "lightning", logged, [(tag, loss, lambda step: step - 1)])
    reference = events(
        tmp_path / "nemo", logged, [("reduced_train_loss", loss, identity), ("consumed_samples", samples, identity)]
    )
    result = compared(
        reference, run, tolerance=1e-6, samples_per_step=["8"], tag=[f"loss={tag}", "loss=reduced_train_loss"]
    )
    assert result.compared[0].largest == 0 and result.compared[0].run.samples[-1] == LOGGED_STEPS * BATCH


def test_trainer_state(tmp_path: Path, reference: str) -> None:
    history = [{"step": step, "epoch": step / LOGGED_STEPS, "loss": loss(step)} for step in range(1, LOGGED_STEPS + 1)]
    # The last record of Trainer has the mean loss of the run, which is not a point of the curve.
    history.append({"step": LOGGED_STEPS, "train_loss": 9.9, "train_samples_per_second": 48.0})
    for number, records in ((9, history[:9]), (60, history)):
        folder = tmp_path / "hf" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": records}))
    for path in (tmp_path / "hf", folder, folder / "trainer_state.json"):
        agrees(reference, str(path), samples_per_step=["8"])
    one = compared(reference, str(tmp_path / "hf"), samples_per_step=["8"]).compared[0].run
    assert one.speed == 48 and one.program == "Hugging Face Trainer"


def test_custom_tags(tmp_path: Path, reference: str) -> None:
    run = events(
        tmp_path / "own", range(1, LOGGED_STEPS + 1), [("my/loss", loss, identity), ("my/seen", samples, identity)]
    )
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
    nemo(folder, range(41, LOGGED_STEPS + 1), purge=purge)
    agrees(reference, str(folder))
    run = compared(reference, str(folder)).compared[0].run
    assert np.all(np.diff(run.samples) > 0) and "10 steps were logged twice" in run.notes[0]


def test_purge_marks_of_a_resumed_run_cut_steps_and_not_samples(tmp_path: Path, reference: str) -> None:
    folder = tmp_path / "resumed"
    nemo(folder, range(1, 51))
    nemo(folder, range(0), purge=41)  # has no step yet
    assert compared(reference, str(folder)).compared[0].run.samples[-1] == 40 * BATCH
    nemo(folder, range(41, 44), purge=41)
    assert compared(reference, str(folder)).compared[0].run.samples[-1] == 43 * BATCH
    folder = tmp_path / "megatron"
    events(folder, range(1, 51), [("lm loss", loss, identity), ("lm loss vs samples", loss, samples)])
    events(folder, range(0), [], purge=41)
    run = compared(reference, str(folder)).compared[0].run
    assert run.samples[-1] == 50 * BATCH, "the mark counts steps, not samples"


def test_repeated_samples_are_one_point(tmp_path: Path, reference: str) -> None:
    """Event files store float32, so two steps can have the same samples above 2^24."""
    count = lambda step: samples(step - step % 2)  # noqa: E731
    scalars = [("reduced_train_loss", loss, identity), ("consumed_samples", count, identity)]
    run = compared(reference, events(tmp_path / "coarse", range(1, LOGGED_STEPS + 1), scalars)).compared[0].run
    assert np.all(np.diff(run.samples) > 0) and len(run.samples) == LOGGED_STEPS // 2 + 1


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
    assert compared(reference, str(folder)).compared[0].run.samples[-1] >= (LOGGED_STEPS - 1) * BATCH
    broken = tmp_path / "broken" / "metrics.jsonl"
    broken.parent.mkdir()
    broken.write_bytes(metrics.read_bytes()[:70] + b"\n" + metrics.read_bytes())
    (problem,) = problems(reference, str(broken))
    assert "line 1" in problem.rule


def test_all_errors_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "no_step"):
        Path(name).mkdir()
    Path("no_step/metrics.jsonl").touch()
    steps = range(1, 5)
    events(Path("untagged"), steps, [("val/acc", identity, identity), ("speed", identity, identity)])
    for name in ("one", "two"):
        events(Path("several") / name, steps, [("loss", identity, identity)])
    options = "--tag=los=x --samples-per-step=0 --samples-per-step=other=3 --tolerance=-1 --window=0"
    assert main(["gone", "empty", "no_step", "several", "untagged", *options.split()]) == 2
    GoldenFiles.check("tools/compare/refused.txt", capsys.readouterr().err)


def test_labels_are_unique() -> None:
    assert labels(["runs/a", "runs/b/metrics.jsonl"]) == ["a", "b"]
    assert labels(["x/a/tensorboard", "y/a"]) == ["x/a", "y/a"]
    assert labels(["runs/a", "runs/a"]) == ["runs/a", "runs/a (2)"]
    assert labels([".", "\x1b[31m\udcff"]) == [".", r"\x1b[31m\udcff"]
    assert labels(["/runs/a", "runs/a"]) == ["/runs/a", "runs/a"]
    assert labels(["/runs/a", "/runs/a", "/"]) == ["/runs/a", "/runs/a (2)", "/"]


@pytest.mark.parametrize(("gap", "status"), [(1.0, 0), (1.3, 1)])
def test_report_files(
    tmp_path: Path, gap: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "gpu", falling(200))
    write_metrics(tmp_path / r"_<cpu> & $\frac$", noisy(falling(200), 1, size=0.001) * gap, seconds=1.0)
    assert main(["gpu", r"_<cpu> & $\frac$", "--tolerance", "0.01", "--out", "new/report"]) == status
    GoldenFiles.check(f"tools/compare/status_{status}.txt", capsys.readouterr().out)
    picture = Path("new/report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) > (1000, 800)
    page = Path("new/report.html").read_text(encoding="utf-8")
    pictures = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    assert len(pictures) == 2, "large and small"
    assert all(b"prefers-color-scheme:dark" in base64.b64decode(picture) for picture in pictures), "light and dark"
    assert all(rb"_&lt;cpu&gt; &amp; $\frac$" in base64.b64decode(picture) for picture in pictures), "in the legends"
    outside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|<script|<link|url\(|@import|file:", outside), "the page is self-contained"
    assert r"&lt;cpu&gt; &amp; $\frac$" in outside and "<cpu>" not in outside
    assert 'name="viewport"' in outside


def test_a_full_disk_keeps_the_last_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_metrics(tmp_path / name, falling(200))
    (tmp_path / "report.png").write_text("last")
    monkeypatch.setattr(os, "fsync", lambda file: os.write(os.open("/dev/full", os.O_WRONLY), b"text"))
    assert main([str(tmp_path / name) for name in ("a", "b")] + ["--out", str(tmp_path / "report")]) == 2
    assert (tmp_path / "report.png").read_text() == "last"


def test_short_runs_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_metrics(tmp_path / name, falling(4))
    assert main(["a", "b"]) == 2
    GoldenFiles.check("tools/compare/too_short.txt", capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "only --out writes files"
    with pytest.raises(SystemExit, match="2"):
        main(["one"])
