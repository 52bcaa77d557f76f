"""Verdicts on curves with a known answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_llama.tools.compare.report import as_text
from megatron_llama.tools.compare.verdict import degrees_of_freedom, persistence, student_t
from megatron_llama.train.loss_curve import Floats
from tests.golden import GoldenFiles
from tests.tools.compare.helpers import BATCH, STEPS, compared, falling, noisy, problems, write_metrics

SAMPLES = STEPS * BATCH
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a run of the test's folder."""
    return lambda name, losses, **options: write_metrics(tmp_path / name, losses, **options)


def test_equal_curves_agree(write: Write) -> None:
    a, b = write("a", falling()), write("b", falling(), seconds=0.25)
    result = compared(a, b, tolerance=0.0)
    one = result.compared[0]
    assert result.agree and one.divergence is None
    assert one.area == 0 and one.largest == 0 and one.final == result.reference_final
    assert one.run.speed == pytest.approx(32) and one.speed_ratio == pytest.approx(2)


@pytest.mark.parametrize(("gap", "agree"), [(0.0099, True), (0.0101, False), (-0.0099, True), (-0.0101, False)])
@pytest.mark.parametrize("steps", [16, 20, STEPS])
def test_a_constant_gap_is_measured_and_judged(write: Write, gap: float, agree: bool, steps: int) -> None:
    a = write("a", falling(steps))
    b = write("b", falling(steps) * (1 + gap))
    result = compared(a, b, tolerance=0.01)
    one = result.compared[0]
    assert result.agree is agree
    assert one.largest == pytest.approx(gap) and one.area == pytest.approx(abs(gap))
    assert one.final / result.reference_final - 1 == pytest.approx(gap)
    if not agree:
        assert one.divergence is not None and one.divergence.end is None
        assert one.divergence.start == pytest.approx(result.grid.window * BATCH / 2), "the first window"


def test_the_smoothed_curve_is_the_mean_of_its_window(write: Write) -> None:
    losses = np.random.default_rng(0).uniform(1, 2, STEPS)
    result = compared(write("a", losses), write("b", falling()), window=10 * BATCH)
    assert result.grid.window == 10
    assert result.reference_curve == pytest.approx([losses[i : i + 10].mean() for i in range(STEPS - 9)])
    assert result.grid.centers[0] == 5 * BATCH and result.grid.centers[-1] == SAMPLES - 5 * BATCH


def test_a_slow_divergence_starts_where_it_leaves_the_band(write: Write) -> None:
    start = STEPS // 2
    growth = 1 + 0.0005 * np.clip(np.arange(1, STEPS + 1) - start, 0, None)
    a, b = write("a", np.full(STEPS, 3.0)), write("b", 3.0 * growth)
    divergence = compared(a, b, tolerance=0.01).compared[0].divergence
    # The gap reaches 1 % after 20 steps; the mean of a line over a window is its center.
    assert divergence is not None and divergence.start == pytest.approx((start + 20) * BATCH, abs=2 * BATCH)
    assert divergence.end is None


@pytest.mark.parametrize("where", [5, STEPS // 2, STEPS - 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_spike_is_not_a_divergence(write: Write, where: int, steps: int) -> None:
    losses = falling()
    losses[where : where + steps] = 50.0
    one = compared(write("a", falling()), write("b", losses)).compared[0]
    assert one.agrees and one.largest > 0.3, "the gap is reported, but is not a divergence"


@pytest.mark.parametrize(
    ("first", "last", "factor", "starts", "ends"),
    [
        (100, 200, 1.05, (90, 105), (195, 210)),
        (STEPS - 8, STEPS, 1.5, (0.9 * STEPS, STEPS), None),  # two fifths of a window
        (200, 212, np.nan, (195, 206), (200, 230)),  # more than half of a window
    ],
)
def test_divergences(
    write: Write, first: int, last: int, factor: float, starts: tuple[float, float], ends: tuple[float, float] | None
) -> None:
    losses = falling()
    losses[first:last] *= factor
    divergence = compared(write("a", falling()), write("b", losses)).compared[0].divergence
    assert divergence is not None and starts[0] * BATCH < divergence.start < starts[1] * BATCH
    assert (divergence.end is None) == (ends is None)
    assert divergence.end is None or ends is None or ends[0] * BATCH < divergence.end < ends[1] * BATCH
    assert ("not finite" in divergence.reason) == bool(np.isnan(factor))


def test_noise_within_the_spread_of_seeds_agrees(write: Write) -> None:
    """2 % noise causes smoothed gaps of 1 %, which the seeds allow; a shift of 4 % is rejected."""
    drawn = [write(f"seed{seed}", noisy(falling(), seed)) for seed in range(4)]
    honest = [write(f"b{seed}", noisy(falling(), seed)) for seed in range(10, 30)]
    shifted = write("shifted", noisy(falling(), 99) * 1.04)
    result = compared(drawn[0], *honest, shifted, seeds=drawn[1:], tolerance=0.001)
    assert [one.agrees for one in result.compared] == [True] * 20 + [False]
    blind = compared(drawn[0], *honest, tolerance=0.001)
    assert sum(one.agrees for one in blind.compared) < 10, "without seeds most runs are rejected"
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
    result = compared(loose[0], loose[0], seeds=loose[1:], tolerance=0.0)
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


@pytest.mark.parametrize("batch", [2, 16, 24])
def test_different_steps_are_aligned_on_samples(write: Write, batch: int) -> None:
    """Equal losses per sample in batches of different sizes, where a step has the mean over its samples."""
    fine = np.repeat(np.random.default_rng(3).uniform(1, 4, SAMPLES // 48), 48)  # a loss for each sample
    per_step = [fine.reshape(-1, size).mean(axis=1) for size in (BATCH, batch)]
    a = write("a", per_step[0])
    b = write("b", per_step[1], batch=batch)
    result = compared(a, b, tolerance=1e-9)
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
    assert "The curve agrees" in as_text(compared(a, a)), "names may be wider than the page"
    assert [problem.field for problem in problems(a, quarter, min_overlap=90)] == ["--min-overlap"]
