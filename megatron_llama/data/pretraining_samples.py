"""Pretraining samples. Sample n is a function of the seed, the datasets, their weights and n only.

It does not depend on the run's length or layout, or on where it resumed. ``corpus/blend.py`` maps a sample to a
dataset, ``data/epoch_index.py`` maps it to tokens. Memory is constant: a window of the blend, and mapped files of one
or two epochs of each dataset.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.data_settings import list_paths
from megatron_llama.corpus import splits
from megatron_llama.corpus.blend import MEGATRON, BlendSegment, BlendTimeline, same_shares, segments_from_json
from megatron_llama.corpus.difficulty_index import unit_range
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Unpacked
from megatron_llama.data.checks import check_data, check_ids
from megatron_llama.data.curriculum_order import Graded, GradedSequences, Level, build_graded, group_seed, levels_of
from megatron_llama.data.epoch_index import Epoch, open_epoch
from megatron_llama.data.megatron_order import build_megatron
from megatron_llama.data.resume_record import Record, changes_reading, moved_datasets
from megatron_llama.parallel.groups import raise_on_all_ranks, sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.data_schedules import indexed_metrics
from megatron_llama.system.errors import machine_fault
from megatron_llama.system.object_store import is_url

CACHED_EPOCHS = 2  # a global batch may extend into the next epoch


class EndlessDataset:
    """One split of one dataset, repeated with a new shuffle per epoch."""

    def __init__(self, plan: Plan, prefix: str, number: int) -> None:
        """``number`` is the index of the split in ``corpus.splits.SPLITS``. Raises OSError or ValueError."""
        data = plan.config.data
        assert data.cache_dir is not None, "resolve derives it"
        self._dataset, self._plan, self._cache = IndexedDataset(prefix), plan, Path(data.cache_dir)
        part = splits.open_split(data, prefix, number)
        self._span, self._length = (part.first, part.last), part.samples(data.length)
        self._epoch = lru_cache(CACHED_EPOCHS)(self._open)
        self._graded: GradedSequences | None = None

    def graded(self, levels: Sequence[Level], firsts: Sequence[int]) -> EndlessDataset:
        """Return a copy in the order of the plan's curriculum. ``firsts`` are the first samples of the levels.

        Raises ConfigError.
        """
        data, seed = self._plan.config.data, self._plan.config.trainer.seed
        part = splits.DatasetSplit(self._dataset.prefix, self._dataset.index, *self._span)
        order = build_graded(
            self._plan, [part], levels, firsts, lambda units, group: Unpacked(len(units), group_seed(seed, group))
        )
        first_unit, _ = unit_range(part.index, part.first, part.last, data.length)
        dataset = copy.copy(self)
        dataset._graded, dataset._length = GradedSequences(order, first_unit, data.length), len(order)
        return dataset

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    @property
    def order(self) -> Graded | None:
        """Order of the curriculum. None without a curriculum."""
        return None if self._graded is None else self._graded.order

    def sample(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return a sample of any epoch, with the effects of data.document_mask and data.eod_mask_loss."""
        source: Epoch | GradedSequences
        if self._graded is not None:
            source = self._graded
        else:
            epoch, number = divmod(number, self._length)
            source = self._epoch(epoch)
        text, lengths = source.text(self._dataset, number)

        def locate(position: int) -> tuple[str, int, int]:
            return (self._dataset.prefix, *source.place(self._dataset, number, position))

        check_ids(text, self._plan.model.vocab_size, locate)
        sample = {"tokens": text[:-1], "labels": text[1:], "loss_mask": np.ones(len(text) - 1, dtype=np.float32)}
        if self._plan.config.data.eod_mask_loss:
            sample["loss_mask"][np.cumsum(lengths[:-1], dtype=np.int64) - 1] = 0  # the next document's label
        if self._plan.config.data.document_mask:
            sample["documents"] = np.repeat(np.arange(len(lengths)), lengths)[:-1]
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def _open(self, epoch: int) -> Epoch:
        length, seed = self._plan.config.data.length, self._plan.config.trainer.seed
        return open_epoch(self._dataset, self._span, length, seed, epoch, self._cache)


