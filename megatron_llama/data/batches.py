"""From samples to the micro batches of a rank.

A step trains on the samples that follow those consumed before it, as many as ``plan/schedules.py`` says, in every
layout: micro batch m of data-parallel rank d holds the samples that follow offset (m·dp + d)·(micro batch). A thread
builds the next batches, and made-up datasets are here.
"""
from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from queue import SimpleQueue
from typing import Protocol

import torch

from megatron_llama.arch.pattern import Pattern, pattern_of
from megatron_llama.data.finetuning_set import PADDING, SFTDataset, build_sft, graded_examples
from megatron_llama.data.graded_order import (
    Graded,
    Level,
    cut_sample,
    level_at,
    levels_from_json,
    levels_of,
    levels_to_json,
)
from megatron_llama.data.record import Record, advanced, changes_reading, make_record
from megatron_llama.data.sample_stream import SampleStream, build_streams, resume_streams
from megatron_llama.devices.visibility import Documents
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.random_ltd import Subsets, build_subsets, draw_subsets
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import BatchSchedule, RunPosition, SequenceCut, TokenSchedule, sequence_cut_at
from megatron_llama.topology import Topology

MOCK_EXAMPLES = 4
"""Made-up examples in a packed sequence."""


class Samples(Protocol):
    """A dataset: sample i has ``tokens``, ``labels`` (int64) and ``loss_mask`` (fp32), each [s]; where it holds
    documents that don't attend to each other, also ``documents`` [s], the document of each token, or PADDING (int64);
    where there is padding behind a single example, ``num_tokens``, its length (int64 scalar)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Batches:
    """A dataset, cut for one rank."""

    samples: Samples
    plan: Plan
    topology: Topology
    device: torch.device
    schedule: BatchSchedule | None = None
    """The sizes of the global batches; all trainer.global_batch_size where there is none."""
    random_ltd: TokenSchedule | None = None
    """How many tokens some layers see, in training."""
    pin_memory: bool = False
    """Whether batches on the host are in pinned memory, from which the device copies while it computes."""
    levels: Sequence[Level] = ()
    """The levels of the curriculum, which may cut sequences short; none for validation."""

    def with_length(self, length: int | None = None) -> Batches:
        """The same where random-LTD's layers see ``length`` tokens in every step, the most that they see if None; no
        change without it."""
        ltd = self.random_ltd
        return self if ltd is None else replace(self, random_ltd=ltd.always(length or ltd.max_value))

    def following(self, consumed_samples: int) -> int:
        """The position after the global batch that starts at ``consumed_samples``."""
        if self.schedule is None:
            return consumed_samples + self.plan.config.trainer.global_batch_size
        return consumed_samples + self.schedule.size_from(consumed_samples)

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        """This rank's micro batches of the global batch that starts at sample ``consumed_samples``."""
        return self.to_device(self.on_host(consumed_samples))

    def on_host(self, consumed_samples: int) -> list[MicroBatch]:
        """The micro batches of ``at`` in the host's memory. Any thread may call it, but one at a time."""
        if self.pin_memory:  # for a device with an index; a new thread would take memory of the first one
            torch.accelerator.set_device_index(self.device)
        size = self.plan.config.trainer.micro_batch_size
        first = consumed_samples + self.topology.place["dp"] * size
        starts = range(first, self.following(consumed_samples), self.topology.grid.divisor("samples") * size)
        cut, kept = self._cut_at(consumed_samples), self._kept(consumed_samples)
        return [self._micro_batch(range(start, start + size), cut, kept) for start in starts]

    def positions_by_shape(self) -> dict[SequenceCut | None, int]:
        """Where a global batch of each shape of sequences begins: the largest batch, where all have one shape."""
        largest = self.plan.batches.position_of_the_largest
        found = {self._cut_at(level.samples): level.samples for level in reversed(self.levels)}
        return found if len(found) > 1 else {self._cut_at(largest): largest}

    def _cut_at(self, consumed_samples: int) -> SequenceCut | None:
        if not self.levels:
            return None
        return sequence_cut_at(self.plan.config.data, level_at(self.levels, consumed_samples).difficulties)

    def to_device(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro batches on the device. From pinned memory the copies are only begun."""
        return [batch.to(self.device) for batch in microbatches]

    def _kept(self, consumed_samples: int) -> int | None:
        """Tokens of a sequence that random-LTD's layers see in the step from ``consumed_samples`` on; None for all."""
        if self.random_ltd is None:
            return None
        kept = self.random_ltd.length((self.schedule or self.plan.batches).last_step_within(consumed_samples) + 1)
        return kept if kept < self.plan.config.data.length else None

    def _micro_batch(self, indices: range, cut: SequenceCut | None, kept: int | None) -> MicroBatch:
        samples = [piece for index in indices for piece in cut_sample(self.samples[index], cut)]
        tokens, labels, loss_mask = (self._stack(samples, key) for key in ("tokens", "labels", "loss_mask"))
        documents = Documents.of(self._stack(samples, "documents")) if "documents" in samples[0] else None
        pattern = pattern_of(self.plan.model)
        sizes = torch.tensor([_sizes(sample, pattern) for sample in samples]).sum(dim=0)
        seen = None if kept is None else self._subsets(indices, kept, documents)
        if self.pin_memory:
            sizes, seen = sizes.pin_memory(), seen and seen.on(torch.Tensor.pin_memory)
        return MicroBatch(tokens, labels, loss_mask, sizes, documents, seen)

    def _subsets(self, samples: range, kept: int, documents: Documents | None) -> Subsets:
        """The ``kept`` tokens of each sample that each of this rank's layers sees, of those that don't see all."""
        assert self.random_ltd is not None
        topology, length = self.topology, self.plan.config.data.length
        local = [layer for stage in topology.chunks() for layer in self.plan.stage_layers[stage]]
        layers = [layer for layer in local if layer in self.random_ltd.layers]
        drawn = draw_subsets(self.plan.config.trainer.seed, samples, layers, kept, length)
        part = (topology.place["tp"], topology.sizes["tp"]) if self.plan.sp else (0, 1)
        return build_subsets(drawn, layers, length, documents, part)

    def _stack(self, samples: Sequence[Mapping[str, torch.Tensor]], key: str) -> torch.Tensor:
        rows = [sample[key] for sample in samples]
        out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=self.pin_memory)
        return torch.stack(rows, out=out)


