"""Rules on float8 matmuls, exact mode and QK-Clip."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.exact_blocks import LEAST_TOKENS, SPANS, num_blocks
from megatron_llama.arch.parameters import FUSED, ROW_PARALLEL, matrices
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.devices import find_device
from megatron_llama.plan.rules.rule import nearest_legal, reads


@reads("trainer.float8", "device.name", "trainer.tp", "trainer.micro_batch_size", "data.seq_length", "model")
def float8_sizes_fit_the_units(config: Config, world_size: int) -> Iterator[Problem]:
    """Sizes of float8 matmuls are multiples of a number that the device needs."""
    value, tp, device = config.trainer.float8, config.trainer.tp, find_device(config.device.name)
    if value is None or device is None:
        return
    multiple, table = device.float8_multiple, matrices(config.model)
    sizes = {"tokens of a micro batch": config.trainer.micro_batch_size * config.data.length}
    for name, parts in FUSED.items():
        shapes = [table[part].local_shape(tp) for part in parts]
        sizes[f"rows of {name} on a rank"] = sum(rows for rows, _ in shapes)
        if name in ROW_PARALLEL:
            sizes[f"columns of {name} on a rank"] = shapes[0][1]
    sizes["model.hidden_size"] = config.model.hidden_size
    for name, size in sizes.items():
        if size % multiple:
            rule = f"needs multiples of {multiple}: {name} = {size}"
            yield Problem("trainer.float8", value, rule, "write trainer.float8=null, or change the size")


@reads("trainer.exact", "trainer.tp", "model.num_attention_heads", "model.intermediate_size")
def exact_blocks_divide_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """A tensor-parallel rank has whole blocks."""
    tp, blocks = config.trainer.tp, num_blocks(config.model)
    if config.trainer.exact and blocks % tp:
        legal = [size for size in range(1, blocks + 1) if blocks % size == 0]
        rule = f"trainer.exact splits the matrices of this model into {blocks} blocks, which tp must divide"
        yield Problem("trainer.tp", tp, rule, f"{nearest_legal('trainer.tp', tp, legal)}, or trainer.exact=false")


@reads("trainer.exact", "trainer.cp", "trainer.cp_comm", "data.seq_length", "data.curriculum")
def exact_spans_divide_by_cp(config: Config, world_size: int) -> Iterator[Problem]:
    """A context-parallel rank has whole spans of each sequence."""
    cp, length = config.trainer.cp, config.data.length
    if not config.trainer.exact or cp == 1:
        return
    if config.trainer.cp_comm != "ulysses":
        rule = "trainer.exact needs whole sequences in attention"
        advice = "write trainer.cp_comm=ulysses, or trainer.exact=false"
        yield Problem("trainer.cp_comm", config.trainer.cp_comm, rule, advice)
    if SPANS % (2 * cp):
        rule = f"trainer.exact splits sequences into {SPANS} spans, two or more of them on a rank"
        yield Problem("trainer.cp", cp, rule, f"{nearest_legal('trainer.cp', cp, (1, 2, 4))}, or trainer.exact=false")
    if length < LEAST_TOKENS or length % SPANS:
        rule = f"trainer.exact with trainer.cp={cp} needs a multiple of {SPANS} of at least {LEAST_TOKENS:,} tokens"
        longer = max(LEAST_TOKENS, -(-length // SPANS) * SPANS)
        yield Problem("data.seq_length", length, rule, f"write data.seq_length={longer}, or trainer.cp=1")
    if config.data.curriculum:
        rule = f"trainer.exact with trainer.cp={cp} needs sequences of one length"
        yield Problem("data.curriculum", None, rule, "write data.curriculum=[], or trainer.cp=1")
