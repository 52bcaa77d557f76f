"""Sample n of a blend follows from the weights alone, at any n and across segments."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict

import pytest

from megatron_llama.corpus.blend import WINDOW, Blend, BlendSegment, BlendTimeline, same_shares, segments_from_json

BLENDS = [
    [1.0],
    [3, 7],
    [0.05, 0.95],
    [1, 1, 1],
    [1e-5, 1],
    [0.5] + [0.5 / 40] * 40,
    *([random.Random(seed).expovariate(1) + 1e-3 for _ in range(2 + seed)] for seed in range(6)),
]


def by_hand(weights: list[float], count: int) -> list[tuple[int, int]]:
    """The first samples of a blend: all datasets' samples, in the order of their keys."""
    total, datasets = sum(weights), len(weights)
    keys = [
        ((sample + (number + 0.5) / datasets) / (weight / total), number, sample)
        for number, weight in enumerate(weights)
        for sample in range(int(count * weight / total) + datasets + 2)
    ]
    return [(number, sample) for _, number, sample in sorted(keys)[:count]]


@pytest.mark.parametrize("weights", BLENDS, ids=lambda weights: f"{len(weights)}-{weights[0]:.3g}")
def test_a_blend_is_its_datasets_in_their_shares(weights: list[float]) -> None:
    blend, counts = Blend(weights), [0] * len(weights)
    expected = by_hand(weights, 2 * WINDOW + 100)
    for number, (dataset, sample) in enumerate(expected):
        assert blend.at(number) == (dataset, sample)
        assert counts[dataset] == sample, "a sample was skipped or repeated"
        counts[dataset] += 1
        for count, share in zip(counts, blend.shares, strict=True):
            assert abs(count - (number + 1) * share) <= 1 + share * len(weights) / 2
        if number % 171 == 0:
            assert blend.counts(number + 1) == counts


def test_any_sample_is_computed_directly() -> None:
    blend = Blend([0.3, 0.1234, 0.6])
    start = time.process_time()
    for number in (250_000_000, 5, 10**12, 123_456_789):
        counts = blend.counts(number)
        assert sum(counts) == number
        which, sample = blend.at(number)
        assert sample == counts[which]
        after = [count + (dataset == which) for dataset, count in enumerate(counts)]
        assert blend.counts(number + 1) == after
        for count, share in zip(counts, blend.shares, strict=True):
            assert abs(count - number * share) <= 3
    assert time.process_time() - start < 1
    fresh = Blend([3, 1.234, 6])  # the proportion counts, and nothing that was asked before
    assert fresh.at(123_456_789) == blend.at(123_456_789)


def test_equal_datasets_take_turns() -> None:
    assert [Blend([2, 2, 2]).at(number)[0] for number in range(6)] == [0, 1, 2, 0, 1, 2]


def random_timeline(chooser: random.Random) -> tuple[BlendTimeline, list[tuple[int, dict[str, float]]]]:
    """Segments of random blends of up to four datasets, and the changes that made them."""
    timeline, first, changes = BlendTimeline([]), 0, []
    for _ in range(chooser.randint(1, 4)):
        weights = {name: chooser.uniform(0.1, 2) for name in chooser.sample("abcd", chooser.randint(1, 4))}
        changes.append((first, weights))
        timeline = timeline.switched(first, weights)
        first += chooser.randint(1, 400)
    return timeline, changes


@pytest.mark.parametrize("seed", range(8))
def test_every_dataset_continues_at_its_position(seed: int) -> None:
    timeline, changes = random_timeline(random.Random(seed))
    read: dict[str, int] = {}
    for number in range(changes[-1][0] + 300):
        assert {name: count for name, count in timeline.read(number).items() if count} == read
        dataset, sample = timeline.at(number)
        weights = [weights for first, weights in changes if first <= number][-1]
        assert dataset in weights
        assert sample == read.get(dataset, 0), "a dataset did not continue from its position"
        read[dataset] = sample + 1


@pytest.mark.parametrize("seed", range(8))
def test_a_stored_stream_resumes(seed: int) -> None:
    chooser = random.Random(100 + seed)
    timeline, changes = random_timeline(chooser)
    for stopped in chooser.sample(range(changes[-1][0] + 300), 5):
        stored = json.loads(json.dumps([asdict(segment) for segment in timeline.up_to(stopped).segments]))
        restored = BlendTimeline(segments_from_json(stored))
        for first, weights in changes:
            if first >= max(stopped, 1):
                restored = restored.switched(first, weights)
        assert restored.segments == timeline.segments
        assert all(restored.at(number) == timeline.at(number) for number in range(stopped, stopped + 50))


def test_a_blend_that_was_never_read_leaves_no_trace() -> None:
    timeline = BlendTimeline([]).switched(0, {"a": 1}).switched(50, {"a": 1, "b": 1})
    assert timeline.switched(50, {"c": 1}).segments == (
        BlendSegment(0, {"a": 1}, {}),
        BlendSegment(50, {"c": 1}, {"a": 50}),
    )
    assert timeline.up_to(50).segments == timeline.segments[:1]
    assert timeline.up_to(51).segments == timeline.segments


def test_equal_shares_are_the_same_blend() -> None:
    assert same_shares({"a": 3, "b": 7}, {"b": 0.7, "a": 0.3})
    assert not same_shares({"a": 3, "b": 7}, {"a": 7, "b": 3})
    assert not same_shares({"a": 3}, {"a": 3, "b": 1e-9})
