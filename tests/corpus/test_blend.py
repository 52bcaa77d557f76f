"""Sample n of a blend or of packed examples follows from weights, lengths and seed, at any n and across segments."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from megatron_llama.corpus.blend import WINDOW, Blend, BlendSegment, BlendTimeline, same_shares, segments_from_json
from megatron_llama.corpus.packing import Order, Packed, Unpacked, histogram, pack_lengths

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
    for number, (dataset, sample) in enumerate(by_hand(weights, 2 * WINDOW + 100)):
        assert blend.at(number) == (dataset, sample)
        assert counts[dataset] == sample, "a sample was skipped or repeated"
        counts[dataset] += 1
        for count, share in zip(counts, blend.shares, strict=True):
            assert abs(count - (number + 1) * share) <= 1 + share * len(weights) / 2
        if number % 171 == 0:
            assert blend.counts(number + 1) == counts


def test_any_sample_is_computed_directly() -> None:
    blend = Blend([0.3, 0.1234, 0.6])
    for number in (250_000_000, 5, 10**12, 123_456_789):
        counts = blend.counts(number)
        assert sum(counts) == number
        which, sample = blend.at(number)
        assert sample == counts[which]
        assert blend.counts(number + 1) == [count + (dataset == which) for dataset, count in enumerate(counts)]
        for count, share in zip(counts, blend.shares, strict=True):
            assert abs(count - number * share) <= 3
    fresh = Blend([3, 1.234, 6])  # the proportion counts, and nothing that was asked before
    assert fresh.at(123_456_789) == blend.at(123_456_789)


def test_equal_shares_are_the_same_blend() -> None:
    """Equal datasets alternate, and a blend that was never read leaves no trace."""
    assert [Blend([2, 2, 2]).at(number)[0] for number in range(6)] == [0, 1, 2, 0, 1, 2]
    assert same_shares({"a": 3, "b": 7}, {"b": 0.7, "a": 0.3})
    assert not same_shares({"a": 3, "b": 7}, {"a": 7, "b": 3})
    assert not same_shares({"a": 3}, {"a": 3, "b": 1e-9})
    timeline = BlendTimeline([]).switched(0, {"a": 1}).switched(50, {"a": 1, "b": 1})
    assert timeline.switched(50, {"c": 1}).segments == (
        BlendSegment(0, {"a": 1}, {}),
        BlendSegment(50, {"c": 1}, {"a": 50}),
    )
    assert timeline.up_to(50).segments == timeline.segments[:1]
    assert timeline.up_to(51).segments == timeline.segments


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


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit, longest first, one example at a time."""
    sequences: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [one for one in sequences if sum(one) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            sequences.append([length])
    return sequences


@pytest.mark.parametrize("seed", range(8))
def test_the_histogram_packs_as_one_at_a_time_would(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([7, 16, 40])
    lengths = [rng.randint(1, capacity) for _ in range(rng.choice([1, 30, 200]))]
    used: Counter[int] = Counter()
    filled: Counter[int] = Counter()
    for recipe in pack_lengths(histogram(np.array(lengths)), capacity):
        filled[sum(length * fit for length, fit in recipe.parts)] += recipe.count
        for length, fit in recipe.parts:
            used[length] += fit * recipe.count
    assert used == Counter(lengths)
    assert filled == Counter(sum(one) for one in best_fit(lengths, capacity))  # which of two equally full is a toss-up


def orders(lengths: np.ndarray) -> list[Order]:
    return [Unpacked(len(lengths), seed=5), Packed(lengths, 64, seed=5)]


def some_lengths(count: int = 300) -> np.ndarray:
    return np.random.RandomState(3).randint(1, 65, count).astype(np.int32)


@pytest.mark.parametrize("kind", [0, 1])
def test_every_epoch_has_each_example_once_in_another_order(kind: int) -> None:
    lengths = some_lengths()
    order = orders(lengths)[kind]
    epochs = [[order.examples(epoch * len(order) + place) for place in range(len(order))] for epoch in range(3)]
    for samples in epochs:
        assert sorted(example for sample in samples for example in sample) == list(range(len(lengths)))
        assert all(sum(lengths[sample]) <= 64 for sample in samples)
    assert epochs[0] != epochs[1] != epochs[2]
    if kind:
        company = [{frozenset(sample) for sample in samples if len(sample) > 1} for samples in epochs]
        assert company[0] != company[1], "the same examples travel together for ever"


@pytest.mark.parametrize("kind", [0, 1])
def test_a_sample_is_a_function_of_seed_and_index(kind: int) -> None:
    lengths = some_lengths()
    forwards, backwards = orders(lengths)[kind], orders(lengths)[kind]
    indices = [0, 7, 900, 3, 1200, 1]  # in any order, of any epoch
    there = {index: forwards.examples(index) for index in indices}
    assert there == {index: backwards.examples(index) for index in reversed(indices)}
    other = (Unpacked(300, seed=6), Packed(lengths, 64, seed=6))[kind]
    assert there != {index: other.examples(index) for index in indices}


def test_packing_fills_sequences() -> None:
    lengths = np.minimum(np.random.RandomState(0).geometric(1 / 300, 2_000_000), 2048).astype(np.int32)
    packed = Packed(lengths, 2048, seed=1)
    filled = lengths.sum() / (len(packed) * 2048)
    assert filled > 0.995, f"{filled:.3f} of the places are used"
    assert sum(lengths[packed.examples(len(packed) - 1)]) <= 2048