class SampleStream:
    """Infinite stream of samples of ``seq_length`` tokens."""

    def __init__(
        self, timeline: BlendTimeline, datasets: Mapping[str, EndlessDataset], old: Any = None, once: bool = False
    ) -> None:
        """``old`` has the samples of the timeline's segments in megatron-core's order. ``once``: samples after the
        first epoch have no loss."""
        self.timeline, self.datasets, self._old, self.once = timeline, datasets, old, once

    def __len__(self) -> int:
        """Samples of one epoch of all datasets."""
        return sum(map(len, self.datasets.values()))

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return sample ``index``. May create the files of a new epoch."""
        if self.timeline.segments[self.timeline.segment_of(index)].order == MEGATRON:
            sample = self._old[index]
            return {key: sample[key] for key in ("tokens", "labels", "loss_mask")}
        is_over = self.once and index >= len(self)
        prefix, number = self.timeline.at(0 if is_over else index)
        sample = self.datasets[prefix].sample(number)
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])} if is_over else sample


def build_streams(plan: Plan) -> tuple[SampleStream, dict[str, SampleStream]]:
    """Build the training stream and, if the run validates, a stream for each validation set. All ranks must call it.

    Raises:
        ConfigError: on all ranks, if a dataset cannot be read, does not fit the model or tokenizer, or has an empty
            split, or the cache folder is not writable.
    """
    raise_on_all_ranks(check_data(plan.config) if dist.get_rank() == 0 else [])
    data, training, problems = plan.config.data, SampleStream(BlendTimeline([]), {}), _cache_problems(plan)
    validation: dict[str, SampleStream] = {}

    def stream(timeline: BlendTimeline, number: int) -> SampleStream:
        used = dict.fromkeys(path for segment in timeline.segments for path in segment.weights)
        datasets = {path: EndlessDataset(plan, path, number) for path in used}
        problems.extend(_too_small(plan, path, number) for path, dataset in datasets.items() if not len(dataset))
        return SampleStream(timeline, datasets, once=number == 1 and bool(data.validation_prefixes))

    try:
        training = stream(splits.planned_timeline(data), 0)
        if plan.config.trainer.val_every_steps:
            validation = {name: stream(timeline, 1) for name, timeline in splits.validation_timelines(data).items()}
    except (OSError, ValueError) as error:  # rank 0 has checked them, so this is another machine
        rule, fix = f"cannot be read on {os.uname().nodename}: {error}", "use a folder that all machines share"
        fix = machine_fault(error) or fix
        problems.append(Problem("data.prefixes", plan.config.data.prefixes, rule, fix))
    raise_on_all_ranks(problems)
    graded = graded_datasets(plan, training.timeline, training.datasets, levels_of(plan))
    return SampleStream(training.timeline, graded), validation


def resume_streams(
    plan: Plan,
    record: Record,
    consumed_samples: int,
    training: SampleStream,
    validation: Mapping[str, SampleStream],
    levels: Sequence[Level],
    now: Record,
) -> tuple[SampleStream, Mapping[str, SampleStream]]:
    """Resume the streams of ``build_streams`` from a checkpoint's ``record``. All ranks must call it.

    Each dataset continues at its position, also if the blend has changed. ``levels`` are all levels of the curriculum,
    including past ones. ``now`` is the plan's record.
    """
    trainer = plan.config.trainer
    with sync_errors(OSError, ValueError):
        timeline = _resumed_timeline(plan, record, consumed_samples, now)
    datasets = graded_datasets(plan, timeline, training.datasets, levels)
    first, current = timeline.segments[0], timeline.segments[timeline.segment_of(consumed_samples)]
    if first.order != MEGATRON:
        return SampleStream(timeline, datasets), validation
    assert first.shuffled is not None
    shuffled = first.shuffled if current.order == MEGATRON else 0
    if stored := [path for _, path in list_paths(plan.config.data) if is_url(path)]:
        rule = "is in an object store, and this checkpoint's sample order (megatron-core's) needs local files"
        raise ConfigError([Problem("data.prefixes", stored[0], rule, "copy the dataset, and write its local path")])
    for name in ("document_mask", "eod_mask_loss"):
        if getattr(plan.config.data, name):
            rule = "needs document boundaries, which this checkpoint's sample order (megatron-core's) does not have"
            raise ConfigError([Problem(f"data.{name}", True, rule, f"write data.{name}=false")])
    if shuffled and dist.get_rank() == 0:
        text = f"resuming with the checkpoint's order: all epochs of {shuffled:,} samples shuffled together"
        sys.stderr.write(f"data: {text}\n")
    from_split = bool(validation) and not plan.config.data.validation_prefixes
    held_out = (trainer.val_steps or 1) * trainer.global_batch_size if from_split else 0
    old, old_validation = build_megatron(plan, shuffled, held_out)
    if from_split:
        validation = {"": SampleStream(BlendTimeline([first]), {}, old_validation)}
    return SampleStream(timeline, datasets, old), validation


def graded_datasets(
    plan: Plan, timeline: BlendTimeline, datasets: Mapping[str, EndlessDataset], levels: Sequence[Level]
) -> Mapping[str, EndlessDataset]:
    """Return the datasets in the curriculum's order, if a metric has an index. All ranks must call it.

    Raises ConfigError on all ranks.
    """
    if not indexed_metrics(plan.config.data):
        return datasets
    graded, problems, before = {}, list[Problem](), [timeline.before(level.samples) for level in levels]
    for prefix, dataset in datasets.items():
        try:
            graded[prefix] = dataset.graded(levels, [counts.get(prefix, 0) for counts in before])
        except ConfigError as error:
            problems += error.problems
    raise_on_all_ranks(problems)
    return graded


def _resumed_timeline(plan: Plan, record: Record, consumed_samples: int, now: Record) -> BlendTimeline:
    """Return the timeline of ``record``, continued by the plan's blends."""
    blends = splits.planned_blends(plan.config.data)
    history = _history(record, now).up_to(consumed_samples)
    current = [weights for first, weights in blends if first <= consumed_samples][-1]
    changes = [(first, weights) for first, weights in blends if first > consumed_samples]
    if changes_reading(record, now):
        # Sample numbers have another meaning: continue each dataset after the same number of tokens.
        read = history.read(consumed_samples) if history.segments else {}
        tokens = {prefix: count * record["seq_length"] for prefix, count in read.items()}
        starts = {prefix: -(-count // now["seq_length"]) for prefix, count in tokens.items()}
        history = BlendTimeline([*history.segments, BlendSegment(consumed_samples, current, starts)])
    last = history.segments[-1]
    if not same_shares(last.weights, current):
        changes.insert(0, (consumed_samples, current))
    if last.shuffled is not None and (not changes or changes[0][0] > last.shuffled):
        changes.insert(0, (last.shuffled, dict(last.weights)))  # beyond the original length of the run: the new order
    for first, weights in changes:
        history = history.switched(first, weights)
    return history


def _history(record: Record, now: Record) -> BlendTimeline:
    """Return the timeline of a record, with the current paths of its datasets."""
    moved = moved_datasets(record, now)

    def renamed(by_prefix: Mapping[str, Any]) -> dict[str, Any]:
        return {moved.get(prefix, prefix): value for prefix, value in by_prefix.items()}

    segments = segments_from_json(record["segments"])
    return BlendTimeline([replace(s, weights=renamed(s.weights), starts=renamed(s.starts)) for s in segments])


def _cache_problems(plan: Plan) -> list[Problem]:
    """Return the problems of the cache folder, so that a run does not fail at a later epoch."""
    folder = plan.config.data.cache_dir
    assert folder is not None, "resolve derives it"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return []
        rule = "is not writable"
    except OSError as error:
        rule = f"cannot be created: {type(error).__name__}: {error}"
    return [Problem("data.cache_dir", folder, rule, "write data.cache_dir=FOLDER with a writable folder")]


def _too_small(plan: Plan, prefix: str, number: int) -> Problem:
    data = plan.config.data
    part = splits.open_split(data, prefix, number)
    if number and data.validation_prefixes:
        rule = f"{prefix} has {part.tokens} tokens, less than a sequence"
        fix = "use a larger dataset, or a shorter data.seq_length"
        return Problem("data.validation_prefixes", data.validation_prefixes, rule, fix)
    use, fix = splits.SPLITS[number], "prepare more documents (a .txt file is one)"
    rule = f"split {data.split} leaves none of the {len(part.index)} documents of {prefix} for {use}"
    if part.first < part.last:
        rule = f"split {data.split} leaves {part.tokens} tokens of {prefix} for {use}, less than a sequence"
        fix = "use a larger dataset, a shorter data.seq_length"
    return Problem("data.prefixes", data.prefixes, rule, f"{fix}, another data.split, or trainer.val_every_steps=0")
