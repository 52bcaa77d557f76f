"""The prefetcher returns the same batches for any requests, and ends with the run."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from megatron_llama.data import batches
from megatron_llama.data.batches import AHEAD, Batches, Prefetcher
from megatron_llama.launch.watchdog import ThisProcess
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.plan import Plan, resolve
from tests.config.helpers import make
from tests.model.llamas import CPU
from tests.ranks import run_ranks

GLOBAL_BATCH = 8
PATIENCE_SECONDS = 60.0


class Watched:
    """Sample i is i. Records reads, waits at a closed gate, and fails on request."""

    def __init__(self, broken: int | None = None) -> None:
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = broken

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.gate.wait()
        self.threads.add(threading.current_thread().name)
        if index == self.broken:
            raise OSError(f"sample {index} can't be read")
        self.read.append(index)
        return {"tokens": torch.full((4,), index), "labels": torch.full((4,), -index), "loss_mask": torch.ones(4)}


def plan_of(world: int = 1, **settings: int) -> Plan:
    more = {f"trainer.{name}": value for name, value in settings.items()}
    return resolve(make(**{"trainer.global_batch_size": GLOBAL_BATCH, **more}), world)


def batches_of(samples: Watched, rank: int = 0, plan: Plan | None = None) -> Batches:
    plan = plan or plan_of()
    return Batches(samples, plan, plan.topology(rank), CPU)


def numbers(microbatches: object) -> list[list[int]]:
    """The samples of each micro batch."""
    assert isinstance(microbatches, list) and all(isinstance(batch, MicroBatch) for batch in microbatches)
    return [batch.tokens[:, 0].tolist() for batch in microbatches]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


# A run from its start, one that resumes, one that requests other positions than the next, the same one twice, and
# positions at and after the end.
JOURNEYS = {
    "start": [0, 8, 16, 24, 32],
    "resumed": [24, 32],
    "jumps": [0, 8, 32, 16, 24, 5, 13, 0],
    "again": [8, 8, 8],
    "past the end": [24, 32, 40, 48, 400],
}


@pytest.mark.parametrize("positions", JOURNEYS.values(), ids=JOURNEYS)
def test_returns_the_batches(positions: list[int]) -> None:
    samples = Watched()
    batches = batches_of(samples)
    with Prefetcher(batches, end=40) as prefetcher:
        actual = [numbers(prefetcher.at(position)) for position in positions]
    assert samples.threads == {"prefetch"}, "nothing is built on the training thread"
    if positions == JOURNEYS["start"]:
        assert samples.read == list(range(40)), "each sample is read once, and none after the end"
    assert actual == [numbers(batches.at(position)) for position in positions]


def test_the_next_batches_are_read_ahead() -> None:
    samples = Watched()
    with Prefetcher(batches_of(samples), end=10**6) as prefetcher:
        prefetcher.at(0)
        wait_until(lambda: len(samples.read) == (1 + AHEAD) * GLOBAL_BATCH)
        samples.gate.clear()  # reads wait from here on
        for batch in range(1, 1 + AHEAD):
            assert numbers(prefetcher.at(batch * GLOBAL_BATCH))[0] == [batch * GLOBAL_BATCH]
        samples.gate.set()
    assert len(samples.read) <= (2 + 2 * AHEAD) * GLOBAL_BATCH, "it does not run away"


def test_an_error_is_raised_with_its_batch_and_traceback() -> None:
    samples = Watched(broken=19)
    with Prefetcher(batches_of(samples), end=10**6) as prefetcher:
        prefetcher.at(0)
        prefetcher.at(8)
        with pytest.raises(OSError, match="sample 19") as caught:
            prefetcher.at(16)
        assert numbers(prefetcher.at(24))[0] == [24], "the thread is still there"
    names = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert "__getitem__" in names and "_micro_batch" in names


@pytest.mark.parametrize("failure", [None, SystemExit(75)], ids=["end", "fault"])
def test_the_thread_ends_with_the_run(failure: BaseException | None) -> None:
    prefetcher = Prefetcher(batches_of(Watched()), end=10**6)
    with suppress(SystemExit), prefetcher:
        prefetcher.at(0)
        if failure:
            raise failure
    assert not prefetcher._thread.is_alive()


def test_a_read_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_CLOSE_SECONDS", 0.1)
    samples = Watched()
    with Prefetcher(batches_of(samples), end=10**6) as prefetcher:
        prefetcher.at(0)
        samples.gate.clear()
    samples.gate.set()
    assert prefetcher._thread.daemon, "nor the end of the process"
    prefetcher._thread.join(PATIENCE_SECONDS)
    assert not prefetcher._thread.is_alive(), "pending batches are not built"


def test_the_watchdog_reports_a_read_that_hangs() -> None:
    samples = Watched()
    samples.gate.clear()
    rank = ThisProcess(0)
    with Prefetcher(batches_of(samples), end=8) as prefetcher:
        reader = threading.Thread(target=prefetcher.at, args=(0,))
        reader.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not {"in __getitem__", "in at"} <= set(re.findall(r"in (?:__getitem__|at)\b", rank.stacks())):
            assert time.monotonic() < deadline, rank.stacks()
            rank.request_stacks()  # of the read that hangs, and of who waits for it
        samples.gate.set()
        reader.join(PATIENCE_SECONDS)
    assert "data/batches.py" in rank.stacks()


def test_each_forked_rank_has_a_thread() -> None:
    plan = plan_of(2, tp=1, micro_batch_size=2)
    assert plan.dp == 2
    first, second = run_ranks(_rank, 2, plan)
    assert first == [[[0, 1], [4, 5]], [[8, 9], [12, 13]]]
    assert second == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]


def _rank(rank: int, plan: Plan) -> list[list[list[int]]]:
    with Prefetcher(batches_of(Watched(), rank, plan), end=16) as prefetcher:
        return [numbers(prefetcher.at(position)) for position in (0, 8)]
