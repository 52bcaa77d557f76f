"""Which samples step n trains on: a pure function of the step, from where a run starts or goes on.

The global batch size depends on the samples consumed so far (``trainer.batch_schedule``), so it needs no memory of the
sizes before: a run that goes on from a checkpoint starts from its step and its consumed samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_llama.config.settings import Config


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

    @classmethod
    def of(cls, config: Config, start: Position = Position()) -> BatchSchedule:
        """The schedule of a config."""
        trainer = config.trainer
        return cls(all_sizes(trainer.global_batch_size, trainer.batch_schedule), config.data.length, start)

    @property
    def position_of_the_largest(self) -> int:
        """Consumed samples from which the global batch is the largest."""
        return max(self.sizes, key=lambda entry: entry[1])[0]

    def after(self, step: int) -> Position:
        """Where the run stands after ``step``, which is not before the start."""
        left, samples = step - self.start.step, self.start.samples
        assert left >= 0, f"step {step} is before the run's start, step {self.start.step}"
        for number, (_, size) in enumerate(self.sizes):
            steps = left
            if number + 1 < len(self.sizes):
                until = self.sizes[number + 1][0]
                steps = min(left, max(0, -(-(until - samples) // size)))
            samples, left = samples + steps * size, left - steps
        tokens = self.start.tokens + (samples - self.start.samples) * self.seq_length
        return Position(step, samples, tokens)

    def size_from(self, samples: int) -> int:
        """Sequences of a step that begins when ``samples`` are consumed."""
        return [size for since, size in self.sizes if since <= samples][-1]

    def last_step_within(self, samples: int) -> int:
        """The last step of a run that consumes no more than ``samples``."""
        first, smallest = self.start.step, min(size for _, size in self.sizes)
        steps = range(first, first + 1 + max(0, samples - self.start.samples) // smallest)
        return first + max(0, bisect.bisect_right(steps, samples, key=lambda step: self.after(step).samples) - 1)
