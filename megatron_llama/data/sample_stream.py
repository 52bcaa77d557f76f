"""The samples of pretraining: sample n is a function of the seed, the datasets, their weights and n, whatever the
length of the run, its layout, or where it stopped.

``corpus/blend.py`` maps a sample to a dataset, ``data/epoch_index.py`` to tokens. Memory does not grow with the run:
a window of the blend, and mapped files of one or two epochs of each dataset.
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
from megatron_llama.corpus.blend import MEGATRON, BlendSegment, BlendTimeline, same_shares, segments_from_json
from megatron_llama.corpus.difficulty_index import unit_range
from megatron_llama.corpus.epochs import SPLITS, DatasetSplit, open_split, planned_blends, planned_timeline
from megatron_llama.corpus.indexed_format import IndexedDataset
from megatron_llama.corpus.packing import Unpacked
from megatron_llama.data.checks import check_data, check_ids
from megatron_llama.data.epoch_index import Epoch, open_epoch
from megatron_llama.data.graded_order import Graded, GradedStretches, Level, build_graded, group_seed, levels_of
from megatron_llama.data.megatron_order import build_megatron
from megatron_llama.data.record import Record, changes_reading, make_record, moved_datasets
from megatron_llama.parallel.groups import raise_on_all_ranks, sync_errors
from megatron_llama.plan import Plan
from megatron_llama.plan.schedules import indexed_metrics

KEPT_EPOCHS = 2  # a global batch may reach into the next


class EndlessDataset:
    """One split of one dataset, epoch after epoch, each in its own order."""

    def __init__(self, plan: Plan, prefix: str, number: int) -> None:
        """``number``: of the split in ``corpus.epochs.SPLITS``. Raises OSError or ValueError."""
        data = plan.config.data
        assert data.cache_dir is not None, "a plan with datasets has one"
        self._dataset, self._plan, self._cache = IndexedDataset(prefix), plan, Path(data.cache_dir)
        part = open_split(data, prefix, number)
        self._span, self._length = (part.first, part.last), part.samples(data.length)
        self._epoch = lru_cache(KEPT_EPOCHS)(self._open)
        self._graded: GradedStretches | None = None

    def graded(self, levels: Sequence[Level], firsts: Sequence[int]) -> EndlessDataset:
        """The same dataset in the order of the plan's curriculum, ``firsts`` its samples with which the levels begin.
        Raises ConfigError."""
        data, seed = self._plan.config.data, self._plan.config.trainer.seed
        part = DatasetSplit(self._dataset.prefix, self._dataset.index, *self._span)
        order = build_graded(
            self._plan, [part], levels, firsts, lambda units, group: Unpacked(len(units), group_seed(seed, group))
        )
        first_unit, _ = unit_range(part.index, part.first, part.last, data.length)
        found = copy.copy(self)
        found._graded, found._length = GradedStretches(order, first_unit, data.length), len(order)
        return found

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    @property
    def order(self) -> Graded | None:
        """The order of a curriculum, where there is one."""
        return None if self._graded is None else self._graded.order

    def sample(self, number: int) -> Mapping[str, torch.Tensor]:
        """A sample of any epoch, with what data.document_mask and data.eod_mask_loss ask for."""
        source: Epoch | GradedStretches
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
            sample["loss_mask"][np.cumsum(lengths[:-1], dtype=np.int64) - 1] = 0  # the label is another document's
        if self._plan.config.data.document_mask:
            sample["documents"] = np.repeat(np.arange(len(lengths)), lengths)[:-1]
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def _open(self, epoch: int) -> Epoch:
        length, seed = self._plan.config.data.length, self._plan.config.trainer.seed
        return open_epoch(self._dataset, self._span, length, seed, epoch, self._cache)


class SampleStream:
    """Samples of ``seq_length`` tokens, without end."""

    def __init__(self, timeline: BlendTimeline, datasets: Mapping[str, EndlessDataset], old: Any = None) -> None:
        """``old``: the samples of the timeline's segments that are in megatron-core's order."""
        self.timeline, self.datasets, self._old = timeline, datasets, old

    def __len__(self) -> int:
        """Samples in which an epoch of each dataset would fit."""
        return sum(map(len, self.datasets.values()))

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """Sample ``index``. May make the files of an epoch that nobody has read before."""
        if self.timeline.segments[self.timeline.segment_of(index)].order == MEGATRON:
            sample = self._old[index]
            return {key: sample[key] for key in ("tokens", "labels", "loss_mask")}
        prefix, sample = self.timeline.at(index)
        return self.datasets[prefix].sample(sample)


def build_streams(plan: Plan) -> tuple[SampleStream, SampleStream | None]:
    """Samples to train on, and those to validate on where the run validates. All ranks must call it.

    Raises ConfigError, on all ranks, for a dataset that can't be read, does not fit the model or tokenizer, or leaves
    a split empty, and for a cache folder that can't be written.
    """
    raise_on_all_ranks(check_data(plan.config) if dist.get_rank() == 0 else [])
    splits: list[SampleStream | None] = [None, None]
    problems = _cache_problems(plan)
    try:
        for number in range(1 + bool(plan.config.trainer.val_every_steps)):
            timeline = planned_timeline(plan.config.data, number)
            prefixes = [path for _, path in list_paths(plan.config.data)]
            used = [path for path in prefixes if any(path in segment.weights for segment in timeline.segments)]
            datasets = {path: EndlessDataset(plan, path, number) for path in used}
            problems += [_too_small(plan, path, number) for path, dataset in datasets.items() if not len(dataset)]
            splits[number] = SampleStream(timeline, datasets)
    except (OSError, ValueError) as error:  # rank 0 has read them: this is another machine
        rule = f"can't be read on {os.uname().nodename}: {error}"
        problems.append(Problem("data.prefixes", plan.config.data.prefixes, rule, "put it where all machines see it"))
    raise_on_all_ranks(problems)
    training, validation = splits
    assert training is not None
    graded = graded_together(plan, training.timeline, training.datasets, levels_of(plan))
    training = SampleStream(training.timeline, graded)
    return training, validation


def resume_streams(
    plan: Plan,
    record: Record,
    consumed_samples: int,
    training: SampleStream,
    validation: SampleStream | None,
    levels: Sequence[Level] = (),
) -> tuple[SampleStream, SampleStream | None]:
    """The streams of ``build_streams``, going on after ``consumed_samples`` as ``record`` says. All ranks must call it.

    Every dataset goes on where it stood, also where the plan's blend is another one. ``levels`` of the curriculum,
    those before included.
    """
    trainer = plan.config.trainer
    with sync_errors(OSError, ValueError):
        timeline = _going_on(plan, record, consumed_samples)
    datasets = graded_together(plan, timeline, training.datasets, levels)
    began, now = timeline.segments[0], timeline.segments[timeline.segment_of(consumed_samples)]
    if began.order != MEGATRON:
        return SampleStream(timeline, datasets), validation
    assert began.shuffled is not None
    left = began.shuffled if now.order == MEGATRON else 0
    for name in ("document_mask", "eod_mask_loss"):
        if getattr(plan.config.data, name):
            rule = "needs the borders of documents, which the order of this run's checkpoint does not tell"
            raise ConfigError([Problem(f"data.{name}", True, rule, f"write data.{name}=false")])
    if left and dist.get_rank() == 0:
        text = f"this run shuffled all epochs of its {left:,} samples together, as runs did before, and goes on so"
        sys.stderr.write(f"data: {text}\n")
    held_out = (trainer.val_steps or 1) * trainer.global_batch_size if validation is not None else 0
    old, old_validation = build_megatron(plan, left, held_out)
    if validation is not None:
        validation = SampleStream(BlendTimeline([began]), {}, old_validation)
    return SampleStream(timeline, datasets, old), validation


def graded_together(
    plan: Plan, timeline: BlendTimeline, datasets: Mapping[str, EndlessDataset], levels: Sequence[Level]
) -> Mapping[str, EndlessDataset]:
    """The datasets in the order of the plan's curriculum, if it has a metric with an index. All ranks must call it.

    Raises ConfigError, on all ranks.
    """
    if not indexed_metrics(plan.config.data):
        return datasets
    found, problems, before = {}, list[Problem](), [timeline.before(level.samples) for level in levels]
    for prefix, dataset in datasets.items():
        try:
            found[prefix] = dataset.graded(levels, [counts.get(prefix, 0) for counts in before])
        except ConfigError as error:
            problems += error.problems
    raise_on_all_ranks(problems)
    return found


def _going_on(plan: Plan, record: Record, consumed_samples: int) -> BlendTimeline:
    """What was read by ``record``, and what the plan reads next."""
    now, blends = make_record(plan), planned_blends(plan.config.data)
    history = _history(record, now).up_to(consumed_samples)
    current = [weights for first, weights in blends if first <= consumed_samples][-1]
    changes = [(first, weights) for first, weights in blends if first > consumed_samples]
    if changes_reading(record, now):
        # Samples of another length, seed or split are other samples: each dataset goes on after as many tokens.
        read = history.read(consumed_samples) if history.segments else {}
        tokens = {prefix: count * record["seq_length"] for prefix, count in read.items()}
        starts = {prefix: -(-count // now["seq_length"]) for prefix, count in tokens.items()}
        history = BlendTimeline([*history.segments, BlendSegment(consumed_samples, current, starts)])
    last = history.segments[-1]
    if not same_shares(last.weights, current):
        changes.insert(0, (consumed_samples, current))
    if last.shuffled is not None and (not changes or changes[0][0] > last.shuffled):
        changes.insert(0, (last.shuffled, dict(last.weights)))  # in the new order, if the run was made longer
    for first, weights in changes:
        history = history.switched(first, weights)
    return history


def _history(record: Record, now: Record) -> BlendTimeline:
    """The stream that a record describes, with its datasets where they lie now."""
    moved = moved_datasets(record, now)

    def renamed(by_prefix: Mapping[str, Any]) -> dict[str, Any]:
        return {moved.get(prefix, prefix): value for prefix, value in by_prefix.items()}

    segments = segments_from_json(record["segments"])
    return BlendTimeline([replace(s, weights=renamed(s.weights), starts=renamed(s.starts)) for s in segments])


def _cache_problems(plan: Plan) -> list[Problem]:
    """Why no epoch could be shuffled later, in the middle of a run."""
    folder = plan.config.data.cache_dir
    assert folder is not None, "a plan with datasets has one"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return []
        rule = "can't be written"
    except OSError as error:
        rule = f"can't be made: {type(error).__name__}: {error}"
    advice = "write data.cache_dir=FOLDER, where each epoch's order can be kept"
    return [Problem("data.cache_dir", folder, rule, advice)]


def _too_small(plan: Plan, prefix: str, number: int) -> Problem:
    data = plan.config.data
    part = open_split(data, prefix, number)
    rule = f"split {data.split} leaves none of the {len(part.index)} documents of {prefix} for {SPLITS[number]}"
    if part.first < part.last:
        rule = f"split {data.split} leaves {part.tokens} tokens of {prefix} for {SPLITS[number]}, less than a sequence"
    advice = "use a larger dataset, another data.split, a shorter data.seq_length, or trainer.val_every_steps=null"
    return Problem("data.prefixes", data.prefixes, rule, advice)