def _sizes(sample: Mapping[str, torch.Tensor], pattern: Pattern) -> tuple[int, int]:
    """(tokens that are not padding, sum over documents of tokens times ``Pattern.span``) of a sample."""
    if "documents" in sample:
        ids = sample["documents"]
        _, lengths = ids[ids != PADDING].unique_consecutive(return_counts=True)
        return int(lengths.sum()), sum(round(length * pattern.span(length)) for length in lengths.tolist())
    tokens = int(sample.get("num_tokens", len(sample["tokens"])))
    return tokens, round(tokens * pattern.span(tokens))


@dataclass
class Data:
    """What a run trains and validates on."""

    train: Batches
    validation: Batches | None
    """The same samples at each validation; None where the run doesn't validate."""

    def resume(self, record: Record, start: RunPosition) -> None:
        """Goes on from ``start`` as the record of a checkpoint says. All ranks must call it, before the first batch.
        Raises ConfigError on all of them."""
        if self.train.schedule is not None:
            self.train = replace(self.train, schedule=replace(self.train.schedule, start=start))
        validation = self.validation
        past = () if changes_reading(record, self._record) else levels_from_json(record.get("levels", ()))
        levels = levels_of(replace(self.train.plan, start=start), past)
        self.train = train = replace(self.train, levels=levels)
        if isinstance(train.samples, SFTDataset):
            self.train = replace(train, samples=graded_examples(train.plan, train.samples, levels))
        if not isinstance(train.samples, SampleStream):  # made-up data and fine-tuning sets are the same at any length
            return
        held_out = validation.samples if validation else None
        assert held_out is None or isinstance(held_out, SampleStream)
        streams = resume_streams(train.plan, record, start.samples, train.samples, held_out, levels)
        self.train = replace(train, samples=streams[0])
        if validation is not None and streams[1] is not None:
            self.validation = replace(validation, samples=streams[1])
        # What is no longer read may come back: its facts stay.
        self._record["datasets"] = {**record["datasets"], **self._record["datasets"]}

    def record(self, consumed_samples: int) -> Record:
        """What a checkpoint after ``consumed_samples`` keeps of the data."""
        samples = self.train.samples
        if isinstance(samples, SampleStream):
            return {**advanced(self._record, samples.timeline, consumed_samples), **self._levels(consumed_samples)}
        return {**self._record, "consumed_samples": consumed_samples, **self._levels(consumed_samples)}

    def _levels(self, consumed_samples: int) -> Record:
        """The levels that have begun; nothing without a curriculum."""
        begun = [level for level in self.train.levels if level.samples < max(1, consumed_samples)]
        return {"levels": levels_to_json(begun)} if begun else {}

    @cached_property
    def _record(self) -> Record:
        return make_record(self.train.plan)


