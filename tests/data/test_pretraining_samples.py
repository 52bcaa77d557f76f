"""Pretraining samples equal the files. Sample n is the same for each run length, in each layout and after a resume."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_llama.config import ConfigError
from megatron_llama.corpus.indexed_format import IndexedDataset, read_index
from megatron_llama.data import epoch_index
from megatron_llama.data.epoch_index import make_epoch, open_epoch
from megatron_llama.data.pretraining_samples import build_streams
from megatron_llama.plan import Plan
from megatron_llama.system.errors import machine_fault
from tests.data.files import data_plan, epoch_texts, numbered, run_texts, stream_of, text, write_indexed
from tests.messages import unwrap
from tests.ranks import run_ranks

LENGTH = 32
Sample = dict[str, list[int]]
Changes = dict[str, Any]
VALIDATE: Changes = {"trainer.val_every_steps": 1}


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
    count = (sum(len(document) for document in documents[:160]) - 1) // LENGTH
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
    """A dataset that is named twice counts twice."""
    prefixes = [write_indexed(tmp_path / "a", numbered(50, 1)), write_indexed(tmp_path / "b", numbered(200, 10000))]
    stream, sizes = stream_of(data_plan(prefixes)), [len(stream_of(data_plan([prefix]))) for prefix in prefixes]
    assert len(stream) == sum(sizes)
    for epoch in range(3):
        firsts = [text(stream[epoch * len(stream) + number])[0] for number in range(len(stream))]
        assert [sum(first < 10000 for first in firsts), sum(first >= 10000 for first in firsts)] == sizes
        assert len(set(firsts)) == len(stream), "a sample came twice before the others were read once"
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


def test_samples_do_not_depend_on_rank_or_layout(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", numbered(200))
    changes: Changes = {"data.cache_dir": str(tmp_path / "alone"), **VALIDATE}
    (alone,) = samples_of(data_plan([prefix], **changes), 300, 10)
    assert alone[0][:10] != alone[1]
    layout: Changes = {"trainer.tp": 2, "data.cache_dir": str(tmp_path / "together"), **VALIDATE}
    assert samples_of(data_plan([prefix], world=4, **layout), 300, 10, world=4) == [alone] * 4
    (other_seed,) = samples_of(data_plan([prefix], **changes, **{"trainer.seed": 5}), 300, 10)
    assert other_seed[0] != alone[0]


def test_ranks_without_a_shared_cache(tmp_path: Path) -> None:
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
        assert ("prepare more documents" if "none" in rule else "use a larger dataset") in message
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


@pytest.mark.parametrize("seed", range(6))
def test_an_epoch_is_cut_and_shuffled_as_megatron_does(seed: int, tmp_path: Path) -> None:
    chooser = random.Random(seed)
    lengths = [chooser.choice([1, 2, 3, 40, chooser.randint(1, 300)]) for _ in range(chooser.randint(20, 150))]
    ids = iter(range(1, 60000))
    prefix = write_indexed(tmp_path / "text", [[next(ids) for _ in range(length)] for length in lengths])
    span, length = (chooser.randint(0, 5), len(lengths) - chooser.randint(0, 5)), chooser.randint(2, 50)
    dataset = IndexedDataset(prefix)
    for epoch in range(3):
        ours = open_epoch(dataset, span, length, seed, epoch, tmp_path / "ours")
        theirs = epoch_texts(prefix, span, length, [seed, epoch] if epoch else seed, tmp_path / f"theirs{epoch}")
        assert [ours.text(dataset, sample)[0].tolist() for sample in range(len(ours.order))] == theirs
        assert len(theirs) == (sum(lengths[slice(*span)]) - 1) // length


def test_each_seed_and_epoch_has_another_order() -> None:
    lengths = np.full(500, 40, dtype=np.int32)
    epochs = [make_epoch(lengths, 0, 500, 32, seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len({epoch.documents.tobytes() for epoch in epochs}) == len({e.order.tobytes() for e in epochs}) == 9
    lengths = np.array([5, 6], dtype=np.int32)
    for first, last in ((0, 0), (0, 1), (0, 2)):
        assert len(make_epoch(lengths, first, last, 32, 1, 0).order) == 0


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_indexed(tmp_path / "text", numbered(200)))


def test_files_are_made_once_and_mapped(dataset: IndexedDataset, tmp_path: Path, monkeypatch: Any) -> None:
    cache = tmp_path / "cache"
    first = open_epoch(dataset, (0, 160), 32, 7, 3, cache)
    assert all(isinstance(array, np.memmap) for array in (first.documents, first.boundaries, first.order))
    (folder,) = cache.glob("text-epoch3-*[!k]")
    assert sorted(path.name for path in folder.iterdir()) == ["borders.npy", "documents.npy", "order.npy"]
    monkeypatch.setattr(epoch_index, "make_epoch", None)  # would be called
    assert np.array_equal(first.order, open_epoch(dataset, (0, 160), 32, 7, 3, cache).order)
    for other in ((0, 161), 32, 7, 3), ((0, 160), 31, 7, 3), ((0, 160), 32, 8, 3), ((0, 160), 32, 7, 4):
        with pytest.raises(TypeError):  # None is not callable: it would be made
            open_epoch(dataset, *other, cache)
    os.utime(dataset.idx_path, (1, 1))  # another dataset was written over it
    with pytest.raises(TypeError):
        open_epoch(dataset, (0, 160), 32, 7, 3, cache)


@pytest.mark.parametrize("name", ["documents.npy", "borders.npy", "order.npy"])
def test_incomplete_files_are_rebuilt(dataset: IndexedDataset, tmp_path: Path, name: str) -> None:
    open_epoch(dataset, (0, 160), 32, 7, 0, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-8])
    reopened = open_epoch(dataset, (0, 160), 32, 7, 0, tmp_path / "cache")
    assert all(map(np.array_equal, astuple(reopened), astuple(make_epoch(dataset.index.lengths, 0, 160, 32, 7, 0))))


def test_a_failure_leaves_nothing(dataset: IndexedDataset, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(epoch_index.np, "save", full)
    with pytest.raises(OSError, match="No space"):
        open_epoch(dataset, (0, 160), 32, 7, 0, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def refuse_lock(file: object) -> None:
    raise OSError(37, "No locks available")


def test_without_locks_files_of_another_process_stay(dataset: IndexedDataset, tmp_path: Path, monkeypatch: Any) -> None:
    """The other process publishes its files while this one shuffles."""
    before, arguments = set[int](), (dataset, (0, 160), 32, 7, 0, tmp_path / "cache")

    def inodes() -> set[int]:
        return {path.stat().st_ino for path in tmp_path.glob("cache/text-epoch0-*/*.npy")}

    def make_after_another(*args: Any) -> epoch_index.Epoch:
        monkeypatch.setattr(epoch_index, "make_epoch", make_epoch)
        open_epoch(*arguments)
        before.update(inodes())
        return make_epoch(*args)

    monkeypatch.setattr("megatron_llama.system.files.wait_for_lock", refuse_lock)
    monkeypatch.setattr(epoch_index, "make_epoch", make_after_another)
    open_epoch(*arguments)
    assert len(before) == 3 and inodes() == before


@pytest.mark.parametrize("locks", [True, False])
def test_an_epoch_is_opened_together(dataset: IndexedDataset, tmp_path: Path, locks: bool, monkeypatch: Any) -> None:
    """Each of them reads whole files; with locks, one has made them."""

    def counted(*args: Any) -> epoch_index.Epoch:
        with (tmp_path / "made").open("a") as file:
            file.write("x")
        return make_epoch(*args)

    if not locks:
        monkeypatch.setattr("megatron_llama.system.files.wait_for_lock", refuse_lock)
    monkeypatch.setattr(epoch_index, "make_epoch", counted)
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as processes:
        opened = processes.map(_open_in_threads, [str(tmp_path / "text")] * 3, [tmp_path / "cache"] * 3)
    expected = make_epoch(dataset.index.lengths, 0, 160, 32, 7, 0)
    for epoch in (epoch for epochs in opened for epoch in epochs):
        assert all(map(np.array_equal, astuple(epoch), astuple(expected)))
    made = len((tmp_path / "made").read_text())
    assert made == 4 if locks else made >= 4
    assert not list(tmp_path.glob("cache/*.draft")) and not list(tmp_path.glob("cache/.*.draft"))


def _open_in_threads(prefix: str, cache: Path) -> list[epoch_index.Epoch]:
    """Open the epoch of four seeds in each of three threads; return the epochs of seed 7."""

    def read(seed: int) -> epoch_index.Epoch:
        return open_epoch(IndexedDataset(prefix), (0, 160), 32, seed, 0, cache)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(read, [7, 8, 9, 10] * 3))[::4]


def test_only_missing_files_are_made(dataset: IndexedDataset, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(OSError, match="Too many open files") as raised:
        open_epoch(dataset, (0, 10), 8, 1, 0, tmp_path)
    assert "ulimit -n" in str(machine_fault(raised.value))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_dataset_keeps_two_descriptors(dataset: IndexedDataset) -> None:
    before = len(os.listdir("/proc/self/fd"))
    datasets = [IndexedDataset(dataset.prefix) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before + 2 * len(datasets)
