"""Micro batches of a rank (``Batches``), and the data of a run.

A step trains on the next ``BatchSchedule.size_from`` samples (plan/data_schedules.py), in every layout. Micro batch m
of data-parallel rank d begins at offset (m * dp + d) * micro_batch_size. Context-parallel ranks have the same samples
and different positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_llama.arch.attention_pattern import Pattern, pattern_of
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.data_settings import list_paths
from megatron_llama.corpus.store_cache import set_limit
from megatron_llama.data.curriculum_order import Graded, Level, cut_sample, level_at, levels_of
from megatron_llama.data.finetuning_set import PADDING, SFTDataset, build_sft, graded_examples
from megatron_llama.data.mock import MockDataset
from megatron_llama.data.pretraining_samples import SampleStream, build_streams, resume_streams
from megatron_llama.data.resume_record import Record, advance_record, changes_reading, make_record
from megatron_llama.devices.attention_inputs import Documents
from megatron_llama.model.inputs import MicroBatch
from megatron_llama.model.noise import token_keys
from megatron_llama.model.preference import Pairs
from megatron_llama.model.random_ltd import Subsets, build_subsets, draw_subsets
from megatron_llama.parallel.context_division import local_chunks
from megatron_llama.parallel.context_parallel import BACKENDS
from megatron_llama.parallel.groups import broadcast_from_rank_0
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import BatchSchedule, RunPosition, SequenceCut, TokenSchedule, sequence_cut_at
from megatron_llama.system import phase
from megatron_llama.system.object_store import is_url
from megatron_llama.topology import Topology

READERS = 16
"""Threads that read the samples of a batch from an object store."""
MOCK_EXAMPLES = 4
"""Mock examples in a packed sequence."""


class Samples(Protocol):
    """Dataset of samples.

    A sample has ``tokens``, ``labels`` (int64) and ``loss_mask`` (fp32), each [s]. With several documents it also has
    ``documents`` [s], int64: the document number of each token, or PADDING. A single padded example has ``num_tokens``
    instead, its length (int64 scalar).
    """

    once: bool
    """Whether samples after the first epoch have no loss."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Batches:
    """Micro batches of one rank from a dataset."""

    samples: Samples
    plan: Plan
    topology: Topology
    device: torch.device
    schedule: BatchSchedule | None = None
    """Sizes of the global batches. None: trainer.global_batch_size."""
    random_ltd: TokenSchedule | None = None
    """Tokens per sequence that random-LTD's layers process, by step; None outside training."""
    pin_memory: bool = False
    """Whether batches are built in pinned memory (``Device.pins_memory``)."""
    levels: Sequence[Level] = ()
    """Levels of the curriculum, which may cut sequences. Empty for validation."""

    def with_length(self, length: int | None = None) -> Batches:
        """Return a copy in which random-LTD's layers process ``length`` tokens in every step. None: the maximum."""
        ltd = self.random_ltd
        return self if ltd is None else replace(self, random_ltd=ltd.always(length or ltd.max_value))

    def following(self, consumed_samples: int) -> int:
        """Return the position after the global batch that starts at ``consumed_samples``."""
        if self.schedule is None:
            return consumed_samples + self.plan.config.trainer.global_batch_size
        return consumed_samples + self.schedule.size_from(consumed_samples)

    def at(self, consumed_samples: int) -> Sequence[MicroBatch]:
        """Return this rank's micro batches of the global batch that starts at sample ``consumed_samples``."""
        return self.to_device(self.on_host(consumed_samples))

    def on_host(self, consumed_samples: int) -> list[MicroBatch]:
        """Build the micro batches of ``at`` in host memory. Any thread may call it, one at a time."""
        if self.pin_memory:  # a new thread would use the first device
            torch.accelerator.set_device_index(self.device)
        size = self.plan.config.trainer.micro_batch_size
        first = consumed_samples + self.topology.place["dp"] * size
        starts = range(first, self.following(consumed_samples), self.topology.grid.divisor("samples") * size)
        if self._in_store:  # concurrently, so that the cache of the store has the samples (corpus/store_cache.py)
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(self.samples.__getitem__, (start + n for start in starts for n in range(size))))
        cut, ltd_length = self._cut_at(consumed_samples), self._ltd_length(consumed_samples)
        return [self._micro_batch(range(start, start + size), cut, ltd_length) for start in starts]

    @cached_property
    def _in_store(self) -> bool:
        """Whether a dataset is in an object store."""
        data = self.plan.config.data
        return not data.mock and any(is_url(path) for _, path in list_paths(data))

    def positions_by_shape(self) -> dict[SequenceCut | None, int]:
        """Return the position of one global batch per sequence shape; of the largest batch, if there is one shape."""
        largest = self.plan.batches.position_of_the_largest
        positions = {self._cut_at(level.samples): level.samples for level in reversed(self.levels)}
        return positions if len(positions) > 1 else {self._cut_at(largest): largest}

    def _cut_at(self, consumed_samples: int) -> SequenceCut | None:
        if not self.levels:
            return None
        return sequence_cut_at(self.plan.config.data, level_at(self.levels, consumed_samples).difficulties)

    def to_device(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Copy micro batches to the device, asynchronously from pinned memory."""
        return [batch.to(self.device) for batch in microbatches]

    def _ltd_length(self, consumed_samples: int) -> int | None:
        """Return the tokens of a sequence that random-LTD's layers process in the step, None for all."""
        if self.random_ltd is None:
            return None
        length = self.random_ltd.length((self.schedule or self.plan.batches).last_step_within(consumed_samples) + 1)
        return length if length < self.plan.config.data.length else None

    def _micro_batch(self, indices: range, cut: SequenceCut | None, ltd_length: int | None) -> MicroBatch:
        samples = [part for index in indices for part in cut_sample(self._sample(index), cut)]
        batch = self._stacked(samples)
        if ltd_length is not None:
            subsets = self._subsets(indices, ltd_length, batch.documents)
            batch = replace(batch, subsets=subsets.on(torch.Tensor.pin_memory) if self.pin_memory else subsets)
        if "desirable" in samples[0]:
            other = cast(SFTDataset, self.samples)
            batch = replace(batch, mismatched=self._stacked([other.mismatched(index) for index in indices]))
        return batch

    def _sample(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return a sample, with ``noise_keys`` for NEFTune."""
        sample, config = self.samples[index], self.plan.config
        if config.finetune.neftune_noise_alpha is None:
            return sample
        return {**sample, "noise_keys": token_keys(config.trainer.seed, index, len(sample["tokens"]))}

    def _stacked(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> MicroBatch:
        """Return the micro batch of samples, without subsets."""
        documents = Documents.of(self._stack(samples, "documents")) if "documents" in samples[0] else None
        pattern = pattern_of(self.plan.model)
        by_documents = documents is not None and BACKENDS[self.plan.config.trainer.cp_comm].by_documents
        lengths = documents.lengths if documents is not None and by_documents else None
        chunks = local_chunks(self.topology, len(samples[0]["tokens"]), lengths, pattern)
        tokens, labels, loss_mask = (self._stack(samples, key, chunks) for key in ("tokens", "labels", "loss_mask"))
        token_counts = torch.tensor([_token_counts(sample, pattern) for sample in samples]).sum(dim=0)
        token_counts *= self.topology.place["cp"] == 0  # of whole sequences: the sum over ranks counts them once
        token_counts = token_counts.pin_memory() if self.pin_memory else token_counts
        keys = self._stack(samples, "noise_keys", chunks) if "noise_keys" in samples[0] else None
        pairs = self._pairs(samples, chunks) if "answers" in samples[0] else None
        return MicroBatch(tokens, labels, loss_mask, token_counts, documents, noise_keys=keys, pairs=pairs)

    def _pairs(self, samples: Sequence[Mapping[str, torch.Tensor]], chunks: Sequence[range]) -> Pairs:
        """Build the examples with preferences in the samples."""

        def pad(key: str, value: int) -> torch.Tensor | None:
            rows = [sample[key] for sample in samples if key in sample]
            return pad_sequence(rows, batch_first=True, padding_value=value) if rows else None

        numbers, lengths = pad("numbers", -1), pad("lengths", 0)
        assert numbers is not None and lengths is not None
        count = (numbers >= 0).sum() * (self.topology.place["cp"] == 0)
        answers = self._stack(samples, "answers", chunks)
        pairs = Pairs(answers, numbers, lengths, count, pad("reference", 0), pad("desirable", 0))
        return pairs.on(torch.Tensor.pin_memory) if self.pin_memory else pairs

    def _subsets(self, samples: range, ltd_length: int, documents: Documents | None) -> Subsets:
        """Build the subsets of this rank's random-LTD layers, ``ltd_length`` tokens of each sample."""
        assert self.random_ltd is not None
        topology, length = self.topology, self.plan.config.data.length
        local = [layer for stage in topology.virtual_stages() for layer in self.plan.stage_layers[stage]]
        layers = [layer for layer in local if layer in self.random_ltd.layers]
        drawn = draw_subsets(self.plan.config.trainer.seed, samples, layers, ltd_length, length)
        part = (topology.place["tp"], topology.sizes["tp"]) if self.plan.sp else (0, 1)
        return build_subsets(drawn, layers, length, documents, part)

    def _stack(
        self, samples: Sequence[Mapping[str, torch.Tensor]], key: str, chunks: Sequence[range] | None = None
    ) -> torch.Tensor:
        """Stack a key of the samples; with ``chunks``, only these positions of each."""
        rows = [sample[key] for sample in samples]
        if chunks is not None and len(chunks) > 1:
            rows = [torch.cat([row[chunk.start : chunk.stop] for chunk in chunks]) for row in rows]
        out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=self.pin_memory)
        return torch.stack(rows, out=out)


def _token_counts(sample: Mapping[str, torch.Tensor], pattern: Pattern) -> tuple[int, int]:
    """Return a sample's part of ``MicroBatch.token_counts``."""
    if "documents" in sample:
        ids = sample["documents"]
        _, lengths = ids[ids != PADDING].unique_consecutive(return_counts=True)
        return int(lengths.sum()), sum(round(length * pattern.span(length)) for length in lengths.tolist())
    tokens = int(sample.get("num_tokens", len(sample["tokens"])))
    return tokens, round(tokens * pattern.span(tokens))


@dataclass
class Data:
    """Training and validation data of a run."""

    train: Batches
    validation: Mapping[str, Batches]
    """Batches of each validation set, the same at each validation; "" is a set without a name. Empty: no validation."""
    new_record: Record | None = None
    """Record of a new run with this data. None: derived from the plan at the first use, by each rank."""

    def resume(self, record: Record, start: RunPosition) -> None:
        """Resume at ``start`` from a checkpoint's record. All ranks must call it, before the first batch.

        Sets first the schedule's start, then the curriculum's levels, then the samples, which follow from the levels.

        Raises:
            ConfigError: on all ranks.
        """
        if self.train.schedule is not None:
            self.train = replace(self.train, schedule=replace(self.train.schedule, start=start))
        stored = [] if changes_reading(record, self._record) else record.get("levels", [])
        past = [Level(samples, difficulties) for samples, difficulties in stored]
        levels = levels_of(replace(self.train.plan, start=start), past)
        self.train = train = replace(self.train, levels=levels)
        if isinstance(train.samples, SFTDataset):
            self.train = replace(train, samples=graded_examples(train.plan, train.samples, levels))
        if not isinstance(train.samples, SampleStream):  # other samples do not depend on the run's length
            return
        held_out = {name: cast(SampleStream, batches.samples) for name, batches in self.validation.items()}
        samples, validation = resume_streams(
            train.plan, record, start.samples, train.samples, held_out, levels, self._record
        )
        self.train = replace(train, samples=samples)
        self.validation = {name: replace(self.validation[name], samples=each) for name, each in validation.items()}
        # Keep the facts of datasets that are no longer read: a later resume may read them.
        self._record["datasets"] = {**record["datasets"], **self._record["datasets"]}

    def record(self, consumed_samples: int) -> Record:
        """Return the data record of a checkpoint after ``consumed_samples`` (resume_record.py)."""
        samples, record = self.train.samples, {**self._record, "consumed_samples": consumed_samples}
        if isinstance(samples, SampleStream):
            record = advance_record(self._record, samples.timeline, consumed_samples)
        if begun := [level for level in self.train.levels if level.samples < max(1, consumed_samples)]:
            record["levels"] = [[level.samples, dict(level.difficulties)] for level in begun]
        return record

    @cached_property
    def _record(self) -> Record:
        return make_record(self.train.plan) if self.new_record is None else self.new_record


def _curriculum_lines(samples: Samples, end: int) -> Iterator[str]:
    """Yield a line per dataset about the curriculum of a run of ``end`` samples."""
    if isinstance(samples, SFTDataset) and isinstance(samples.order, Graded):
        yield samples.order.format_summary("the examples", end)
    elif isinstance(samples, SampleStream):
        read = samples.timeline.read(end)
        orders = {prefix: dataset.order for prefix, dataset in samples.datasets.items()}
        for prefix, order in orders.items():
            if order is not None:
                yield order.format_summary(prefix, read.get(prefix, 0))


def build_data(plan: Plan, topology: Topology, device: torch.device, pin_memory: bool = False) -> Data:
    """Build the run's data. All ranks must call it. Raises ConfigError on all ranks if a dataset cannot be used."""
    trainer = plan.config.trainer
    set_limit(plan.config.data.cache_gib)
    train_samples = plan.batches.after(trainer.steps).samples
    # Ahead-of-time compilation replaces the validation set by mock data, of which one batch is enough.
    validation_samples = (trainer.val_steps or 1) * trainer.global_batch_size if trainer.val_every_steps else 0
    train: Samples
    validation: Mapping[str, Samples] = {}
    if plan.config.data.mock:
        length, vocabulary = plan.config.data.length, plan.model.vocab_size
        examples = MOCK_EXAMPLES if plan.config.data.pack or plan.config.data.document_mask else 1
        train = MockDataset(train_samples, length, vocabulary, trainer.seed, examples)
        if validation_samples:
            validation = {"": MockDataset(validation_samples, length, vocabulary, trainer.seed + 1, examples)}
    elif plan.config.data.kind == "sft":
        train, validation = build_sft(plan)
    else:
        train, validation = build_streams(plan)
    if topology.rank == 0:
        for line in _curriculum_lines(train, train_samples):
            sys.stderr.write(line)
    return Data(
        new_record=_record_of_rank_0(plan),
        train=Batches(train, plan, topology, device, plan.batches, plan.random_ltd, pin_memory, levels_of(plan)),
        validation={
            name: Batches(samples, plan, topology, device, pin_memory=pin_memory)
            for name, samples in validation.items()
        },
    )


def _record_of_rank_0(plan: Plan) -> Record:
    """Return the record of a new run, made by rank 0: large datasets take minutes to hash. All ranks must call it."""

    def make() -> Record:
        try:
            return make_record(plan)
        except (OSError, ValueError) as error:
            fix = "prepare the dataset again"
            problem = Problem("data.prefixes", plan.config.data.prefixes, f"cannot be read: {error}", fix)
            raise ConfigError([problem]) from None

    if plan.config.data.mock:
        return make_record(plan)
    before = phase.current()
    phase.enter("hashing the data", phase.UNWATCHED)
    record = broadcast_from_rank_0(make)
    phase.enter(before.name, before.patience)
    return record
