"""The order of an epoch is megatron-core's, and its files are never seen half made."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.data import epoch_index
from megatron_llama.data.epoch_index import make_epoch, open_epoch
from megatron_llama.system.errors import machine_fault
from tests.data.files import numbered, write_indexed
from tests.data.megatron import epoch_texts


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


def test_a_split_without_a_sequence_has_no_sample() -> None:
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
    reopened = open_epoch(dataset, (0, 160), 32, 7, 3, cache)
    assert np.array_equal(first.order, reopened.order)
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

    monkeypatch.setattr(epoch_index, "wait_for_lock", refuse_lock)
    monkeypatch.setattr(epoch_index, "make_epoch", make_after_another)
    open_epoch(*arguments)
    assert len(before) == 3 and inodes() == before


@pytest.mark.parametrize("locks", [True, False])
def test_processes_and_threads_open_an_epoch_together(
    dataset: IndexedDataset, tmp_path: Path, locks: bool, monkeypatch: Any
) -> None:
    """Each of them reads whole files; with locks, one has made them."""

    def counted(*args: Any) -> epoch_index.Epoch:
        with (tmp_path / "made").open("a") as file:
            file.write("x")
        return make_epoch(*args)

    if not locks:
        monkeypatch.setattr(epoch_index, "wait_for_lock", refuse_lock)
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
