"""The schedule of random layer-wise token dropping, and its effect on FLOPs and token counts."""

from __future__ import annotations

import math

import pytest

from megatron_llama.arch.flops import RetainedTokens, flops_per_token, with_random_ltd
from megatron_llama.plan import Plan, resolve
from megatron_llama.plan.schedules import BatchSchedule, TokenSchedule
from tests.config.helpers import make


def schedule(min_value: int, max_value: int, steps: int, unit: int, length: int | None = None) -> TokenSchedule:
    return TokenSchedule((1, 2), 4, length or max_value, min_value, max_value, steps, unit)


def plan_of(**more: object) -> Plan:
    return resolve(make(**{"trainer.random_ltd.min_value": 64, "trainer.steps": 60, **more}), 1)


# By hand: min + (max - min) (n - 1) / steps, rounded down to the unit.
@pytest.mark.parametrize(
    ("of", "lengths"),
    [
        (schedule(4, 16, 3, 4), [4, 8, 12, 16, 16]),
        (schedule(4, 16, 5, 4), [4, 4, 8, 8, 12, 16]),  # 4, 6.4, 8.8, 11.2, 13.6, 16
        (schedule(16, 64, 2, 16), [16, 32, 64]),  # 16, 40, 64: 48 is skipped
        (schedule(8, 20, 4, 8), [8, 8, 8, 16, 20]),  # the largest need not be a multiple
        (schedule(16, 16, 5, 4), [16, 16]),
    ],
)
def test_lengths_by_hand(of: TokenSchedule, lengths: list[int]) -> None:
    assert [of.length(step) for step in range(1, len(lengths) + 1)] == lengths


def test_lengths_are_deepspeeds() -> None:
    """fixed_linear of deepspeed.runtime.data_pipeline.data_routing.scheduler; its steps count from 0, its fractions are
    rounded."""
    of = schedule(128, 2048, 1000, 16)
    for taken in range(1200):
        theirs = math.floor(taken / 1000 * (2048 - 128) + 128)
        theirs = min(theirs - theirs % 16, 2048)
        exact = (2048 - 128) * taken % (1000 * 16) == 0  # where the quotient is whole, theirs may be 15.999...
        assert of.length(taken + 1) == theirs or (exact and of.length(taken + 1) == theirs + 16), taken


@pytest.mark.parametrize(
    "of", [schedule(4, 16, 7, 4), schedule(16, 64, 2, 16), schedule(8, 8, 3, 8), schedule(5, 90, 31, 5)]
)
@pytest.mark.parametrize("steps", [0, 1, 5, 40])
def test_the_list_of_lengths_is_that_of_the_steps(of: TokenSchedule, steps: int) -> None:
    first: dict[int, int] = {}
    for step in range(1, max(1, steps) + 1):
        first.setdefault(of.length(step), step)
    assert of.lengths(steps) == {step: length for length, step in first.items()}


def test_consumed_layer_tokens_by_hand() -> None:
    of = schedule(4, 16, 3, 4)  # two layers of four
    batches = BatchSchedule(((0, 2), (4, 6)), 16)  # 2, 2, then 6 sequences
    counts = [of.layer_tokens(step, batches) for step in range(1, 5)]
    steps = [2 * (2 * 4 + 2 * 16), 2 * (2 * 8 + 2 * 16), 6 * (2 * 12 + 2 * 16), 6 * 4 * 16]
    assert counts == [sum(steps[:count]) for count in range(1, 5)]


def test_what_is_left_out_is_derived() -> None:
    ltd = plan_of().config.trainer.random_ltd
    assert ltd is not None
    assert (ltd.max_value, ltd.require_steps, ltd.layers) == (256, 40, [1, 2])
    assert resolve(make(), 1).random_ltd is None


def test_flops_are_counted_token_by_token() -> None:
    """Against a count over every token of one random subset's expectation: k tokens, k² pairs in a whole sequence."""
    plan = plan_of()
    model, finetune, s, k = plan.model, plan.config.finetune, 256, 64
    none, whole = flops_per_token(model, 0), flops_per_token(model, s)
    with_ltd = with_random_ltd(model, s, finetune, RetainedTokens(2, k, s))
    head = 6 * model.vocab_size * model.hidden_size
    layer = (none.full - head) / 4
    assert with_ltd.full * s == pytest.approx(
        s * (2 * layer + head) + k * 2 * layer + (whole.full - none.full) / 4 * (2 * s + 2 * k * k / s)
    )
    full = with_random_ltd(model, s, finetune, RetainedTokens(2, s, s))
    assert (full.causal, full.full) == pytest.approx((whole.causal, whole.full), rel=1e-12)
    assert with_random_ltd(model, s, finetune, None) == whole


def test_expected_pairs_by_enumeration() -> None:
    """Mean of n² attention pairs over all subsets of 3 out of 5 tokens, in documents of 2 and 3 tokens."""
    from itertools import combinations

    left = [
        sum(sum(token in document for token in subset) ** 2 for document in ((0, 1), (2, 3, 4)))
        for subset in combinations(range(5), 3)
    ]
    assert RetainedTokens(1, 3, 5).pairs(5, 2**2 + 3**2) == pytest.approx(sum(left) / len(left))
