"""Which samples step n trains on: a pure function of the step, from where a run starts or goes on.

The global batch size depends on the samples consumed so far (``trainer.batch_schedule``), so it needs no memory of the
sizes before: a run that goes on from a checkpoint starts from its step and its consumed samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_llama.config.settings import Config
from megatron_llama.plan.curriculum_steps import lengths


@dataclass(frozen=True)
class Position:
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
    start: Position = Position()
    """Where the run starts, or goes on from a checkpoint."""
    kept: tuple[tuple[int, int], ...] = ()
    """(first step, tokens of each sequence that are trained on) while a curriculum makes them fewer."""

    @classmethod
    def of(cls, config: Config, start: Position = Position()) -> BatchSchedule:
        """The schedule of a config."""
        trainer, data = config.trainer, config.data
        kept = tuple((step, cut.tokens) for step, cut in lengths(data, trainer.steps))
        return cls(all_sizes(trainer.global_batch_size, trainer.batch_schedule), data.length, start, kept)

    @property
    def position_of_the_largest(self) -> int:
        """Consumed samples from which the global batch is the largest."""
        return max(self.sizes, key=lambda entry: entry[1])[0]

    def after(self, step: int) -> Position:
        """Where the run stands after ``step``, which is not before the start."""
        samples, before = self._samples(step), self.start
        tokens = before.tokens
        firsts = [first for first, _ in self.kept]
        for (_, kept), following in zip(self.kept, [*firsts, step + 1][1:], strict=True):
            last = min(step, following - 1)  # of the steps with so many tokens
            if last > before.step:
                end = self._samples(last)
                tokens += (end - before.samples) * kept
                before = Position(last, end)
        return Position(step, samples, tokens + (samples - before.samples) * self.seq_length)

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

    def kept_at(self, step: int) -> int:
        """Tokens of a sequence that a step, counted from 1, trains on."""
        return [self.seq_length, *(kept for first, kept in self.kept if first <= step)][-1]

    def size_from(self, samples: int) -> int:
        """Sequences of a step that begins when ``samples`` are consumed."""
        return [size for since, size in self.sizes if since <= samples][-1]

    def last_step_within(self, samples: int) -> int:
        """The last step of a run that consumes no more than ``samples``."""
        first, smallest = self.start.step, min(size for _, size in self.sizes)
        steps = range(first, first + 1 + max(0, samples - self.start.samples) // smallest)
        return first + max(0, bisect.bisect_right(steps, samples, key=self._samples) - 1)
