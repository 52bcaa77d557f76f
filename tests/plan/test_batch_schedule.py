"""The samples of each step: the closed form matches counting one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_llama.config.settings import Config, DataConfig
from megatron_llama.plan import resolve
from megatron_llama.plan.schedules import BatchSchedule, RunPosition
from tests.config.helpers import make, problems_of


def one_by_one(sizes: list[tuple[int, int]], steps: int, samples: int = 0) -> list[int]:
    """Consumed samples after each step."""
    consumed = [samples]
    for _ in range(steps):
        size = max((since, size) for since, size in sizes if since <= consumed[-1])[1]
        consumed.append(consumed[-1] + size)
    return consumed


def test_a_schedule_by_hand() -> None:
    # 0, 8, 16, then 20 is passed: 24 begins with 4 sequences, and 40 is never a border of steps of 4 from 24 on.
    schedule = BatchSchedule(((0, 8), (20, 4), (30, 16)), seq_length=10)
    assert [schedule.after(step).samples for step in range(8)] == [0, 8, 16, 24, 28, 32, 48, 64]
    assert schedule.after(6) == RunPosition(step=6, samples=48, tokens=480)
    assert [schedule.size_from(samples) for samples in (0, 16, 19, 20, 24, 29, 30, 99)] == [8, 8, 8, 4, 4, 4, 16, 16]
    assert schedule.position_of_the_largest == 30


def test_any_schedule_is_the_count_step_by_step() -> None:
    chance = random.Random(5)
    for _ in range(200):
        since = sorted(chance.sample(range(1, 200), chance.randrange(4)))
        sizes = [(0, chance.randrange(1, 30)), *((first, chance.randrange(1, 30)) for first in since)]
        consumed = one_by_one(sizes, 40)
        schedule = BatchSchedule(tuple(sizes), seq_length=3)
        assert [schedule.after(step).samples for step in range(41)] == consumed
        sizes_of_steps = [after - before for before, after in pairwise(consumed)]
        assert [schedule.size_from(samples) for samples in consumed[:-1]] == sizes_of_steps
        # From any step on, it is the same run.
        start = chance.randrange(41)
        rest = BatchSchedule(tuple(sizes), 3, schedule.after(start))
        assert [rest.after(step) for step in range(start, 41)] == [schedule.after(step) for step in range(start, 41)]
        for samples in (0, *consumed[1:4], consumed[20] + 1, consumed[-1] - 1):
            last = schedule.last_step_within(samples)
            assert consumed[last] <= samples < consumed[last + 1]


def test_another_size_goes_on_from_the_consumed_samples() -> None:
    went_on = BatchSchedule(((0, 5),), seq_length=4, start=RunPosition(step=3, samples=24, tokens=999))
    assert [went_on.after(step).samples for step in (3, 4, 5)] == [24, 29, 34]
    assert went_on.after(5).tokens == 999 + 10 * 4


def test_a_runs_schedule_is_in_its_plan() -> None:
    config = make(**{"trainer.batch_schedule": [[16, 4], [24, 16]], "data.seq_length": 32, "trainer.steps": 6})
    plan = resolve(config, 1)
    assert plan.batches == BatchSchedule(((0, 8), (16, 4), (24, 16)), seq_length=32)
    assert plan.batches.after(6).samples == 8 + 8 + 4 + 4 + 16 + 16


@pytest.mark.parametrize(
    ("world", "changes", "advice"),
    [
        (2, {}, "[[16,4],[32,8]]"),
        (4, {"trainer.pp": 2, "trainer.vpp": 2, "trainer.micro_batch_size": 1}, "[[16,4],[32,8]]"),
    ],
)
def test_each_size_is_whole_micro_batches(world: int, changes: dict[str, object], advice: str) -> None:
    schedule = {"trainer.batch_schedule": [[16, 5], [32, 9]], "trainer.micro_batch_size": 2, **changes}
    (problem,) = problems_of(make(**schedule), world)
    assert problem.field == "trainer.batch_schedule" and "each size must be a multiple of" in problem.rule
    assert problem.instead == f"write trainer.batch_schedule={advice}"
    assert not problems_of(make(**{**schedule, "trainer.batch_schedule": [[16, 4], [32, 8]]}), world)


def test_without_a_schedule_it_is_the_global_batch_size() -> None:
    schedule = BatchSchedule.of(Config(data=DataConfig(seq_length=256)))
    assert schedule.after(7) == RunPosition(7, 7 * 8, 7 * 8 * 256)
