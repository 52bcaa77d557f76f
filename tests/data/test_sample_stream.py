"""Pretraining samples equal the files. Sample n is the same for each run length, in each layout and after a resume."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_llama.config import ConfigError
from megatron_llama.corpus.indexed_format import read_index
from megatron_llama.corpus.splits import planned_timeline
from megatron_llama.data.sample_stream import EndlessDataset, SampleStream, build_streams
from megatron_llama.plan import Plan
from tests.data.files import data_plan, numbered, write_indexed
from tests.data.megatron import epoch_texts, run_texts, text
from tests.messages import unwrap
from tests.ranks import run_ranks

LENGTH = 32
Sample = dict[str, list[int]]
Changes = dict[str, Any]
VALIDATE: Changes = {"trainer.val_every_steps": 1}


def stream_of(plan: Plan) -> SampleStream:
    """A plan's training samples, without ranks."""
    timeline = planned_timeline(plan.config.data)
    prefixes = {prefix for segment in timeline.segments for prefix in segment.weights}
    return SampleStream(timeline, {prefix: EndlessDataset(plan, prefix, 0) for prefix in prefixes})


def samples_of(plan: Plan, train: int, validation: int = 0, world: int = 1) -> list[tuple[list[Sample], list[Sample]]]:
    """(training, validation) samples as each of ``world`` ranks reads them."""
    return run_ranks(_read, world, plan, train, validation)


def _read(rank: int, plan: Plan, train: int, validation: int) -> tuple[list[Sample], list[Sample]]:
    training, sets = build_streams(plan)
    held_out = [_lists(stream[index]) for stream in sets.values() for index in range(validation)]
    return [_lists(training[index]) for index in range(train)], held_out


def _lists(sample: Any) -> Sample:
    return {key: sample[key].tolist() for key in ("tokens", "labels", "loss_mask")}


def ids(samples: list[Sample]) -> set[int]:
    return {token for sample in samples for token in (*sample["tokens"], *sample["labels"])}


@pytest.mark.parametrize("kind", ["H", "i"], ids=["uint16", "int32"])
def test_samples_are_stretches_of_the_documents(tmp_path: Path, kind: str) -> None:
    first_id = 1 if kind == "H" else 70000  # int32 is there for ids that uint16 can't hold
    documents = numbered(200, first_id)
    prefix = write_indexed(tmp_path / "text", documents, kind)
    stream = stream_of(data_plan([prefix], **{"model.vocab_size": first_id + 10000}))
    training = sum(len(document) for document in documents[:160])
    count = (training - 1) // LENGTH
    assert len(stream) == count
    begins, ends = {document[0] for document in documents}, {document[-1] for document in documents}
    for epoch in (0, 1, 5):
        samples = [stream[epoch * count + number] for number in range(count)]
        labels: list[int] = []
        for sample in samples:
            assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
            read = text(sample)
            assert read[1:] == sample["labels"].tolist() and len(read) == LENGTH + 1
            for this, following in zip(read, read[1:], strict=False):
                assert following == this + 1 or (this in ends and following in begins)
            assert sample["loss_mask"].tolist() == [1.0] * LENGTH
            labels += read[1:]
        assert len(set(labels)) == len(labels) == count * LENGTH, "a token was trained on twice in one epoch"
        firsts = [text(sample)[0] for sample in samples]
        assert firsts != sorted(firsts), "nothing was shuffled"


class Oracle:
    """The stream in a few lines: all samples of all datasets in the order of their keys, and megatron-core's own
    dataset, rebuilt for each epoch, for their tokens."""

    def __init__(self, plan: Plan, cache: Path) -> None:
        self.plan, self.cache, self.epochs = plan, cache, dict[tuple[str, int], list[list[int]]]()

    def texts(self, weights: dict[str, float], count: int) -> list[list[int]]:
        keys = []
        for number, (prefix, weight) in enumerate(weights.items()):
            phase, share = (number + 0.5) / len(weights), weight / sum(weights.values())
            keys += [((sample + phase) / share, number, sample, prefix) for sample in range(int(count * share) + 5)]
        return [self.text(prefix, sample) for _, _, sample, prefix in sorted(keys)[:count]]

    def text(self, prefix: str, sample: int) -> list[int]:
        epoch, place = divmod(sample, len(self._epoch(prefix, 0)))
        return self._epoch(prefix, epoch)[place]

    def _epoch(self, prefix: str, epoch: int) -> list[list[int]]:
        if (prefix, epoch) not in self.epochs:
            seed, cache = self.plan.config.trainer.seed, self.cache / f"{epoch}"
            span = (0, round(0.8 * len(read_index(prefix))))
            self.epochs[prefix, epoch] = epoch_texts(prefix, span, LENGTH, [seed, epoch] if epoch else seed, cache)
        return self.epochs[prefix, epoch]


