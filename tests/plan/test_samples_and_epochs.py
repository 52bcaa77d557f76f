"""The plan states the same samples and epochs per dataset as the sample stream reads."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.corpus.splits import planned_timeline, split_range
from megatron_llama.plan import Plan, format_plan, resolve
from tests.config.helpers import make
from tests.data.files import data_plan, numbered, write_indexed

FEW_EPOCHS = {"trainer.steps": 10}


@pytest.fixture
def sets(tmp_path: Path) -> tuple[str, str]:
    small, large = (write_indexed(tmp_path / name, numbered(size)) for name, size in (("small", 50), ("large", 500)))
    return small, large


def page_rows(plan: Plan) -> list[list[str]]:
    """The cells of the plan's table of datasets."""
    lines = format_plan(plan).splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("  dataset")]
    end = next(number for number in range(start, len(lines) + 1) if number == len(lines) or not lines[number])
    assert max(map(len, lines[start:end])) < 80
    return [re.split(" {2,}", line.strip()) for line in lines[start + 2 : end]]


def test_a_blend(sets: tuple[str, str]) -> None:
    small, large = sets
    schedule = [{"samples": 300, "prefixes": [large]}, {"samples": 10_000, "prefixes": [small]}]
    plan = data_plan([0.25, small, 0.75, large], **{"trainer.steps": 60, "data.schedule": schedule})
    total, timeline = 60 * 8, planned_timeline(plan.config.data)
    counted = Counter(timeline.at(number)[0] for number in range(total))
    tokens = {
        prefix: sum(map(len, numbered(count)[: count * 8 // 10])) for prefix, count in ((small, 50), (large, 500))
    }
    for reading in plan.dataset_usage:
        assert reading.read == counted[reading.prefix]
        assert reading.sequences == (tokens[reading.prefix] - 1) // 32
        assert reading.tokens == 32 * reading.sequences
        assert reading.epochs == reading.read / reading.sequences and reading.share == reading.read / total
    assert sum(reading.read for reading in plan.dataset_usage) == total
    first, second = page_rows(plan)
    assert first[0].endswith("small") and second[0].endswith("large")
    assert first[1:] == ["37", "1.184 k", "15.6 %", "75", "2.4 k", "2.03"]


def test_datasets_without_weights_and_without_files(sets: tuple[str, str]) -> None:
    """A note states the weights by size; data that is missing has no row."""
    plan = data_plan(list(sets), **FEW_EPOCHS)
    assert [note for note in plan.notes if "no weights" in note] == [
        "data.prefixes has no weights: datasets are weighted by size, so that an epoch reads each sequence once"
    ]
    assert len({round(reading.epochs, 1) for reading in plan.dataset_usage}) == 1
    assert not data_plan([sets[0]], **FEW_EPOCHS).notes
    assert not data_plan([1, sets[0], 1, sets[1]], **FEW_EPOCHS).notes
    changes: dict[str, Any] = {"data.mock": False, "data.prefixes": ["nowhere/a", "nowhere/b"]}
    plan = resolve(make(**changes), 1, exists=lambda path: True)
    assert plan.dataset_usage == () and "epochs" not in format_plan(plan)
    assert resolve(make(), 1).dataset_usage == ()


def test_many_datasets_are_abbreviated(sets: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / ("long" * 20)).mkdir()
    many: list[Any] = []
    for number in range(30):
        many += [1, write_indexed(tmp_path / ("long" * 20) / f"set{number}", numbered(5))]
    plan = data_plan(many, **{"trainer.steps": 10**10})
    rows = page_rows(plan)
    assert len(rows) < 20 and rows[-2] == ["…"]
    assert [row[0] for row in (rows[0], rows[-1])] == ["…set0", "…set29"]
    assert rows[0][-3:] == ["2.667 B", "85.33 B", "889 M"]
    (note,) = [note for note in plan.notes if "epochs" in note]
    assert note.startswith("more than 4 epochs of set0 (888,888,889.0), set1 (") and ") and 27 more: " in note


def test_fine_tuning_sets_are_read_equally_often(sets: tuple[str, str]) -> None:
    changes: dict[str, Any] = {"data.kind": "sft", "trainer.steps": 100}
    for prefix in sets:
        masks = [[1] * len(document) for document in numbered(50 if prefix.endswith("small") else 500)]
        write_indexed(Path(prefix + "_mask"), masks, "B")
    plan = data_plan(list(sets), **changes)
    small, large = plan.dataset_usage
    assert (small.sequences, large.sequences) == (40, 400)
    assert (small.read, large.read) == (73, 727) and small.epochs == pytest.approx(large.epochs, rel=0.01)
    assert small.tokens == sum(map(len, numbered(50)[:40]))
    page = format_plan(plan)
    assert "dataset (examples)" in page and max(map(len, page.splitlines())) < 80


@pytest.mark.parametrize("count", [1, 7, 10, 99, 1000, 12345])
@pytest.mark.parametrize("split", ["969,30,1", "1,1,0", "0.5,0.25,0.25", "80,20,0"])
def test_splits_are_rounded_as_megatron_does(split: str, count: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
    from megatron.core.datasets.utils import normalize

    matrix = convert_split_vector_to_split_matrix(normalize([float(share) for share in split.split(",")]))
    for number, part in enumerate(matrix):
        first, last = split_range(split, number, count)
        if part is not None and first != last:
            assert (first, last) == (round(part[0] * count), round(part[1] * count))
