"""Rules on context parallelism (trainer.cp)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.shapes import kv_heads_per_rank
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.rule import nearest_legal, reads
from megatron_llama.topology import Grid


@reads("trainer.cp", "trainer.tp", "trainer.sp", "data.seq_length")
def chunks_are_equal(config: Config, world_size: int) -> Iterator[Problem]:
    """Each context-parallel rank has two chunks of a sequence, all of one length."""
    cp, length = config.trainer.cp, config.data.length
    if cp == 1 or length % (2 * cp) == 0:
        return
    rule = f"must be a multiple of 2 * trainer.cp = {2 * cp}: each context-parallel rank has two chunks of a sequence"
    unit = Grid.of(config.trainer).sequence_unit(sp=config.trainer.sp is not False)
    legal = {size for size in (length // unit * unit, -(-length // unit) * unit) if size}
    advice = f"{nearest_legal('data.seq_length', length, legal)}, or trainer.cp=1"
    yield Problem("data.seq_length", length, rule, advice)


@reads("trainer.cp", "trainer.cp_comm", "trainer.tp", "model.num_attention_heads", "model.num_key_value_heads")
def heads_divide_by_cp(config: Config, world_size: int) -> Iterator[Problem]:
    """Ulysses gives each context-parallel rank the same number of heads, or a copy of a kv head."""
    cp, tp, model = config.trainer.cp, config.trainer.tp, config.model
    if config.trainer.cp_comm != "ulysses" or cp == 1 or model.num_attention_heads % tp:
        return
    heads, kv = model.num_attention_heads // tp, kv_heads_per_rank(model, tp)
    legal = [size for size in range(1, heads + 1) if heads % size == 0 and (kv % size == 0 or size % kv == 0)]
    if cp not in legal:
        each = " of a tensor-parallel rank" if tp > 1 else ""
        rule = f"trainer.cp_comm=ulysses must divide the {heads} query heads{each} and share out the {kv} kv heads"
        advice = f"{nearest_legal('trainer.cp', cp, legal)}, or trainer.cp_comm=all_gather"
        yield Problem("trainer.cp", cp, rule, advice)


@reads("trainer.cp", "trainer.random_ltd")
def whole_sequences_drop_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    """Random-LTD drops tokens of whole sequences."""
    cp = config.trainer.cp
    if cp > 1 and config.trainer.random_ltd is not None:
        rule = f"conflicts with trainer.cp={cp}: a random subset of a sequence has no equal parts on its ranks"
        yield Problem("trainer.random_ltd", "set", rule, "write trainer.random_ltd=null, or trainer.cp=1")


@reads("trainer.cp", "trainer.async_tp")
def context_is_not_overlapped(config: Config, world_size: int) -> Iterator[Problem]:
    """trainer.async_tp was not tested with context parallelism."""
    cp = config.trainer.cp
    if cp > 1 and config.trainer.async_tp:
        rule = f"conflicts with trainer.cp={cp}: overlapped matmuls were not tested with it"
        yield Problem("trainer.async_tp", True, rule, "write trainer.async_tp=false, or trainer.cp=1")
