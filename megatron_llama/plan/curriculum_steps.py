"""What a curriculum means for the steps of a run: where each level of difficulty begins, and how long sequences are.

All of it is a function of the step and the settings, so a run that goes on needs no state of a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_llama.config.curriculum import RESHAPE, CurriculumMetric, metrics_of
from megatron_llama.config.settings import Config, DataConfig

MOST_LEVELS = 1000
"""Each keeps a list of samples of its own."""


@dataclass(frozen=True)
class Cut:
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
    return tuple(metric for metric in metrics_of(data.curriculum) if not metric.is_length)


def lengths(data: DataConfig, last_step: int) -> list[tuple[int, Cut]]:
    """(first step, how sequences are cut) of each length of sequence until ``last_step``; empty without any."""
    for metric in metrics_of(data.curriculum):
        if metric.is_length:
            rises = metric.rises(max(1, last_step))
            return [(step, _cut(metric.metric, length, data.length)) for step, length in rises]
    return []


def cut_at(data: DataConfig, difficulties: Mapping[str, int]) -> Cut | None:
    """How sequences are cut at these difficulties; None where they are not."""
    for metric in metrics_of(data.curriculum):
        if metric.is_length:
            return _cut(metric.metric, difficulties[metric.metric], data.length)
    return None


def _cut(name: str, length: int, whole: int) -> Cut:
    return Cut(length, whole // length if name == RESHAPE else 1)


def difficulties_at(data: DataConfig, step: int) -> dict[str, int]:
    """The difficulty of each metric at a step, counted from 1."""
    return {metric.metric: metric.at(step) for metric in metrics_of(data.curriculum)}


def first_steps(config: Config, begin: int = 1) -> list[int]:
    """The first step of each level of a run from step ``begin`` on; empty without a curriculum."""
    last = max(begin, config.trainer.steps)
    rises = (metric.rises(last, begin) for metric in metrics_of(config.data.curriculum))
    return sorted({step for steps in rises for step, _ in steps})
