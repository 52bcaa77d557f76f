"""Schedules of samples, retained tokens and difficulty: functions of the step and the position of a run's start.

The global batch size depends on the consumed samples (``trainer.batch_schedule``), so a resumed run needs only its step
and its consumed samples. Schedules of random-LTD and of curricula are functions of the step.
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
    """Position of a run between two steps."""

    step: int = 0
    """Steps taken."""
    samples: int = 0
    """Samples consumed, also the number of the next sample."""
    tokens: int = 0
    """Tokens in these samples. Plans count padding too."""


def all_sizes(global_batch_size: int, batch_schedule: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return ``BatchSchedule.sizes`` of the two settings."""
    return ((0, global_batch_size), *((int(samples), int(size)) for samples, size in batch_schedule))


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch of each step."""

    sizes: tuple[tuple[int, int], ...]
    """(first consumed sample, sequences per step), ascending from 0. The size at a step's first sample applies."""
    seq_length: int
    start: RunPosition = RunPosition()
    """Position at which the run starts or resumes."""
    trained_tokens: tuple[tuple[int, int], ...] = ()
    """(first step, trained tokens per sequence) of each curriculum length; () without one."""

    @classmethod
    def of(cls, config: Config, start: RunPosition = RunPosition()) -> BatchSchedule:
        """Return the schedule of a config."""
        trainer, data = config.trainer, config.data
        tokens = tuple((step, cut.tokens) for step, cut in curriculum_lengths(data, trainer.steps))
        return cls(all_sizes(trainer.global_batch_size, trainer.batch_schedule), data.length, start, tokens)

    @property
    def position_of_the_largest(self) -> int:
        """Consumed samples from which the global batch is the largest."""
        return max(self.sizes, key=lambda entry: entry[1])[0]

    def after(self, step: int) -> RunPosition:
        """Return the position after ``step``, which must not be before the start."""
        samples, before = self._samples(step), self.start
        tokens = before.tokens
        firsts = [first for first, _ in self.trained_tokens]
        for (_, length), following in zip(self.trained_tokens, [*firsts, step + 1][1:], strict=True):
            last = min(step, following - 1)  # the last step with this length
            if last > before.step:
                end = self._samples(last)
                tokens += (end - before.samples) * length
                before = RunPosition(last, end)
        return RunPosition(step, samples, tokens + (samples - before.samples) * self.seq_length)

    def _samples(self, step: int) -> int:
        """Return the samples consumed after ``step``."""
        left, samples = step - self.start.step, self.start.samples
        assert left >= 0, f"step {step} is before the run's start, step {self.start.step}"
        for number, (_, size) in enumerate(self.sizes):
            steps = left
            if number + 1 < len(self.sizes):
                steps = min(left, max(0, -(-(self.sizes[number + 1][0] - samples) // size)))
            samples, left = samples + steps * size, left - steps
        return samples

    def tokens_at(self, step: int) -> int:
        """Return the trained tokens per sequence of a step, counted from 1."""
        return [self.seq_length, *(length for first, length in self.trained_tokens if first <= step)][-1]

    def size_from(self, samples: int) -> int:
        """Return the sequences of a step that begins at this number of consumed samples."""
        return [size for since, size in self.sizes if since <= samples][-1]

    def last_step_within(self, samples: int) -> int:
        """Return the last step of a run that consumes at most ``samples``."""
        first, smallest = self.start.step, min(size for _, size in self.sizes)
        steps = range(first, first + 1 + max(0, samples - self.start.samples) // smallest)
        return first + max(0, bisect.bisect_right(steps, samples, key=self._samples) - 1)


# Random-LTD (trainer.random_ltd, docs/guides/methods/random_ltd.md): retained tokens grow with the steps. DeepSpeed's
# fixed_linear: min_value + (max_value - min_value) · steps taken / require_steps, rounded down to a multiple of
# seq_per_step. Integer arithmetic, so that rounding never delays a length.


@dataclass(frozen=True)
class TokenSchedule:
    """Number of tokens per sequence that random-LTD's layers process (``trainer.random_ltd`` with derived values)."""

    layers: tuple[int, ...]
    """Global numbers of the layers that drop tokens."""
    num_hidden_layers: int
    seq_length: int
    min_value: int
    max_value: int
    require_steps: int
    seq_per_step: int

    @classmethod
    def of(cls, config: Config) -> TokenSchedule | None:
        """Return the schedule of a derived config; None without random-LTD."""
        ltd = config.trainer.random_ltd
        if ltd is None:
            return None
        assert ltd.max_value is not None and ltd.require_steps is not None and ltd.layers is not None
        shape = tuple(ltd.layers), config.model.num_hidden_layers, config.data.length
        return cls(*shape, ltd.min_value, ltd.max_value, ltd.require_steps, ltd.seq_per_step)

    def length(self, step: int) -> int:
        """Return the retained tokens per sequence in a step, counted from 1."""
        if step > self.require_steps:
            return self.max_value
        grown = self.min_value + (self.max_value - self.min_value) * (step - 1) // self.require_steps
        return grown - grown % self.seq_per_step

    def retained(self, step: int) -> RetainedTokens:
        """Return the retained tokens of a step with their layers and the sequence length."""
        return RetainedTokens(len(self.layers), self.length(step), self.seq_length)

    def lengths(self, steps: int) -> dict[int, int]:
        """Return the lengths of a run of ``steps`` by their first step, ascending."""
        span, first = self.max_value - self.min_value, {}
        for length in range(self.min_value, self.max_value, self.seq_per_step):
            first[1 - (self.min_value - length) * self.require_steps // span] = length
        first[1 if span == 0 else self.require_steps + 1] = self.max_value
        return {step: length for step, length in first.items() if step <= max(1, steps)}

    def sequences(self, step: int, batches: BatchSchedule) -> Iterator[tuple[RetainedTokens, int]]:
        """Yield (retained tokens, number of sequences) up to ``step`` of ``batches``, which begin at step 0."""
        for first, following in pairwise([*self.lengths(step), step + 1]):
            yield self.retained(first), batches.after(following - 1).samples - batches.after(first - 1).samples

    def layer_tokens(self, step: int, batches: BatchSchedule) -> int:
        """Return DeepSpeed's consumed_layer_tokens up to ``step`` of ``batches``, which begin at step 0.

        The sum over sequences of retained tokens · layers that drop tokens + sequence length · other layers.
        """
        dropping = len(self.layers)
        others = self.seq_length * (self.num_hidden_layers - dropping)
        return sum(count * (retained.tokens * dropping + others) for retained, count in self.sequences(step, batches))

    def always(self, length: int) -> TokenSchedule:
        """Return a schedule with the same layers and one length in all steps."""
        return replace(self, min_value=length, max_value=length)


# Curricula: first step of each difficulty level and sequence lengths. Functions of step and settings, without state.

MOST_LEVELS = 1000
"""Limit on difficulty levels, each of which has a list of samples."""


@dataclass(frozen=True)
class SequenceCut:
    """Division of a sequence of data.seq_length tokens into chunks; the remainder is not trained on."""

    length: int
    """Tokens per chunk."""
    chunks: int
    """Number of chunks."""

    @property
    def tokens(self) -> int:
        """Trained tokens of the sequence."""
        return self.length * self.chunks


def indexed_metrics(data: DataConfig) -> tuple[CurriculumMetric, ...]:
    """Return the metrics with an index of sample difficulties."""
    return tuple(metric for metric in curriculum_metrics(data.curriculum) if not metric.is_length)


def curriculum_lengths(data: DataConfig, last_step: int) -> list[tuple[int, SequenceCut]]:
    """Return (first step, cut) of each sequence length until ``last_step``; [] without a curriculum of lengths."""
    for metric in curriculum_metrics(data.curriculum):
        if metric.is_length:
            rises = metric.rises(max(1, last_step))
            return [(step, _cut(metric.metric, length, data.length)) for step, length in rises]
    return []


def sequence_cut_at(data: DataConfig, difficulties: Mapping[str, int]) -> SequenceCut | None:
    """Return how sequences are cut at these difficulties; None without a curriculum of lengths."""
    for metric in curriculum_metrics(data.curriculum):
        if metric.is_length:
            return _cut(metric.metric, difficulties[metric.metric], data.length)
    return None


def _cut(name: str, length: int, whole: int) -> SequenceCut:
    return SequenceCut(length, whole // length if name == RESHAPE else 1)


def difficulties_at(data: DataConfig, step: int) -> dict[str, int]:
    """Return the difficulty of each metric at a step, counted from 1."""
    return {metric.metric: metric.at(step) for metric in curriculum_metrics(data.curriculum)}


def first_steps(config: Config, begin: int = 1) -> list[int]:
    """Return the first step of each difficulty level from step ``begin`` on; [] without a curriculum."""
    last = max(begin, config.trainer.steps)
    rises = (metric.rises(last, begin) for metric in curriculum_metrics(config.data.curriculum))
    return sorted({step for steps in rises for step, _ in steps})
