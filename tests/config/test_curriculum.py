"""d(t) of the schedules: DeepSpeed's published arithmetic."""

from __future__ import annotations

import pytest

from megatron_llama.config.data_settings import CurriculumMetric
from megatron_llama.plan import resolve
from tests.config.helpers import make

# (schedule, difficulties of steps 1, 2, 3, ...), worked out by hand from the published formula
TABLES = [
    # min + (max - min) t / T = 8 + 9.2 t, down to a multiple of 8, at most 100
    (
        CurriculumMetric("x", min_difficulty=8, max_difficulty=100, total_curriculum_step=10, difficulty_step=8),
        [16, 24, 32, 40, 48, 56, 72, 80, 88, 96, 100, 100, 100],
    ),
    # 64 + 448 sqrt(t / 16) = 64 + 112 sqrt(t): 176, 222, 257, 288, 314, 338, 360, 380, 400, ...
    (
        CurriculumMetric(
            "x",
            schedule_type="fixed_root",
            min_difficulty=64,
            max_difficulty=512,
            total_curriculum_step=16,
            difficulty_step=64,
        ),
        [128, 192, 256, 256, 256, 320, 320, 320, 384, 384, 384, 448, 448, 448, 448, 512, 512],
    ),
    # 1 + 9 cbrt(t / 27) = 1 + 3 cbrt(t)
    (
        CurriculumMetric(
            "x",
            schedule_type="fixed_root",
            min_difficulty=1,
            max_difficulty=10,
            total_curriculum_step=27,
            root_degree=3,
        ),
        [4, 4, 5, 5, 6, 6, 6],
    ),
    # A least difficulty below the unit: never 0
    (
        CurriculumMetric("x", min_difficulty=8, max_difficulty=64, total_curriculum_step=56, difficulty_step=16),
        [16] * 23 + [32] * 16 + [48] * 16 + [64],
    ),
    (
        CurriculumMetric("x", schedule_type="fixed_discrete", difficulty=[1, 2, 7], max_step=[2, 5]),
        [1, 1, 2, 2, 2, 7, 7],
    ),
    (CurriculumMetric("x", min_difficulty=5, max_difficulty=5, total_curriculum_step=3), [5, 5, 5, 5]),
]


@pytest.mark.parametrize(("metric", "expected"), TABLES)
def test_difficulty_of_each_step(metric: CurriculumMetric, expected: list[int]) -> None:
    levels = [metric.at(step) for step in range(1, len(expected) + 1)]
    assert levels == expected
    for begin in (1, 3):
        rises = metric.rises(len(expected), begin)
        assert [[d for first, d in rises if first <= step][-1] for step in range(begin, len(expected) + 1)] == levels[
            begin - 1 :
        ]
        assert len({difficulty for _, difficulty in rises}) == len(rises)


def test_tokens_of_a_run_are_those_that_are_trained_on() -> None:
    entry = {"schedule_type": "fixed_discrete", "difficulty": [48, 64, 256], "max_step": [3, 10]}
    for name, lengths in (("seqlen_truncate", (48, 64, 256)), ("seqlen_reshape", (240, 256, 256))):
        settings = {"data.curriculum": [{"metric": name, **entry}], "trainer.batch_schedule": [[40, 16]]}
        schedule = resolve(make(**settings, **{"data.seq_length": 256}), 1).batches
        # 8 sequences a step up to sample 40, the end of step 5, and then 16
        for step, tokens in (
            (0, 0),
            (3, 24 * lengths[0]),
            (4, 24 * lengths[0] + 8 * lengths[1]),
            (12, 24 * lengths[0] + (16 + 5 * 16) * lengths[1] + 32 * lengths[2]),
        ):
            assert schedule.after(step).tokens == tokens, f"{name}, step {step}"
        assert [schedule.tokens_at(step) for step in (3, 4, 11)] == [*lengths]
