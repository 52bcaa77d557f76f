"""Samples of a rank: in any layout, the ranks together process each sample of a step once."""

from __future__ import annotations

import pytest
import torch

from megatron_llama.data.batches import Batches, MockDataset, build_data
from megatron_llama.plan import resolve
from tests.config.helpers import make
from tests.model.llamas import CPU

GLOBAL_BATCH = 24
LAYOUTS = [
    {"tp": 1, "pp": 1, "dp": 1, "micro": 1},
    {"tp": 1, "pp": 1, "dp": 1, "micro": 24},
    {"tp": 2, "pp": 1, "dp": 2, "micro": 3},
    {"tp": 1, "pp": 2, "dp": 3, "micro": 2},
    {"tp": 2, "pp": 2, "dp": 4, "micro": 1},
    {"tp": 1, "pp": 1, "dp": 8, "micro": 3},
]


class Counting:
    """Sample i is i, everywhere."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((8,), index), "labels": torch.full((8,), -index), "loss_mask": torch.ones(8)}


def batches_of_all_ranks(layout: dict[str, int]) -> list[Batches]:
    world = layout["tp"] * layout["pp"] * layout["dp"]
    names = {"tp": "trainer.tp", "pp": "trainer.pp", "micro": "trainer.micro_batch_size"}
    settings = {names[key]: value for key, value in layout.items() if key in names}
    plan = resolve(make(**settings, **{"trainer.global_batch_size": GLOBAL_BATCH}), world)
    return [Batches(Counting(), plan, plan.topology(rank), CPU) for rank in range(world)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_step_is_its_samples_each_once(layout: dict[str, int], step: int) -> None:
    """Tensor- and pipeline-parallel ranks work on the same samples; data-parallel ranks on different ones."""
    samples: dict[int, list[list[int]]] = {}
    for batches in batches_of_all_ranks(layout):
        local = batches.at(step * GLOBAL_BATCH)
        assert len(local) == GLOBAL_BATCH // (layout["micro"] * layout["dp"])
        for batch in local:
            assert batch.tokens.shape == (layout["micro"], 8)
            assert torch.equal(batch.labels, -batch.tokens)  # tokens and labels of the same sample
        numbers = [number for batch in local for number in batch.tokens[:, 0].tolist()]
        samples.setdefault(batches.topology.place["dp"], []).append(numbers)
    assert all(len(same) == layout["tp"] * layout["pp"] for same in samples.values())
    assert all(numbers == same[0] for same in samples.values() for numbers in same)
    together = sorted(number for same in samples.values() for number in same[0])
    assert together == [*range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]


def test_consumed_samples_need_not_be_whole_steps() -> None:
    # A checkpoint of a run with another global batch size: the position is a number of samples, not of steps.
    (batches,) = batches_of_all_ranks({"tp": 1, "pp": 1, "dp": 1, "micro": 24})
    assert batches.at(5)[0].tokens[:, 0].tolist() == list(range(5, 5 + GLOBAL_BATCH))


def test_mock_samples_are_a_function_of_seed_and_index() -> None:
    first, repeated = MockDataset(10, 16, 50, seed=3), MockDataset(999, 16, 50, seed=3)
    other_seed = MockDataset(10, 16, 50, seed=4)
    for index in (9, 0, 4):  # in any order
        assert all(torch.equal(first[index][key], repeated[index][key]) for key in ("tokens", "labels", "loss_mask"))
    texts = {tuple(data[index]["tokens"].tolist()) for data in (first, other_seed) for index in range(10)}
    assert len(texts) > 15  # not all equal
    for sample in (first[index] for index in range(10)):
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert 0 <= sample["tokens"].min() and sample["labels"].max() < 50
        assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape == (16,)


def test_packed_mock_samples_are_several_examples() -> None:
    documents = MockDataset(1, 10, 100, seed=1, examples=4)[0]["documents"]
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert "documents" not in MockDataset(1, 10, 100, seed=1)[0]


def test_mock_data_of_a_run() -> None:
    plan = resolve(make(**{"trainer.steps": 5, "trainer.val_every_steps": 2, "trainer.val_steps": 3}), 1)
    data = build_data(plan, plan.topology(0), CPU)
    assert len(data.train.samples) == 5 * 8
    assert data.validation is not None and len(data.validation.samples) == 3 * 8
    assert not torch.equal(data.train.at(0)[0].tokens, data.validation.at(0)[0].tokens)
    without = resolve(make(), 1)
    assert build_data(without, without.topology(0), CPU).validation is None
