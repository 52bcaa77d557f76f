"""Curves whose answer is known: what agrees, what does not, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_llama.tools.compare.verdict import degrees_of_freedom, persistence, student_t
from tests.tools.compare.helpers import BATCH, STEPS, compared, falling, noisy, ours, problems

SAMPLES = STEPS * BATCH


def test_equal_curves_agree(tmp_path: Path) -> None:
    a, b = ours(tmp_path / "a", falling()), ours(tmp_path / "b", falling(), seconds=0.25)
    result = compared(a, b, tolerance=0.0)
    one = result.compared[0]
    assert result.agree and one.divergence is None
    assert one.area == 0 and one.largest == 0 and one.final == result.reference_final
    assert one.run.speed == pytest.approx(32) and one.speed_ratio == pytest.approx(2)


@pytest.mark.parametrize(("gap", "agree"), [(0.0099, True), (0.0101, False), (-0.0099, True), (-0.0101, False)])
@pytest.mark.parametrize("steps", [3, 20, STEPS])
def test_a_constant_gap_is_measured_and_judged(tmp_path: Path, gap: float, agree: bool, steps: int) -> None:
    a = ours(tmp_path / "a", falling(steps))
    b = ours(tmp_path / "b", falling(steps) * (1 + gap))
    result = compared(a, b, tolerance=0.01)
    one = result.compared[0]
    assert result.agree is agree
    assert one.largest == pytest.approx(gap) and one.area == pytest.approx(abs(gap))
    assert one.final / result.reference_final - 1 == pytest.approx(gap)
    if not agree:
        assert one.divergence is not None and one.divergence.end is None
        assert one.divergence.start == pytest.approx(result.grid.window * BATCH / 2), "the first window"


def test_the_smoothed_curve_is_the_mean_of_its_window(tmp_path: Path) -> None:
    losses = np.random.default_rng(0).uniform(1, 2, STEPS)
    result = compared(ours(tmp_path / "a", losses), ours(tmp_path / "b", falling()), window=10 * BATCH)
    assert result.grid.window == 10
    assert result.reference_curve == pytest.approx([losses[i : i + 10].mean() for i in range(STEPS - 9)])
    assert result.grid.centres[0] == 5 * BATCH and result.grid.centres[-1] == SAMPLES - 5 * BATCH


def test_a_slow_divergence_is_found_where_it_leaves_the_band(tmp_path: Path) -> None:
    start = STEPS // 2
    growth = 1 + 0.0005 * np.clip(np.arange(1, STEPS + 1) - start, 0, None)
    a, b = ours(tmp_path / "a", np.full(STEPS, 3.0)), ours(tmp_path / "b", 3.0 * growth)
    found = compared(a, b, tolerance=0.01).compared[0].divergence
    # 1 % is reached 20 steps after the start; a window's mean of a straight line is its middle.
    assert found is not None and found.start == pytest.approx((start + 20) * BATCH, abs=2 * BATCH)
    assert found.end is None


def test_a_divergence_that_heals_is_one(tmp_path: Path) -> None:
    losses = falling()
    losses[100:200] *= 1.05
    found = compared(ours(tmp_path / "a", falling()), ours(tmp_path / "b", losses)).compared[0].divergence
    assert found is not None and found.end is not None
    assert 90 * BATCH < found.start < 105 * BATCH and 195 * BATCH < found.end < 210 * BATCH


@pytest.mark.parametrize("where", [5, STEPS // 2, STEPS - 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_spike_is_no_divergence(tmp_path: Path, where: int, steps: int) -> None:
    losses = falling()
    losses[where : where + steps] = 50.0
    one = compared(ours(tmp_path / "a", falling()), ours(tmp_path / "b", losses)).compared[0]
    assert one.agrees and one.largest > 0.3, "it is seen, and not taken for more than it is"


def test_a_curve_that_leaves_at_the_very_end_has_diverged(tmp_path: Path) -> None:
    losses = falling()
    losses[-8:] *= 1.5  # two fifths of a window
    found = compared(ours(tmp_path / "a", falling()), ours(tmp_path / "b", losses)).compared[0].divergence
    assert found is not None and found.start > 0.9 * SAMPLES


def test_the_first_of_several_runs_that_differs_decides(tmp_path: Path) -> None:
    runs = [ours(tmp_path / str(index), falling() * gap) for index, gap in enumerate((1, 1.001, 1.2))]
    result = compared(*runs)
    assert [one.agrees for one in result.compared] == [True, False] and not result.agree


def test_noise_within_the_seeds_spread_agrees_and_a_shift_beyond_does_not(tmp_path: Path) -> None:
    """2 % of noise makes smoothed gaps of 1 %: not to be held against a run, given seeds that show it."""
    drawn = [ours(tmp_path / f"seed{seed}", noisy(falling(), seed)) for seed in range(4)]
    honest = [ours(tmp_path / f"b{seed}", noisy(falling(), seed)) for seed in range(10, 30)]
    shifted = ours(tmp_path / "shifted", noisy(falling(), 99) * 1.04)
    result = compared(drawn[0], *honest, shifted, seeds=drawn[1:], tolerance=0.001)
    assert [one.agrees for one in result.compared] == [True] * 20 + [False]
    blind = compared(drawn[0], *honest, tolerance=0.001)
    assert sum(one.agrees for one in blind.compared) < 10, "without seeds the same noise fails most of them"
    assert 0.001 < float(result.band.mean()) < 0.03


def test_seeds_make_their_mean_the_reference_and_widen_the_tolerance(tmp_path: Path) -> None:
    seeds = [ours(tmp_path / f"seed{i}", falling() * (1 + shift)) for i, shift in enumerate((-0.02, 0.02))]
    middle = ours(tmp_path / "middle", falling())
    result = compared(seeds[0], middle, seeds=seeds[1:], tolerance=0.01)
    assert abs(result.compared[0].largest) < 1e-12 and result.reference_final == pytest.approx(falling()[-20:].mean())
    without = compared(seeds[0], middle, seeds=seeds[1:], tolerance=0.0)
    assert result.band == pytest.approx(without.band + 0.01)


def test_seeds_that_keep_their_distance_widen_the_band(tmp_path: Path) -> None:
    """Four runs at constant distances are four numbers, however many steps they have."""
    loose = [ours(tmp_path / f"k{i}", falling() * (1 + 0.002 * i)) for i in range(4)]
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
    kept = draws.standard_normal((6, 1)) * np.ones((1, 4000))
    assert persistence(independent - independent.mean(0), 1) < 0.02 and persistence(kept - kept.mean(0), 1) > 0.99


def test_one_run_is_no_two_seeds(tmp_path: Path) -> None:
    a, twin, b = (ours(tmp_path / name, falling()) for name in ("a", "twin", "b"))
    (found,) = problems(a, b, seeds=[twin])
    assert found.field == "--seeds" and "to the last digit" in found.rule
    for twice in ([a], [b], [twin, twin]):
        assert any("named twice" in found.rule for found in problems(a, b, seeds=twice))


@pytest.mark.parametrize("batch", [2, 16, 24])
def test_different_steps_are_aligned_on_samples(tmp_path: Path, batch: int) -> None:
    """The same loss of each sample, in other batches: each step's loss is the mean over its samples."""
    fine = np.repeat(np.random.default_rng(3).uniform(1, 4, SAMPLES // 48), 48)  # a loss for each sample
    per_step = [fine.reshape(-1, size).mean(axis=1) for size in (BATCH, batch)]
    a = ours(tmp_path / "a", per_step[0])
    b = ours(tmp_path / "b", per_step[1], batch=batch)
    result = compared(a, b, tolerance=1e-9)
    assert result.grid.width == max(batch, BATCH)
    assert result.agree and result.compared[0].area < 1e-12


def test_a_run_that_was_cut_short_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    from megatron_llama.tools.compare.report import notes, rows, verdict

    losses = falling()
    a, b = ours(tmp_path / "a", losses), ours(tmp_path / "b", losses[: STEPS // 4])
    result = compared(a, b, min_overlap=0.25)
    assert result.agree and result.grid.end == SAMPLES / 4
    assert any("ends after 25%" in note for note in notes(result))
    result = compared(a, b)
    assert not result.agree, "a run that dies early must not pass for one that agrees"
    assert "Only 25% of a's samples could be compared, and 90% are required" in verdict(result)
    assert rows(result)[-1] == ("verdict", "reference", "agrees so far")
    assert compared(b, a).agree, "of the reference nothing is missing"
    assert [found.field for found in problems(a, b, min_overlap=90)] == ["--min-overlap"]
    apart = falling()
    apart[STEPS // 2 :] *= 2  # after the end of the other
    assert compared(ours(tmp_path / "c", apart), b, min_overlap=0.25).agree


def test_no_samples_in_common(tmp_path: Path) -> None:
    late = tmp_path / "late"
    a = ours(tmp_path / "a", falling(20))
    ours(late, falling(60))
    lines = (late / "metrics.jsonl").read_text().splitlines(keepends=True)
    (late / "metrics.jsonl").write_text("".join(lines[30:]))
    (found,) = problems(a, str(late))
    assert "no consumed samples in common" in found.rule and "8 to 160" in found.rule and "248 to 480" in found.rule


@pytest.mark.parametrize("run", [0, 1])
def test_a_run_that_ends_in_non_finite_losses_has_diverged(tmp_path: Path, run: int) -> None:
    """A non-finite loss was skipped (skip_nonfinite_steps); where the last losses are, the run has failed."""
    losses = falling()
    losses[50] = np.nan
    skipped = ours(tmp_path / "skipped", losses)
    one = compared(ours(tmp_path / "a", falling()), skipped).compared[0]
    assert one.agrees and "1 of 400 losses are not finite" in one.run.notes[0]
    losses[-2:] = np.inf
    both = [ours(tmp_path / "b", falling()), ours(tmp_path / "ended", losses)]
    found = compared(*(both if run else reversed(both))).compared[0].divergence
    assert found is not None and found.start == SAMPLES - BATCH and "ended" in found.reason


def test_a_hole_of_non_finite_losses_is_a_divergence(tmp_path: Path) -> None:
    losses = falling()
    losses[200:212] = np.nan  # more than half of a window of 20
    found = compared(ours(tmp_path / "a", falling()), ours(tmp_path / "b", losses)).compared[0].divergence
    assert found is not None and "not finite" in found.reason
    assert 195 * BATCH < found.start < 206 * BATCH
