"""Packing of examples into samples: each example once per epoch, none split, the same on every rank."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest

from megatron_llama.corpus.packing import Order, Packed, Unpacked, histogram, pack_lengths


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


def test_packing_fills_and_is_fast_for_many() -> None:
    lengths = np.minimum(np.random.RandomState(0).geometric(1 / 300, 2_000_000), 2048).astype(np.int32)
    start = time.process_time()
    packed = Packed(lengths, 2048, seed=1)
    assert time.process_time() - start < 20
    filled = lengths.sum() / (len(packed) * 2048)
    assert filled > 0.995, f"{filled:.3f} of the places are used"
    assert sum(lengths[packed.examples(len(packed) - 1)]) <= 2048
