"""Rules on data.curriculum: entries that work, and what they can go together with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_llama.config.curriculum import (
    DISCRETE,
    RESHAPE,
    SECTION,
    TRUNCATE,
    CurriculumMetric,
    metrics_of,
    problems_of,
)
from megatron_llama.config.problems import Problem, shown
from megatron_llama.config.settings import Config
from megatron_llama.plan.curriculum_steps import MOST_LEVELS, first_steps
from megatron_llama.plan.rules.rule import reads
from megatron_llama.topology import Grid

NONE = f"{SECTION}=[]"


@reads("data.curriculum")
def curriculum_has_schedules(config: Config, world_size: int) -> Iterator[Problem]:
    """Each entry is a metric with a whole schedule."""
    for problem in problems_of(config.data.curriculum):
        yield replace(problem, instead=f"{problem.instead}, or {NONE}")


def _good(config: Config) -> tuple[CurriculumMetric, ...]:
    """The metrics, where there is nothing wrong with them by themselves."""
    entries = config.data.curriculum
    return () if problems_of(entries) else metrics_of(entries)


@reads("data.curriculum", "trainer.steps")
def curriculum_has_few_levels(config: Config, world_size: int) -> Iterator[Problem]:
    """Every level is a list of samples, and every length of sequences a shape."""
    metrics = _good(config)
    for metric in metrics:
        if metric.schedule_type == DISCRETE:
            continue
        assert metric.min_difficulty is not None and metric.max_difficulty is not None
        wide = metric.max_difficulty - metric.min_difficulty
        if (levels := wide // metric.difficulty_step) > MOST_LEVELS:
            rule = f"{metric.metric} rises in {levels:,} levels, and {MOST_LEVELS:,} are the most"
            advice = f"write difficulty_step: {-(-wide // MOST_LEVELS)} or more in its entry, or {NONE}"
            yield Problem(SECTION, None, rule, advice)
            return
    if metrics and len(first_steps(config)) > MOST_LEVELS:
        rule = f"its metrics together rise in more than {MOST_LEVELS:,} levels"
        yield Problem(SECTION, None, rule, f"write a larger difficulty_step in its entries, or {NONE}")


@reads("data.curriculum", "data.seq_length", "data.kind", "trainer.sp", "trainer.tp")
def curriculum_lengths_fit(config: Config, world_size: int) -> Iterator[Problem]:
    """Lengths end at the run's own, and divide like it."""
    data, trainer = config.data, config.trainer
    for metric in _good(config):
        if not metric.is_length:
            continue
        if metric.highest != data.length:
            rule = f"{metric.metric} ends at {metric.highest} tokens, and the run's sequences have {data.length}"
            name = "the last of difficulty" if metric.schedule_type == DISCRETE else "max_difficulty"
            advice = f"write {data.length} as {name} in its entry, or data.seq_length={metric.highest}"
            yield Problem(SECTION, None, rule, advice)
        if metric.metric == RESHAPE and data.kind == "sft":
            rule = f"{RESHAPE} would cut examples in two, the second without its prompt"
            advice = f"write metric: {TRUNCATE}, or metric: length, which draws short examples first, or {NONE}"
            yield Problem(SECTION, None, rule, advice)
        lengths = metric.difficulty if metric.schedule_type == DISCRETE else [metric.difficulty_step]
        parts = Grid.of(trainer).divisor("activations")
        is_split = trainer.sp is not False and data.length % parts == 0  # where null is derived to be on
        if is_split and any(length % parts for length in lengths):
            rule = f"with sequence parallelism lengths must divide by tp={parts}, and those of {shown(lengths)} don't"
            step = -(-metric.difficulty_step // parts) * parts
            name = "lengths that divide" if metric.schedule_type == DISCRETE else f"difficulty_step: {step}"
            yield Problem(SECTION, None, rule, f"write {name} in its entry, or trainer.sp=false")


@reads("data.curriculum", "data.mock", "trainer.epochs")
def curriculum_goes_with_the_run(config: Config, world_size: int) -> Iterator[Problem]:
    """What an order from easy to difficult can't go together with."""
    trainer, indexed = config.trainer, [metric.metric for metric in _good(config) if not metric.is_length]
    if indexed and config.data.mock:
        rule = f"{indexed[0]} needs the index of a dataset, and data.mock=true makes tokens up"
        yield Problem(SECTION, None, rule, f"write data.mock=false, or {TRUNCATE} or {RESHAPE} as the metric")
    if indexed and trainer.epochs is not None:
        rule = "easy samples are drawn more often than difficult ones, so no number of samples shows all of them once"
        yield Problem("trainer.epochs", trainer.epochs, rule, "write trainer.epochs=null and trainer.steps")
