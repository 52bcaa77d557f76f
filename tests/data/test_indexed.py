"""Real datasets through megatron-core: what is in the files is what is trained on, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.config import ConfigError
from megatron_llama.data.batches import build_data
from megatron_llama.data.indexed import build_datasets
from megatron_llama.plan import Plan
from megatron_llama.topology import build_topology
from tests.data.files import data_plan, numbered, write_indexed
from tests.model.llamas import CPU
from tests.ranks import run_ranks

LENGTH = 32
Sample = dict[str, list[int]]


def samples_of(plan: Plan, train: int, validation: int = 0, world: int = 1) -> list[tuple[list[Sample], list[Sample]]]:
    """(training, validation) samples as each of ``world`` ranks reads them."""
    return run_ranks(_read, world, plan, train, validation)


def _read(rank: int, plan: Plan, train: int, validation: int) -> tuple[list[Sample], list[Sample]]:
    splits = build_datasets(plan, train, validation)
    wanted = zip(splits, (train, validation), strict=True)
    return tuple([_lists(split[index]) for index in range(count)] if split else [] for split, count in wanted)  # type: ignore


def _lists(sample: dict[str, torch.Tensor]) -> Sample:
    return {key: sample[key].tolist() for key in ("tokens", "labels", "loss_mask")}


def ids(samples: list[Sample]) -> set[int]:
    return {token for sample in samples for token in (*sample["tokens"], *sample["labels"])}


@pytest.mark.parametrize("kind", ["H", "i"], ids=["uint16", "int32"])
def test_samples_are_stretches_of_the_documents(tmp_path: Path, kind: str) -> None:
    first_id = 1 if kind == "H" else 70000  # int32 is there for ids that uint16 can't hold
    documents = numbered(200, first_id)
    prefix = write_indexed(tmp_path / "text", documents, kind)
    plan = data_plan([prefix], **{"model.vocab_size": first_id + 10000})
    training = sum(len(document) for document in documents[:160])
    count = (training - 1) // LENGTH  # one epoch
    ((samples, _),) = samples_of(plan, count)
    begins, ends = {document[0] for document in documents}, {document[-1] for document in documents}
    labels: list[int] = []
    for sample in samples:
        text = [*sample["tokens"], sample["labels"][-1]]
        assert text[1:] == sample["labels"] and len(text) == LENGTH + 1
        for this, following in zip(text, text[1:], strict=False):
            assert following == this + 1 or (this in ends and following in begins)
        assert sample["loss_mask"] == [1.0] * LENGTH
        labels += sample["labels"]
    assert len(set(labels)) == len(labels), "a token was trained on twice in one epoch"
    assert len(labels) == count * LENGTH
    assert [s["tokens"][0] for s in samples] != sorted(s["tokens"][0] for s in samples), "nothing was shuffled"


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    documents = numbered(200)
    plan = data_plan([write_indexed(tmp_path / "text", documents)])
    ((training, validation),) = samples_of(plan, 400, 60)  # more than an epoch of each
    assert samples_of(plan, 400) == [(training, [])], "validation changes what is trained on"
    border = documents[160][0]
    assert max(ids(training)) < border <= min(ids(validation))
    assert len(ids(training)) > 0.9 * border and len(ids(validation)) > 0.9 * (documents[-1][-1] - border)


@pytest.mark.parametrize("weights", [(3, 7), (0.05, 0.95)])
def test_weights_are_shares_of_the_samples(tmp_path: Path, weights: tuple[float, float]) -> None:
    # The first dataset is far smaller than its share, so it is gone through many times.
    prefixes = [
        write_indexed(tmp_path / "a", numbered(50, 1)),
        write_indexed(tmp_path / "b", numbered(300, 10000)),
    ]
    plan = data_plan([weights[0], prefixes[0], weights[1], prefixes[1]])
    ((samples, _),) = samples_of(plan, 400)
    from_first = 0
    for count, sample in enumerate(samples, start=1):
        sources = {token < 10000 for token in sample["tokens"]}
        assert len(sources) == 1, "a sample mixes datasets"
        from_first += sources.pop()
        assert abs(from_first - count * weights[0] / sum(weights)) <= 1, count


def test_without_weights_every_token_is_as_likely(tmp_path: Path) -> None:
    small, large = numbered(50, 1), numbered(200, 10000)
    prefixes = [write_indexed(tmp_path / "a", small), write_indexed(tmp_path / "b", large)]
    ((samples, _),) = samples_of(data_plan(prefixes), 150)
    share = sum(sample["tokens"][0] < 10000 for sample in samples) / len(samples)
    tokens = [sum(map(len, documents)) for documents in (small, large)]
    assert share == pytest.approx(tokens[0] / sum(tokens), abs=1 / 150)


def test_samples_do_not_depend_on_rank_or_layout(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(200))
    changes: dict[str, Any] = {"data.cache_dir": str(tmp_path / "alone")}
    (alone,) = samples_of(data_plan([prefix], **changes), 60, 10)
    layout: dict[str, Any] = {"trainer.tp": 2, "data.cache_dir": str(tmp_path / "together")}
    for answer in samples_of(data_plan([prefix], world=4, **layout), 60, 10, world=4):
        assert answer == alone
    (other_seed,) = samples_of(data_plan([prefix], **changes, **{"trainer.seed": 5}), 60, 10)
    assert other_seed[0] != alone[0]


def test_index_files_are_made_once(tmp_path: Path) -> None:
    plan = data_plan([write_indexed(tmp_path / "text", numbered(200))])
    cache = tmp_path / "index_cache"
    assert plan.config.data.cache_dir == str(cache)
    first = samples_of(plan, 60, 10)
    made = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert {path.suffix for path in made} >= {".npy"}
    # Two ranks, later: they read what is there, and write nothing.
    assert samples_of(plan, 60, 10, world=2) == first * 2
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == made


def test_the_number_of_steps_does_not_change_the_first_samples(tmp_path: Path) -> None:
    # Within an epoch; beyond it megatron-core shuffles the epochs together.
    prefix = write_indexed(tmp_path / "text", numbered(200))
    ((short, _),), ((long, _),) = (samples_of(data_plan([prefix]), count) for count in (20, 100))
    assert short == long[:20]


def test_a_run_reads_training_and_validation(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(200))
    changes = {"trainer.steps": 3, "trainer.val_every_steps": 1, "trainer.val_steps": 1}
    first, validation, steps = run_ranks(_run_data, 1, data_plan([prefix], **changes))[0]
    assert steps >= 3 * 8  # megatron-core cuts whole epochs
    assert first != validation


def _run_data(rank: int, plan: Plan) -> tuple[list, list, int]:
    data = build_data(plan, build_topology(plan, rank), CPU)
    assert data.validation is not None
    return data.train.at(0)[0].tokens.tolist(), data.validation.at(0)[0].tokens.tolist(), len(data.train.samples)


@pytest.mark.parametrize(
    ("documents", "split", "rule"),
    [
        (200, "100,0,0", "leaves too few documents for validation"),
        # megatron-core itself never comes back from a split without a token.
        (1, "50,50,0", "leaves none of the 1 documents of PREFIX for training"),
        (10, "969,30,1", "leaves none of the 10 documents of PREFIX for validation"),
    ],
)
def test_a_split_without_documents_is_refused(tmp_path: Path, documents: int, split: str, rule: str) -> None:
    prefix = write_indexed(tmp_path / "text", [[1] * 40] * documents)
    changes: dict[str, Any] = {"data.split": split}
    plan = data_plan([prefix], world=2, **changes)
    for message in run_ranks(_refusal, 2, plan):
        assert "data.prefixes" in message and rule.replace("PREFIX", prefix) in message, message
        assert "use a larger dataset" in message


def test_a_split_that_is_not_wanted_may_be_empty(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(10))
    changes: dict[str, Any] = {"data.split": "969,30,1"}
    ((samples, validation),) = samples_of(data_plan([prefix], **changes), 20, 0)
    assert len(samples) == 20 and not validation


def test_a_cache_that_can_not_be_written_is_told_by_every_rank(tmp_path: Path) -> None:
    # Only rank 0 writes there: the others must not wait for it.
    (tmp_path / "file").touch()
    prefix = write_indexed(tmp_path / "text", numbered(20))
    unwritable: dict[str, Any] = {"data.cache_dir": str(tmp_path / "file" / "cache")}
    plan = data_plan([prefix], world=2, **unwritable)
    messages = run_ranks(_refusal, 2, plan)
    assert messages[0] == messages[1] and "NotADirectoryError" in messages[0] and "cache" in messages[0]


def test_a_broken_dataset_is_refused_on_every_rank(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(20))
    plan = data_plan([prefix], world=2)
    Path(prefix + ".bin").write_bytes(b"")
    messages = run_ranks(_refusal, 2, plan)
    assert messages[0] == messages[1] and "text.bin" in messages[0]


def _refusal(rank: int, plan: Plan) -> str:
    with pytest.raises(ConfigError) as caught:
        build_datasets(plan, 8, 8)
    return " ".join(str(caught.value).split())  # without the line breaks of the page
