"""Rules on random layer-wise token dropping (trainer.random_ltd)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config import curriculum
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.rule import nearest_legal, reads
from megatron_llama.topology import Grid

SECTION = "trainer.random_ltd"


@reads(f"{SECTION}.min_value", f"{SECTION}.max_value", f"{SECTION}.seq_per_step", "data.seq_length")
def lengths_grow_within_the_sequence(config: Config, world_size: int) -> Iterator[Problem]:
    """min_value, a multiple of seq_per_step, is at most max_value, which is at most a sequence."""
    ltd, length = config.trainer.random_ltd, config.data.length
    if ltd is None:
        return
    most = ltd.max_value or length
    if most > length:
        rule = f"must be at most data.seq_length={length}"
        yield Problem(f"{SECTION}.max_value", most, rule, f"write {SECTION}.max_value={length}, or leave it out")
    legal = range(ltd.seq_per_step, min(most, length) + 1, ltd.seq_per_step)
    if ltd.min_value not in legal:
        rule = f"must be a multiple of {SECTION}.seq_per_step={ltd.seq_per_step}, and at most {min(most, length)}"
        advice = nearest_legal(f"{SECTION}.min_value", ltd.min_value, legal)
        advice = advice or f"write {SECTION}.seq_per_step=1, or {SECTION}=null"
        yield Problem(f"{SECTION}.min_value", ltd.min_value, rule, advice)


@reads(f"{SECTION}.layers", "model.num_hidden_layers")
def middle_layers_drop_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    """The first and the last layer see all tokens: what enters the model, and what the loss is of."""
    ltd, count = config.trainer.random_ltd, config.model.num_hidden_layers
    if ltd is None:
        return
    middle = list(range(1, count - 1))
    if not middle:
        rule = f"has no layers to drop tokens in: of {count}, the first and the last see all of them"
        yield Problem(SECTION, ltd.layers or "set", rule, f"write {SECTION}=null, or a model of 3 layers or more")
    elif ltd.layers is not None and (
        not ltd.layers or len(set(ltd.layers)) < len(ltd.layers) or set(ltd.layers) - set(middle)
    ):
        rule = f"must be different numbers from 1 to {count - 2}: the first and the last layer see all tokens"
        right = sorted(set(ltd.layers) & set(middle)) or middle
        advice = f"write {SECTION}.layers=[{','.join(map(str, right))}], or leave it out"
        yield Problem(f"{SECTION}.layers", ltd.layers, rule, advice)


@reads(f"{SECTION}.max_value", f"{SECTION}.seq_per_step", "trainer.tp", "trainer.sp", "data.seq_length")
def sequence_parallel_ranks_share_what_is_kept(config: Config, world_size: int) -> Iterator[Problem]:
    """With sequence parallelism each tensor-parallel rank has as many of the tokens that a layer sees."""
    ltd, length = config.trainer.random_ltd, config.data.length
    parts = Grid.of(config.trainer).divisor("activations")
    if ltd is None or config.trainer.sp is False or length % parts:
        return
    for name, value in (("seq_per_step", ltd.seq_per_step), ("max_value", ltd.max_value or length)):
        if value % parts:
            rule = f"must divide by trainer.tp={parts}, over which sequence parallelism splits the tokens"
            larger = -(-value // parts) * parts
            nearest = larger if name == "seq_per_step" or larger <= length else value // parts * parts
            yield Problem(f"{SECTION}.{name}", value, rule, f"write {SECTION}.{name}={nearest}, or trainer.sp=false")
            return


@reads(SECTION, "data.curriculum")
def tokens_are_dropped_of_whole_sequences(config: Config, world_size: int) -> Iterator[Problem]:
    """A curriculum of lengths cuts what random-LTD counts in: both would shorten the same sequences."""
    entries = config.data.curriculum
    if config.trainer.random_ltd is None or curriculum.problems_of(entries):
        return
    if any(metric.is_length for metric in curriculum.metrics_of(entries)):
        rule = "drops tokens of sequences that data.curriculum cuts to other lengths"
        advice = f"write {SECTION}=null, or leave lengths out of data.curriculum"
        yield Problem(SECTION, "set", rule, advice)
