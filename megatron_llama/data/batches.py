"""From samples to the micro batches of a rank.

A step trains on the samples that follow those consumed before it, as many as ``plan/batch_schedule.py`` says, in every
layout: micro batch m of data-parallel rank d holds the samples that follow offset (m·dp + d)·(micro batch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from megatron_llama.data.finetuning_set import PADDING, build_sft
from megatron_llama.data.mock import MockDataset
from megatron_llama.data.record import Record, advanced, make_record
from megatron_llama.data.sample_stream import SampleStream, build_streams, resume_streams
from megatron_llama.model.document_mask import Documents
from megatron_llama.parallel.pipeline import MicroBatch
from megatron_llama.plan import Plan
from megatron_llama.plan.attention_pattern import Pattern, pattern_of
from megatron_llama.plan.batch_schedule import BatchSchedule
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
    pin_memory: bool = False
    """Whether batches on the host are in pinned memory, from which the device copies while it computes."""

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
        first = consumed_samples + self.topology.dp_rank * size
        starts = range(first, self.following(consumed_samples), self.topology.dp * size)
        return [self._micro_batch(range(start, start + size)) for start in starts]

    def to_device(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro batches on the device. From pinned memory the copies are only begun."""
        return [batch.to(self.device) for batch in microbatches]

    def _micro_batch(self, indices: range) -> MicroBatch:
        samples = [self.samples[index] for index in indices]
        tokens, labels, loss_mask = (self._stack(samples, key) for key in ("tokens", "labels", "loss_mask"))
        documents = Documents.of(self._stack(samples, "documents")) if "documents" in samples[0] else None
        pattern = pattern_of(self.plan.model)
        sizes = torch.tensor([_sizes(sample, pattern) for sample in samples]).sum(dim=0)
        return MicroBatch(tokens, labels, loss_mask, sizes.pin_memory() if self.pin_memory else sizes, documents)

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

    def resume(self, record: Record, consumed_samples: int) -> None:
        """Goes on after ``consumed_samples`` as the record of a checkpoint says. All ranks must call it, before the
        first batch. Raises ConfigError on all of them."""
        train, validation = self.train, self.validation
        if not isinstance(train.samples, SampleStream):  # made-up data and fine-tuning sets are the same at any length
            return
        held_out = validation.samples if validation else None
        assert held_out is None or isinstance(held_out, SampleStream)
        streams = resume_streams(train.plan, record, consumed_samples, train.samples, held_out)
        self.train = replace(train, samples=streams[0])
        if validation is not None and streams[1] is not None:
            self.validation = replace(validation, samples=streams[1])
        # What is no longer read may come back: its facts stay.
        self._record["datasets"] = {**record["datasets"], **self._record["datasets"]}

    def record(self, consumed_samples: int) -> Record:
        """What a checkpoint after ``consumed_samples`` keeps of the data."""
        samples = self.train.samples
        if isinstance(samples, SampleStream):
            return advanced(self._record, samples.timeline, consumed_samples)
        return {**self._record, "consumed_samples": consumed_samples}

    @cached_property
    def _record(self) -> Record:
        return make_record(self.train.plan)


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
    return Data(
        train=Batches(train, plan, topology, device, plan.batches, pin_memory),
        validation=None if validation is None else Batches(validation, plan, topology, device, None, pin_memory),
    )
