"""Samples of a rank: in any layout, the ranks together process each sample of a step once, and each document alone. The
prefetcher returns the same batches for any requests, and ends with the run."""

from __future__ import annotations

import random
import re
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megatron_llama.config import ConfigError
from megatron_llama.data import prefetch as prefetch_module
from megatron_llama.data.batches import Batches, build_data
from megatron_llama.data.mock import MockDataset
from megatron_llama.data.prefetch import AHEAD, Prefetcher
from megatron_llama.data.pretraining_samples import build_streams, resume_streams
from megatron_llama.data.resume_record import make_record
from megatron_llama.devices.kernels import Kernels
from megatron_llama.launch.watchdog import ThisProcess
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.parallel import ParallelModel
from megatron_llama.plan import Plan, resolve
from tests.config.helpers import make
from tests.data.files import data_plan, megatron_record, write_indexed
from tests.oracle import CPU, make_plan, on_ranks
from tests.oracle import batches_of as batches_on_rank
from tests.processes import wait_until
from tests.ranks import run_ranks
from tests.rows import each_layout

GLOBAL_BATCH = 24


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


@each_layout(__file__, "batches")
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_step_is_its_samples_each_once(ranks: int, layout: list[str], step: int) -> None:
    """Tensor- and pipeline-parallel ranks work on the same samples; data-parallel ranks on different ones."""
    plan = make_plan(ranks, *layout, f"trainer.global_batch_size={GLOBAL_BATCH}")
    micro, dp = plan.config.trainer.micro_batch_size, plan.topology(0).sizes["dp"]
    samples: dict[int, list[list[int]]] = {}
    for topology in map(plan.topology, range(ranks)):
        local = Batches(Watched(), plan, topology, CPU).at(step * GLOBAL_BATCH)
        assert len(local) == GLOBAL_BATCH // (micro * dp)
        for batch in local:
            assert batch.tokens.shape == (micro, 4)
            assert torch.equal(batch.labels, -batch.tokens)  # tokens and labels of the same sample
        samples.setdefault(topology.place["dp"], []).append(sum(numbers(local), []))
    assert len(samples) == dp and all(len(same) == ranks // dp for same in samples.values())
    assert all(local == same[0] for same in samples.values() for local in same)
    together = sorted(number for same in samples.values() for number in same[0])
    assert together == [*range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]


def test_consumed_samples_need_not_be_whole_steps() -> None:
    # A checkpoint of a run with another global batch size: the position is a number of samples, not of steps.
    assert sum(numbers(batches_of(Watched()).at(5)), []) == [*range(5, 5 + READ_BATCH)]


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
    assert MockDataset(1, 11, 100, seed=1, examples=2)[0]["documents"].tolist() == [0] * 6 + [1] * 5
    assert "documents" not in MockDataset(1, 10, 100, seed=1)[0]


def test_mock_data_of_a_run() -> None:
    plan = resolve(make(**{"trainer.steps": 5, "trainer.val_every_steps": 2, "trainer.val_steps": 3}), 1)
    data = build_data(plan, plan.topology(0), CPU)
    assert len(data.train.samples) == 5 * 8
    assert len(data.validation[""].samples) == 3 * 8
    assert not torch.equal(data.train.at(0)[0].tokens, data.validation[""].at(0)[0].tokens)
    without = resolve(make(), 1)
    assert build_data(without, without.topology(0), CPU).validation == {}


READ_BATCH = 8
PATIENCE_SECONDS = 60.0


def batches_of(samples: Watched) -> Batches:
    plan = resolve(make(**{"trainer.global_batch_size": READ_BATCH}), 1)
    return Batches(samples, plan, plan.topology(0), CPU)


def numbers(microbatches: object) -> list[list[int]]:
    """The samples of each micro batch."""
    assert isinstance(microbatches, list) and all(isinstance(batch, MicroBatch) for batch in microbatches)
    return [batch.tokens[:, 0].tolist() for batch in microbatches]


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
        wait_until(lambda: len(samples.read) == (1 + AHEAD) * READ_BATCH)
        samples.gate.clear()  # reads wait from here on
        for batch in range(1, 1 + AHEAD):
            assert numbers(prefetcher.at(batch * READ_BATCH))[0] == [batch * READ_BATCH]
        samples.gate.set()
    assert len(samples.read) <= (2 + 2 * AHEAD) * READ_BATCH, "it does not run away"


def test_an_error_is_raised_with_its_batch_and_traceback() -> None:
    with Prefetcher(batches_of(Watched(broken=19)), end=10**6) as prefetcher:
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
    monkeypatch.setattr(prefetch_module, "_CLOSE_SECONDS", 0.1)
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
    assert "data/prefetch.py" in rank.stacks()


LENGTH = 16
Item = dict[str, list[int]]


def documents_of(seed: int, count: int = 40) -> list[list[int]]:
    """Documents of 1 to 40 tokens without an end token. Ids are consecutive, so that each occurs once."""
    chooser, first, collected = random.Random(seed), 1, []
    for _ in range(count):
        length = chooser.choice([1, 1, 2, chooser.randint(1, 40)])
        collected.append(list(range(first, first + length)))
        first += length
    return collected


def items(prefix: str, **settings: object) -> list[Item]:
    """All samples of the first two epochs."""
    plan = data_plan([prefix], **{"data.seq_length": LENGTH, "data.split": "1,0,0", **settings})
    return run_ranks(_items, 1, plan)[0]


def _items(rank: int, plan: Plan) -> list[Item]:
    stream, _ = build_streams(plan)
    return [{name: values.tolist() for name, values in stream[n].items()} for n in range(2 * len(stream))]


@pytest.mark.parametrize("seed", range(3))
def test_borders_are_those_of_the_files(seed: int, tmp_path: Path) -> None:
    documents = documents_of(seed)
    owner = {token: number for number, document in enumerate(documents) for token in document}
    prefix = write_indexed(tmp_path / "text", documents)
    plain = items(prefix)
    masked = items(prefix, **{"data.document_mask": True})
    only_attention = items(prefix, **{"data.document_mask": True, "data.eod_mask_loss": False})
    only_loss = items(prefix, **{"data.eod_mask_loss": True})
    left_out = 0
    for item, bare, *others in zip(masked, plain, only_attention, only_loss, strict=True):
        tokens, labels, ids = item["tokens"], item["labels"], item["documents"]
        owners = [owner[token] for token in tokens]
        same = [a == b for a, b in zip(owners, owners[1:], strict=False)]
        assert [a == b for a, b in zip(ids, ids[1:], strict=False)] == same
        counts = [float(owner[label] == label_owner) for label, label_owner in zip(labels, owners, strict=True)]
        assert item["loss_mask"] == counts
        left_out += counts.count(0.0)
        assert bare == {"tokens": tokens, "labels": labels, "loss_mask": [1.0] * LENGTH}, "as it was before"
        assert others == [{**bare, "documents": ids}, {**bare, "loss_mask": counts}]
    assert left_out > len(masked), "else nothing was shown"


@pytest.mark.parametrize("name", ["document_mask", "eod_mask_loss"])
def test_megatrons_order_has_no_document_boundaries(name: str, tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "text", documents_of(0))
    plan = data_plan([prefix], **{"data.seq_length": LENGTH, "data.split": "1,0,0", f"data.{name}": True})
    (message,) = run_ranks(_resumed, 1, plan)
    assert f"data.{name}" in message and "needs document boundaries" in message


def _resumed(rank: int, plan: Plan) -> str:
    training, validation = build_streams(plan)
    with pytest.raises(ConfigError) as caught:
        resume_streams(plan, megatron_record(plan, 8), 8, training, validation, (), make_record(plan))
    return str(caught.value)


class TokenSpans:
    """Documents of a stream's first samples, each as a separate padded sample; then samples without loss."""

    def __init__(self, stream: list[dict[str, torch.Tensor]]) -> None:
        self.spans = []
        for sample in stream:
            start = 0
            for size in sample["documents"].unique_consecutive(return_counts=True)[1].tolist():
                span = {name: torch.zeros_like(values) for name, values in sample.items() if name != "documents"}
                for name, values in span.items():
                    values[:size] = sample[name][start : start + size]
                self.spans.append(span)
                start += size

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < len(self.spans):
            return self.spans[index]
        return {name: torch.zeros_like(values) for name, values in self.spans[0].items()}


Gradients = tuple[float, dict[str, torch.Tensor]]


@each_layout(__file__, "documents", "ranks, settings")
def test_loss_and_gradients_are_those_of_each_document_alone(ranks: int, settings: list[str], tmp_path: Path) -> None:
    (*layout, kernel), chooser = settings, random.Random(5)
    documents = [[chooser.randrange(64) for _ in range(chooser.randint(1, 20))] for _ in range(60)]
    prefix = write_indexed(tmp_path / "text", documents)
    data = ["data=redpajama", "data.tokenizer=null", f"data.prefixes=[{prefix}]", "data.split='1,0,0'"]
    data += ["data.document_mask=true", f"data.cache_dir={tmp_path}", "data.mock=true"]
    plan = make_plan(ranks, *data, *layout)
    plan.config.data.mock = False  # a rule allows LoRA on random weights for mock data only
    exact = "trainer.precision=bf16" not in layout
    for (loss, gradients), (other_loss, others) in on_ranks(_together_and_alone, plan, kernel):
        assert loss == pytest.approx(other_loss, rel=1e-6 if exact else 1e-3)
        assert gradients.keys() == others.keys() and gradients
        for name, gradient in gradients.items():
            bound = 1e-5 if exact else 0.05
            assert (gradient - others[name]).norm() <= bound * others[name].norm() + 1e-7, name


def _together_and_alone(plan: Plan, model: ParallelModel, kernel: str) -> tuple[Gradients, Gradients]:
    for chunk in model.chunks:
        chunk.build_inputs.build_visible = Kernels(attention=kernel).visible
    stream, _ = build_streams(plan)
    size = plan.config.trainer.global_batch_size
    whole = [dict(stream[number]) for number in range(size)]
    spans = TokenSpans(whole)
    assert len(spans) > 2 * len(whole)
    apart = [batch for first in range(0, len(spans), size) for batch in batches_on_rank(spans, plan).at(first)]
    collected = []
    for microbatches in (batches_on_rank(stream, plan).at(0), apart):
        model.zero_grad()
        loss = model.forward_backward(microbatches).item()
        collected.append((loss, {s.name: s.grad.clone() for s in model.shards if s.grad is not None}))
    return collected[0], collected[1]
