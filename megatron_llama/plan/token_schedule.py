"""How many tokens of a sequence the layers of random-LTD see, step by step (trainer.random_ltd, docs/random_ltd.md).

The schedule is DeepSpeed's fixed_linear: min_value + (max_value - min_value) · steps taken / require_steps, rounded
down to a multiple of seq_per_step. It is computed in whole numbers, so no rounding of fractions delays a length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_llama.arch.flops import Kept
from megatron_llama.config.settings import Config
from megatron_llama.plan.batch_schedule import BatchSchedule


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

    def kept(self, step: int) -> Kept:
        """The same, of how many."""
        return Kept(len(self.layers), self.length(step), self.seq_length)

    def lengths(self, steps: int) -> dict[int, int]:
        """Every length of a run of ``steps``, by the first step that has it, ascending."""
        span, first = self.max_value - self.min_value, {}
        for length in range(self.min_value, self.max_value, self.seq_per_step):
            first[1 - (self.min_value - length) * self.require_steps // span] = length
        first[1 if span == 0 else self.require_steps + 1] = self.max_value
        return {step: length for step, length in first.items() if step <= max(1, steps)}

    def sequences(self, step: int, batches: BatchSchedule) -> Iterator[tuple[Kept, int]]:
        """What the layers see, and of how many sequences, up to ``step`` of ``batches``, which begin at step 0."""
        starts = [*self.lengths(step), step + 1]
        for first, following in pairwise(starts):
            yield self.kept(first), batches.after(following - 1).samples - batches.after(first - 1).samples

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