def _told(samples: Samples, end: int) -> Iterator[str]:
    """What a run of ``end`` samples draws by its curriculum, a line for each dataset; nothing without one."""
    if isinstance(samples, SFTDataset) and isinstance(samples.order, Graded):
        yield samples.order.told("the examples", end)
    elif isinstance(samples, SampleStream):
        read = samples.timeline.read(end)
        orders = {prefix: dataset.order for prefix, dataset in samples.datasets.items()}
        yield from (order.told(prefix, read.get(prefix, 0)) for prefix, order in orders.items() if order is not None)


def build_data(plan: Plan, topology: Topology, device: torch.device, pin_memory: bool = False) -> Data:
    """The run's data. All ranks must call it; raises ConfigError on all of them when a dataset can't be used."""
    trainer = plan.config.trainer
    train_samples = plan.batches.after(trainer.steps).samples
    # Compiling ahead uses made-up data instead of a set that would be validated on as a whole: a batch will do.
    validation_samples = (trainer.val_steps or 1) * trainer.global_batch_size if trainer.val_every_steps else 0
    train: Samples
    validation: Samples | None
    if plan.config.data.mock:
        length, vocabulary = plan.config.data.length, plan.model.vocab_size
        examples = MOCK_EXAMPLES if plan.config.data.pack or plan.config.data.document_mask else 1
        train = MockDataset(train_samples, length, vocabulary, trainer.seed, examples)
        validation = None
        if validation_samples:
            validation = MockDataset(validation_samples, length, vocabulary, trainer.seed + 1, examples)
    elif plan.config.data.kind == "sft":
        train, validation = build_sft(plan)
    else:
        train, validation = build_streams(plan)
    if topology.rank == 0:
        for line in _told(train, train_samples):
            sys.stderr.write(line)
    return Data(
        train=Batches(train, plan, topology, device, plan.batches, plan.random_ltd, pin_memory, levels_of(plan)),
        validation=None if validation is None else Batches(validation, plan, topology, device, pin_memory=pin_memory),
    )


# Made-up tokens for benchmarks, compilation and dry runs: sample i is a function of seed and i.

class MockDataset:
    """Counting sequences with a random start and stride, so that there is something to learn.

    ``examples`` above 1 share each sequence as packed ones do, in equal parts; a step then takes its work and graphs.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int, examples: int = 1) -> None:
        self.num_samples, self.seq_length, self.vocab_size, self.seed = num_samples, seq_length, vocab_size, seed
        self.examples = examples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start, stride = torch.randint(0, self.vocab_size, (2,), generator=generator).tolist()
        text = (start + torch.arange(self.seq_length + 1) * (1 + stride % 7)) % self.vocab_size
        sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": torch.ones(self.seq_length)}
        if self.examples > 1:
            sample["documents"] = torch.arange(self.seq_length) * self.examples // self.seq_length
        return sample


# A thread builds the next batches while the device trains. The position in the data stays a number: the thread only
# guesses the next one, and a wrong guess is thrown away, so each batch is the one that ``Batches.at`` gives.

AHEAD = 2
"""Global batches that are built before they are asked for: one would do, two bridge a slow read."""
_CLOSE_SECONDS = 5.0  # for the batch that is being built when a run ends early; a read that hangs is left behind

_Built = Future[list[MicroBatch]]


class Prefetcher:
    """``Batches`` that are built ahead inside a ``with`` block, which starts the thread: after a fork, in the rank."""

    def __init__(self, batches: Batches, end: int) -> None:
        """``end`` is the position where the last batch ends; nothing is built ahead from there on."""
        self.batches, self.end = batches, end
        self._coming: deque[tuple[int, _Built]] = deque()
        self._requests: SimpleQueue[tuple[int, _Built] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._build, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()
        self._requests.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        """What ``Batches.at`` gives, and raises: an error in the thread is raised here, with the thread's traceback.

        Copies to the device are issued by the calling thread, in the order of its other work.
        """
        if not self._coming or self._coming[0][0] != consumed_samples:
            self._drop()
            self._request(consumed_samples)
        while len(self._coming) <= AHEAD:
            following = self.batches.following(self._coming[-1][0])
            if following >= self.end:
                break
            self._request(following)
        _, built = self._coming.popleft()
        return self.batches.to_device(built.result())

    def _request(self, consumed_samples: int) -> None:
        built: _Built = Future()
        self._coming.append((consumed_samples, built))
        self._requests.put((consumed_samples, built))

    def _drop(self) -> None:
        """Forgets what was requested; what is not begun is never built."""
        for _, built in self._coming:
            built.cancel()
        self._coming.clear()

    def _build(self) -> None:
        while (request := self._requests.get()) is not None:
            consumed_samples, built = request
            if built.set_running_or_notify_cancel():
                try:
                    built.set_result(self.batches.on_host(consumed_samples))
                except BaseException as error:  # also one that ends a process: it is for the training thread to decide
                    built.set_exception(error)
