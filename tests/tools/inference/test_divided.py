"""Prompts divided over context-parallel ranks: the same ids and scores as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.parallel.context import Division
from megatron_llama.tools.inference.evaluation import EncodedRecord, label_scores
from megatron_llama.tools.inference.generator import Answer, Generator, Sampling
from tests.tools.inference.models import PROMPTS, make_folder, with_generator

COUNT = 40
LONG = [[*range(5, 95)], [7], *PROMPTS]
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {},
    "window": {"sliding_window": 5},
    "dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    },
}
SAMPLING = {"greedy": Sampling(greedy=True), "drawn": Sampling(temperature=1.3, top_p=0.9)}


@pytest.fixture(scope="module", params=SCALINGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "hf", **SCALINGS[request.param])


def write(folder: Path, sampling: Sampling, **layout: int) -> list[Answer]:
    """The answers, the same on all ranks."""
    ranks = with_generator(lambda made: made.generate(LONG, sampling, COUNT), folder, **layout)
    assert all(answers == ranks[0] for answers in ranks)
    return ranks[0]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=["cp2", "cp4", "cp2 tp2"])
def test_divided_prompts_are_continued_as_whole_ones(folder: Path, layout: dict[str, int], sampling: str) -> None:
    alone = write(folder, SAMPLING[sampling])
    assert len({number for answer in alone for number in answer.ids}) > 30, "else the comparison would show nothing"
    assert write(folder, SAMPLING[sampling], **layout) == alone


def test_a_rank_keeps_its_part_of_a_prompt(folder: Path) -> None:
    def shapes(made: Generator) -> list[torch.Size]:
        """Sizes of the keys after a prompt of 90 tokens, for 10 more."""
        cache = made.cache(1, 100)
        made.logits(torch.tensor(LONG[:1]), cache.at(torch.tensor([0]), 90, torch.tensor([89])))
        return [layer._keys.shape for layer in cache.layers]

    for rank in with_generator(shapes, folder, cp=4):
        assert {shape[2] for shape in rank} == {96 // 4 + 10 // 4 + 2}


def test_scores_of_labels_after_divided_prompts(folder: Path) -> None:
    labels = [[7, 8, 9], [7, 10], [11]]
    records = [EncodedRecord(prompt, labels, {}) for prompt in LONG]
    alone = with_generator(lambda made: label_scores(made, records), folder)[0]
    for scores in with_generator(lambda made: label_scores(made, records), folder, cp=2):
        torch.testing.assert_close(scores, alone, rtol=1e-5, atol=1e-5)


def test_each_position_is_on_one_rank() -> None:
    from megatron_llama.topology import Grid, Topology

    for cp in (2, 4):
        grid = Grid({"tp": 1, "cp": cp, "dp": 1, "pp": 1})
        divisions = [Division(Topology(grid, rank), None) for rank in range(cp)]  # type: ignore[arg-type]
        for length in (1, 7, 8, 45):
            parts = [division.positions(length, torch.device("cpu")) for division in divisions]
            assert sorted(torch.cat(parts).tolist()) == [*range(len(parts[0]) * cp)] and len(parts[0]) * cp >= length
            last = torch.tensor([length - 1, 0])
            places = [division.local_index(last, length) for division in divisions]
            assert torch.stack([is_here for _, is_here in places]).sum(0).tolist() == [1, 1]
            for part, (index, is_here) in zip(parts, places, strict=True):
                assert part[index][is_here].tolist() == last[is_here].tolist()
