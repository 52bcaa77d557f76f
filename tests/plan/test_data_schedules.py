"""Schedules of batch sizes, token dropping and curricula, and their effect on FLOPs and token counts."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise
from typing import Any

import pytest

from megatron_llama.arch.flops import RetainedTokens, flops_per_token, with_random_ltd
from megatron_llama.config.data_settings import CurriculumMetric
from megatron_llama.config.settings import Config, DataConfig
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.data_schedules import BatchSchedule, RunPosition, TokenSchedule
from tests.config.helpers import make


def test_a_schedule_by_hand() -> None:
    # 0, 8, 16, then 20 is passed: 24 begins with 4 sequences, and 40 is never a boundary of steps of 4 from 24 on.
    schedule = BatchSchedule(((0, 8), (20, 4), (30, 16)), seq_length=10)
    assert [schedule.after(step).samples for step in range(8)] == [0, 8, 16, 24, 28, 32, 48, 64]
    assert schedule.after(6) == RunPosition(step=6, samples=48, tokens=480)
    assert [schedule.size_from(samples) for samples in (0, 16, 19, 20, 24, 29, 30, 99)] == [8, 8, 8, 4, 4, 4, 16, 16]
    assert schedule.position_of_the_largest == 30
    resumed = BatchSchedule(((0, 5),), seq_length=4, start=RunPosition(step=3, samples=24, tokens=999))
    assert [resumed.after(step).samples for step in (3, 4, 5)] == [24, 29, 34]
    assert resumed.after(5).tokens == 999 + 10 * 4
    assert BatchSchedule.of(Config(data=DataConfig(seq_length=256))).after(7) == RunPosition(7, 7 * 8, 7 * 8 * 256)


def test_any_schedule_equals_a_count_step_by_step() -> None:
    chance = random.Random(5)
    for _ in range(200):
        since = sorted(chance.sample(range(1, 200), chance.randrange(4)))
        sizes = [(0, chance.randrange(1, 30)), *((first, chance.randrange(1, 30)) for first in since)]
        consumed = [0]
        for _ in range(40):
            consumed.append(consumed[-1] + max((since, size) for since, size in sizes if since <= consumed[-1])[1])
        schedule = BatchSchedule(tuple(sizes), seq_length=3)
        assert [schedule.after(step).samples for step in range(41)] == consumed
        sizes_of_steps = [after - before for before, after in pairwise(consumed)]
        assert [schedule.size_from(samples) for samples in consumed[:-1]] == sizes_of_steps
        start = chance.randrange(41)  # a resume at any step is the same run
        rest = BatchSchedule(tuple(sizes), 3, schedule.after(start))
        assert [rest.after(step) for step in range(start, 41)] == [schedule.after(step) for step in range(start, 41)]
        for samples in (0, *consumed[1:4], consumed[20] + 1, consumed[-1] - 1):
            last = schedule.last_step_within(samples)
            assert consumed[last] <= samples < consumed[last + 1]


def test_the_plan_has_the_schedule_and_its_derived_values() -> None:
    config = make(**{"trainer.batch_schedule": [[16, 4], [24, 16]], "data.seq_length": 32, "trainer.steps": 6})
    plan = resolve(config, 1)
    assert plan.batches == BatchSchedule(((0, 8), (16, 4), (24, 16)), seq_length=32)
    assert plan.batches.after(6).samples == 8 + 8 + 4 + 4 + 16 + 16
    ltd = ltd_plan().config.trainer.random_ltd
    assert ltd is not None
    assert (ltd.max_value, ltd.require_steps, ltd.layers) == (256, 40, [1, 2])
    assert resolve(make(), 1).random_ltd is None


# Token dropping


def tokens(min_value: int, max_value: int, steps: int, unit: int) -> TokenSchedule:
    return TokenSchedule((1, 2), 4, max_value, min_value, max_value, steps, unit)


# By hand: min + (max - min) (n - 1) / steps, rounded down to the unit.
BY_HAND = [
    (tokens(4, 16, 3, 4), [4, 8, 12, 16, 16]),
    (tokens(4, 16, 5, 4), [4, 4, 8, 8, 12, 16]),  # 4, 6.4, 8.8, 11.2, 13.6, 16
    (tokens(16, 64, 2, 16), [16, 32, 64]),  # 16, 40, 64: 48 is skipped
    (tokens(8, 20, 4, 8), [8, 8, 8, 16, 20]),  # the largest need not be a multiple
    (tokens(16, 16, 5, 4), [16, 16]),
]


@pytest.mark.parametrize(("schedule", "lengths"), BY_HAND)
def test_lengths(schedule: TokenSchedule, lengths: list[int]) -> None:
    assert [schedule.length(step) for step in range(1, len(lengths) + 1)] == lengths
    for steps in (0, 1, 5, 40):
        first: dict[int, int] = {}
        for step in range(1, max(1, steps) + 1):
            first.setdefault(schedule.length(step), step)
        assert schedule.lengths(steps) == {step: length for length, step in first.items()}


def test_lengths_are_deepspeeds() -> None:
    """fixed_linear of deepspeed.runtime.data_pipeline.data_routing.scheduler; its steps count from 0, and its fractions
    are rounded."""
    schedule = tokens(128, 2048, 1000, 16)
    for step in range(1200):
        theirs = math.floor(step / 1000 * (2048 - 128) + 128)
        theirs = min(theirs - theirs % 16, 2048)
        exact = (2048 - 128) * step % (1000 * 16) == 0  # the quotient is whole: theirs may be 15.999...
        assert schedule.length(step + 1) == theirs or (exact and schedule.length(step + 1) == theirs + 16), step


def test_consumed_tokens_and_pairs_by_hand() -> None:
    schedule = tokens(4, 16, 3, 4)  # two layers of four
    batches = BatchSchedule(((0, 2), (4, 6)), 16)  # 2, 2, then 6 sequences
    counts = [schedule.layer_tokens(step, batches) for step in range(1, 5)]
    steps = [2 * (2 * 4 + 2 * 16), 2 * (2 * 8 + 2 * 16), 6 * (2 * 12 + 2 * 16), 6 * 4 * 16]
    assert counts == [sum(steps[:count]) for count in range(1, 5)]
    pairs = [
        sum(sum(token in document for token in subset) ** 2 for document in ((0, 1), (2, 3, 4)))
        for subset in combinations(range(5), 3)
    ]
    assert RetainedTokens(1, 3, 5).pairs(5, 2**2 + 3**2) == pytest.approx(sum(pairs) / len(pairs))


def ltd_plan() -> Plan:
    return resolve(make(**{"trainer.random_ltd.min_value": 64, "trainer.steps": 60}), 1)


def test_flops_are_counted_token_by_token() -> None:
    """Against a count over each token, in the mean over random subsets: k tokens, k² pairs in a whole sequence."""
    plan = ltd_plan()
    model, finetune, s, k = plan.model, plan.config.finetune, 256, 64
    none, whole = flops_per_token(model, 0), flops_per_token(model, s)
    head = 6 * model.vocab_size * model.hidden_size
    layer = (none.full - head) / 4
    expected = s * (2 * layer + head) + k * 2 * layer + (whole.full - none.full) / 4 * (2 * s + 2 * k * k / s)
    assert with_random_ltd(model, s, finetune, RetainedTokens(2, k, s)).full * s == pytest.approx(expected)
    full = with_random_ltd(model, s, finetune, RetainedTokens(2, s, s))
    assert (full.causal, full.full) == pytest.approx((whole.causal, whole.full), rel=1e-12)
    assert with_random_ltd(model, s, finetune, None) == whole


# Curricula: DeepSpeed's published arithmetic, and difficulties of steps 1, 2, 3, ... by hand


def metric(begin: int, end: int, steps: int, unit: int = 1, **more: Any) -> CurriculumMetric:
    limits = {"min_difficulty": begin, "max_difficulty": end, "total_curriculum_step": steps, "difficulty_step": unit}
    return CurriculumMetric("x", **limits, **more)


CURRICULA = [
    # min + (max - min) t / T = 8 + 9.2 t, down to a multiple of 8, at most 100
    (metric(8, 100, 10, 8), [16, 24, 32, 40, 48, 56, 72, 80, 88, 96, 100, 100, 100]),
    # 64 + 448 sqrt(t / 16) = 64 + 112 sqrt(t): 176, 222, 257, 288, 314, 338, 360, 380, 400, ...
    (
        metric(64, 512, 16, 64, schedule_type="fixed_root"),
        [128, 192, 256, 256, 256, 320, 320, 320, 384, 384, 384, 448, 448, 448, 448, 512, 512],
    ),
    # 1 + 9 cbrt(t / 27) = 1 + 3 cbrt(t)
    (metric(1, 10, 27, schedule_type="fixed_root", root_degree=3), [4, 4, 5, 5, 6, 6, 6]),
    # A least difficulty below the unit: never 0
    (metric(8, 64, 56, 16), [16] * 23 + [32] * 16 + [48] * 16 + [64]),
    (
        CurriculumMetric("x", schedule_type="fixed_discrete", difficulty=[1, 2, 7], max_step=[2, 5]),
        [1, 1, 2, 2, 2, 7, 7],
    ),
    (metric(5, 5, 3), [5, 5, 5, 5]),
]


@pytest.mark.parametrize(("curriculum", "expected"), CURRICULA)
def test_difficulty_of_each_step(curriculum: CurriculumMetric, expected: list[int]) -> None:
    levels = [curriculum.at(step) for step in range(1, len(expected) + 1)]
    assert levels == expected
    for begin in (1, 3):
        rises = curriculum.rises(len(expected), begin)
        steps = range(begin, len(expected) + 1)
        assert [[d for first, d in rises if first <= step][-1] for step in steps] == levels[begin - 1 :]
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
