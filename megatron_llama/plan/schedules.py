"""Which samples step n trains on: a pure function of the step, from where a run starts or goes on.

The global batch size depends on the samples consumed so far (``trainer.batch_schedule``), so it needs no memory of the
sizes before: a run that goes on from a checkpoint starts from its step and its consumed samples. Random-LTD
and curricula have schedules of the same kind.
"""
from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_llama.arch.flops import RetainedTokens
from megatron_llama.config.data_settings import RESHAPE, CurriculumMetric, curriculum_metrics
from megatron_llama.config.settings import Config, DataConfig


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands between two steps."""

    step: int = 0
    """Steps taken."""
    samples: int = 0
    """Samples consumed, which is also the number of the next one."""
    tokens: int = 0
    """Tokens in them. A plan does not know which will be padding, and takes sequences to be full."""


def all_sizes(global_batch_size: int, batch_schedule: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """``BatchSchedule.sizes`` of the two settings."""
    return ((0, global_batch_size), *((int(samples), int(size)) for samples, size in batch_schedule))


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch of each step."""

    sizes: tuple[tuple[int, int], ...]
    """(consumed samples from which it holds, sequences per step), ascending, the first from 0. A step has the size that
    holds where it begins."""
    seq_length: int
    start: RunPosition = RunPosition()
    """Where the run starts, or goes on from a checkpoint."""
    trained_tokens: tuple[tuple[int, int], ...] = ()
    """(first step, tokens of each sequence that are trained on) while a curriculum makes them fewer."""

    @classmethod
    def of(cls, config: Config, start: RunPosition = RunPosition()) -> BatchSchedule:
        """The schedule of a config."""
        trainer, data = config.trainer, config.data
        kept = tuple((step, cut.tokens) for step, cut in curriculum_lengths(data, trainer.steps))
        return cls(all_sizes(trainer.global_batch_size, trainer.batch_schedule), data.length, start, kept)

    @property
    def position_of_the_largest(self) -> int:
        """Consumed samples from which the global batch is the largest."""
        return max(self.sizes, key=lambda entry: entry[1])[0]

    def after(self, step: int) -> RunPosition:
        """Where the run stands after ``step``, which is not before the start."""
        samples, before = self._samples(step), self.start
        tokens = before.tokens
        firsts = [first for first, _ in self.trained_tokens]
        for (_, kept), following in zip(self.trained_tokens, [*firsts, step + 1][1:], strict=True):
            last = min(step, following - 1)  # of the steps with so many tokens
            if last > before.step:
                end = self._samples(last)
                tokens += (end - before.samples) * kept
                before = RunPosition(last, end)
        return RunPosition(step, samples, tokens + (samples - before.samples) * self.seq_length)

    def _samples(self, step: int) -> int:
        """Samples consumed after ``step``."""
        left, samples = step - self.start.step, self.start.samples
        assert left >= 0, f"step {step} is before the run's start, step {self.start.step}"
        for number, (_, size) in enumerate(self.sizes):
            steps = left
            if number + 1 < len(self.sizes):
                until = self.sizes[number + 1][0]
                steps = min(left, max(0, -(-(until - samples) // size)))
            samples, left = samples + steps * size, left - steps
        return samples

    def tokens_at(self, step: int) -> int:
        """Tokens of a sequence that a step, counted from 1, trains on."""
        return [self.seq_length, *(kept for first, kept in self.trained_tokens if first <= step)][-1]

    def size_from(self, samples: int) -> int:
        """Sequences of a step that begins when ``samples`` are consumed."""
        return [size for since, size in self.sizes if since <= samples][-1]

    def last_step_within(self, samples: int) -> int:
        """The last step of a run that consumes no more than ``samples``."""
        first, smallest = self.start.step, min(size for _, size in self.sizes)
        steps = range(first, first + 1 + max(0, samples - self.start.samples) // smallest)
        return first + max(0, bisect.bisect_right(steps, samples, key=self._samples) - 1)


# Random-LTD (trainer.random_ltd, docs/guides/methods/random_ltd.md): its layers see more tokens of a sequence from
# step to step. This
# is DeepSpeed's fixed_linear: min_value + (max_value - min_value) · steps taken / require_steps, rounded down to a
# multiple of seq_per_step, in whole numbers, so no rounding of fractions delays a length.

@dataclass(frozen=True)
class TokenSchedule:
    """What ``trainer.random_ltd`` means, with every derived value filled in."""

    layers: tuple[int, ...]
    """Global numbers of the layers that see a part of the tokens."""
    num_hidden_layers: int
    seq_length: int
    min_value: int
    max_value: int
    require_steps: int
    seq_per_step: int

    @classmethod
    def of(cls, config: Config) -> TokenSchedule | None:
        """The schedule of a config that ``resolve`` has completed; None without random-LTD."""
        ltd = config.trainer.random_ltd
        if ltd is None:
            return None
        assert ltd.max_value is not None and ltd.require_steps is not None and ltd.layers is not None
        shape = tuple(ltd.layers), config.model.num_hidden_layers, config.data.length
        return cls(*shape, ltd.min_value, ltd.max_value, ltd.require_steps, ltd.seq_per_step)

    def length(self, step: int) -> int:
        """Tokens of a sequence that the layers see in a step, counted from 1."""
        if step > self.require_steps:
            return self.max_value
        grown = self.min_value + (self.max_value - self.min_value) * (step - 1) // self.require_steps
        return grown - grown % self.seq_per_step

    def retained(self, step: int) -> RetainedTokens:
        """The same, of how many."""
        return RetainedTokens(len(self.layers), self.length(step), self.seq_length)

    def lengths(self, steps: int) -> dict[int, int]:
        """Every length of a run of ``steps``, by the first step that has it, ascending."""
        span, first = self.max_value - self.min_value, {}
        for length in range(self.min_value, self.max_value, self.seq_per_step):
            first[1 - (self.min_value - length) * self.require_steps // span] = length
        first[1 if span == 0 else self.require_steps + 1] = self.max_value
        return {step: length for step, length in first.items() if step <= max(1, steps)}

    def sequences(self, step: int, batches: BatchSchedule) -> Iterator[tuple[RetainedTokens, int]]:
        """What the layers see, and of how many sequences, up to ``step`` of ``batches``, which begin at step 0."""
        starts = [*self.lengths(step), step + 1]
        for first, following in pairwise(starts):
            yield self.retained(first), batches.after(following - 1).samples - batches.after(first - 1).samples

    def layer_tokens(self, step: int, batches: BatchSchedule) -> int:
        """Tokens times the layers that have seen them, up to ``step`` of ``batches``, which begin at step 0.

        DeepSpeed's consumed_layer_tokens: the sum of sequences · (length · layers that drop + sequence · others).
        """
        dropping = len(self.layers)
        others = self.seq_length * (self.num_hidden_layers - dropping)
        return sum(count * (kept.tokens * dropping + others) for kept, count in self.sequences(step, batches))

    def always(self, length: int) -> TokenSchedule:
        """The same layers with one length in all steps."""
        return replace(self, min_value=length, max_value=length)


# The steps of a curriculum: the beginning of each level of difficulty, and the lengths of sequences. All of it is a
# function of the step and the settings, so a resumed run needs no state of a schedule.

MOST_LEVELS = 1000
"""Each keeps a list of samples of its own."""


@dataclass(frozen=True)
class SequenceCut:
    """What becomes of a sequence of data.seq_length tokens."""

    length: int
    """Tokens of each piece."""
    pieces: int
    """How many pieces are trained on; what is left over is not."""

    @property
    def tokens(self) -> int:
        """Tokens of the sequence that are trained on."""
        return self.length * self.pieces


def indexed_metrics(data: DataConfig) -> tuple[CurriculumMetric, ...]:
    """The metrics whose difficulty of each sample is in an index."""
    return tuple(metric for metric in curriculum_metrics(data.curriculum) if not metric.is_length)


def curriculum_lengths(data: DataConfig, last_step: int) -> list[tuple[int, SequenceCut]]:
    """(first step, how sequences are cut) of each length of sequence until ``last_step``; empty without any."""
    for metric in curriculum_metrics(data.curriculum):
        if metric.is_length:
            rises = metric.rises(max(1, last_step))
            return [(step, _cut(metric.metric, length, data.length)) for step, length in rises]
    return []


def sequence_cut_at(data: DataConfig, difficulties: Mapping[str, int]) -> SequenceCut | None:
    """How sequences are cut at these difficulties; None where they are not."""
    for metric in curriculum_metrics(data.curriculum):
        if metric.is_length:
            return _cut(metric.metric, difficulties[metric.metric], data.length)
    return None


def _cut(name: str, length: int, whole: int) -> SequenceCut:
    return SequenceCut(length, whole // length if name == RESHAPE else 1)


def difficulties_at(data: DataConfig, step: int) -> dict[str, int]:
    """The difficulty of each metric at a step, counted from 1."""
    return {metric.metric: metric.at(step) for metric in curriculum_metrics(data.curriculum)}


def first_steps(config: Config, begin: int = 1) -> list[int]:
    """The first step of each level of a run from step ``begin`` on; empty without a curriculum."""
    last = max(begin, config.trainer.steps)
    rises = (metric.rises(last, begin) for metric in curriculum_metrics(config.data.curriculum))
    return sorted({step for steps in rises for step, _ in steps})