@pytest.mark.parametrize("seed", range(4))
def test_sample_n_is_the_same_in_a_run_of_any_length_that_stops_anywhere(seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    weights = {}
    for number in range(chooser.randint(1, 4)):
        documents = numbered(chooser.randint(8, 60), 1 + 4000 * number)
        weights[write_indexed(tmp_path / f"set{number}", documents)] = chooser.uniform(0.1, 1)
    blend = [item for prefix, weight in weights.items() for item in (weight, prefix)]

    def plan(**changes: Any) -> Plan:
        return data_plan(blend, **{"trainer.seed": seed, **changes})

    count = 300  # several epochs of each
    expected = Oracle(plan(), tmp_path / "oracle").texts(weights, count)
    for steps in (1, 100_000):  # sample by sample, from the beginning
        stream = stream_of(plan(**{"trainer.steps": steps}))
        assert [text(stream[number]) for number in range(count)] == expected
    for _ in range(20):  # and from anywhere, by a process that has read nothing else
        number, cache = chooser.randrange(count), tmp_path / f"cache{chooser.randrange(3)}"
        stream = stream_of(plan(**{"trainer.steps": chooser.randint(1, 1000), "data.cache_dir": str(cache)}))
        assert text(stream[number]) == expected[number]


def test_a_run_within_an_epoch_has_megatrons_order(tmp_path: Path) -> None:
    """The old order is a run's that does not go through its dataset twice, in training and in validation."""
    plan = data_plan([write_indexed(tmp_path / "text", numbered(200))], **VALIDATE)
    training, validation = run_texts(plan, None, 140, 30, tmp_path / "theirs")
    ((ours, held_out),) = samples_of(plan, 140, 30)
    assert [[*s["tokens"], s["labels"][-1]] for s in ours] == training
    assert [[*s["tokens"], s["labels"][-1]] for s in held_out] == validation
    beyond = run_texts(plan, None, 200, 30, tmp_path / "theirs")[0]
    assert beyond[:140] != training, "the old order depends on the run's length; nothing is compared here"


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    documents = numbered(200)
    prefix = write_indexed(tmp_path / "text", documents)
    ((training, validation),) = samples_of(data_plan([prefix], **VALIDATE), 400, 60)  # more than an epoch of each
    assert samples_of(data_plan([prefix]), 400) == [(training, [])], "validation changes the training samples"
    boundary = documents[160][0]
    assert max(ids(training)) < boundary <= min(ids(validation))
    assert len(ids(training)) > 0.9 * boundary and len(ids(validation)) > 0.9 * (documents[-1][-1] - boundary)


def test_without_weights_an_epoch_reads_each_dataset_once(tmp_path: Path) -> None:
    prefixes = [write_indexed(tmp_path / "a", numbered(50, 1)), write_indexed(tmp_path / "b", numbered(200, 10000))]
    plan = data_plan(prefixes)
    stream, sizes = stream_of(plan), [len(stream_of(data_plan([prefix]))) for prefix in prefixes]
    assert len(stream) == sum(sizes)
    for epoch in range(3):
        firsts = [text(stream[epoch * len(stream) + number])[0] for number in range(len(stream))]
        assert [sum(first < 10000 for first in firsts), sum(first >= 10000 for first in firsts)] == sizes
        assert len(set(firsts)) == len(stream), "a sample came twice before the others were read once"


def test_a_dataset_that_is_named_twice_counts_twice(tmp_path: Path) -> None:
    a, b = write_indexed(tmp_path / "a", numbered(50, 1)), write_indexed(tmp_path / "b", numbered(50, 10000))
    twice, once = stream_of(data_plan([1, a, 2, b, 1, a])), stream_of(data_plan([2, a, 2, b]))
    assert all(text(twice[number]) == text(once[number]) for number in range(100))


def test_a_schedule_changes_the_blend_and_nothing_else(tmp_path: Path) -> None:
    a, b = write_indexed(tmp_path / "a", numbered(50, 1)), write_indexed(tmp_path / "b", numbered(50, 10000))
    schedule = [{"samples": 60, "prefixes": [0.5, a, 0.5, b]}, {"samples": 130, "prefixes": [a]}]
    plan = data_plan([b], **{"data.schedule": schedule, **VALIDATE})
    oracle, stream = Oracle(plan, tmp_path / "oracle"), stream_of(plan)
    read: Counter[str] = Counter()
    for number in range(220):
        decoded = text(stream[number])
        which = a if decoded[0] < 10000 else b
        assert decoded == oracle.text(which, read[which]), "a dataset did not continue at its position"
        read[which] += 1
        if number == 59:
            assert read == {b: 60}
        if number == 129:
            assert read == {b: 95, a: 35}
    assert read == {b: 95, a: 125}
    ((_, validation),) = samples_of(plan, 0, 150)
    assert validation == samples_of(data_plan([b], **VALIDATE), 0, 150)[0][1]


def test_samples_do_not_depend_on_rank_layout_or_length(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(200))
    changes: Changes = {"data.cache_dir": str(tmp_path / "alone"), **VALIDATE}
    (alone,) = samples_of(data_plan([prefix], **changes), 300, 10)
    (long,) = samples_of(data_plan([prefix], **changes, **{"trainer.steps": 3000}), 300, 10)
    assert long == alone and alone[0][:10] != alone[1]
    layout: Changes = {"trainer.tp": 2, "data.cache_dir": str(tmp_path / "together"), **VALIDATE}
    assert samples_of(data_plan([prefix], world=4, **layout), 300, 10, world=4) == [alone] * 4
    (other_seed,) = samples_of(data_plan([prefix], **changes, **{"trainer.seed": 5}), 300, 10)
    assert other_seed[0] != alone[0]


def test_ranks_without_a_shared_cache(tmp_path: Path) -> None:
    """Each rank reads the same samples, with all index files in its cache."""
    prefix = write_indexed(tmp_path / "text", numbered(100))
    plans = [data_plan([prefix], world=2, **{"data.cache_dir": str(tmp_path / f"node{rank}")}) for rank in range(2)]
    one, other = run_ranks(_read_with_plan_of_rank, 2, plans)
    assert one == other
    caches = [sorted(path.name for path in (tmp_path / f"node{rank}").iterdir()) for rank in range(2)]
    assert caches[0] == caches[1] and len(caches[0]) == 4, "two epochs, and their locks"


def _read_with_plan_of_rank(rank: int, plans: list[Plan]) -> list[Sample]:
    return _read(rank, plans[rank], 130, 0)[0]


@pytest.mark.parametrize(
    ("documents", "split", "rule"),
    [
        (1, "50,50,0", "leaves none of the 1 documents of PREFIX for training"),
        (10, "969,30,1", "leaves none of the 10 documents of PREFIX for validation"),
        (2, "1,1,0", "leaves 30 tokens of PREFIX for training, less than a sequence"),
    ],
)
def test_a_split_without_a_sequence_is_refused(tmp_path: Path, documents: int, split: str, rule: str) -> None:
    prefix = write_indexed(tmp_path / "text", [[1] * 30] * documents)
    changes: Changes = {"data.split": split, "trainer.val_every_steps": 1}
    for message in run_ranks(_refusal, 2, data_plan([prefix], world=2, **changes)):
        assert "data.prefixes" in message and rule.replace("PREFIX", prefix) in message, message
        assert "use a larger dataset" in message
    if split == "969,30,1":  # without validation
        ((samples, validation),) = samples_of(data_plan([prefix], **{"data.split": split}), 20, 0)
        assert len(samples) == 20 and not validation


def test_every_rank_reports_an_unwritable_cache_and_a_damaged_dataset(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    prefix = write_indexed(tmp_path / "text", numbered(20))
    plan = data_plan([prefix], world=2, **{"data.cache_dir": str(tmp_path / "file" / "cache")})
    messages = run_ranks(_refusal, 2, plan)
    assert messages[0] == messages[1] and "NotADirectoryError" in messages[0] and "data.cache_dir" in messages[0]
    plan = data_plan([prefix], world=2)
    Path(prefix + ".bin").write_bytes(b"")
    messages = run_ranks(_refusal, 2, plan)
    assert messages[0] == messages[1] and "text.bin" in messages[0]


def _refusal(rank: int, plan: Plan) -> str:
    with pytest.raises(ConfigError) as caught:
        build_streams(plan)
    return unwrap(str(caught.value))


@pytest.mark.parametrize("bad", [-7, 20000], ids=["negative", "beyond the vocabulary"])
def test_an_id_without_a_row_is_named_where_it_is(tmp_path: Path, bad: int) -> None:
    documents = numbered(60)
    documents[40][2] = bad  # behind what a start looks at, in a large dataset
    plan = data_plan([write_indexed(tmp_path / "text", documents, "i")], **{"data.split": "1,0,0"})
    stream, failures = stream_of(plan), set()
    for number in range(2 * len(stream)):
        try:
            sample = stream[number]
        except ConfigError as error:
            failures.add(unwrap(str(error)))
            continue
        assert bad not in ids([sample])
    (message,) = failures
    assert f"token 2 of sequence 40 has id {bad}" in message and str(tmp_path / "text") in message
