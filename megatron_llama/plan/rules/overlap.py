"""Rules on communication that is to run beside products."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.rule import reads
from megatron_llama.topology import Grid


@reads("trainer.async_tp", "trainer.tp", "trainer.sp", "trainer.compile", "data.seq_length")
def something_runs_beside_the_products(config: Config, world_size: int) -> Iterator[Problem]:
    """The compiler puts sequence parallelism's gathers and scatters into products: all four must be there."""
    trainer, off = config.trainer, "or trainer.async_tp=false"
    if not trainer.async_tp:
        return
    if trainer.tp == 1:
        rule = "is for tensor-parallel ranks, and trainer.tp=1: there is nothing to gather or scatter"
        yield Problem("trainer.async_tp", True, rule, "write trainer.async_tp=false, or trainer.tp=2 or more")
        return
    rule = "gathers and scatters of the sequence are what runs beside products, and sequence parallelism is off"
    parts = Grid.of(trainer).divisor("activations")
    if trainer.sp is False:
        yield Problem("trainer.async_tp", True, rule, f"write trainer.sp=true, {off}")
    elif trainer.sp is None and config.data.length % parts:  # null is derived to be off
        rule += f": data.seq_length={config.data.length} does not divide by trainer.tp={trainer.tp}"
        longer = -(-config.data.length // parts) * parts
        yield Problem("trainer.async_tp", True, rule, f"write data.seq_length={longer}, {off}")
    if not trainer.compile:
        rule = "is a pass of the compiler, and trainer.compile=false: uncompiled layers overlap in their own way"
        yield Problem("trainer.async_tp", True, rule, f"write trainer.compile=true, {off}")
