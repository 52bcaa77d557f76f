"""Rules on exact mode (trainer.exact)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.blocks import LEAST_TOKENS, SPANS, num_blocks
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.devices import find_device
from megatron_llama.plan.rules.rule import nearest_legal, reads

OFF = "or trainer.exact=false"


@reads("trainer.exact", "device.name", "finetune.method", "optim.name")
def exact_excludes(config: Config, world_size: int) -> Iterator[Problem]:
    """Exact mode needs int64 sums, trains all weights, and excludes optimizers that exchange signs."""
    if not config.trainer.exact:
        return
    device = find_device(config.device.name)
    if device is not None and not device.sums_int64:
        rule = f"adds int64 numbers, which was not tested with device={config.device.name}"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false")
    if config.finetune.method == "lora":
        rule = "excludes finetune.method=lora, whose matmuls have no blocks"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false, or finetune.method=full")
    if config.optim.row.exchanges_signs:
        rule = f"excludes optim.name={config.optim.name}: the mean of signs depends on the number of ranks"
        yield Problem("trainer.exact", True, rule, "write trainer.exact=false, or optim.name=adamw")


@reads(
    *("trainer.exact", "trainer.compile", "trainer.float8", "trainer.grad_reduce", "trainer.param_gather"),
    "trainer.mlp_chunks",
)
def exact_replaces_matmuls_and_sums(config: Config, world_size: int) -> Iterator[Problem]:
    """Exact mode excludes other replacements of matmuls, and messages with scales that depend on the layout."""
    trainer = config.trainer
    if not trainer.exact:
        return
    excluded = {
        "compile": (bool(trainer.compile), "false", "whose fused operations depend on the shapes of a layout"),
        "float8": (trainer.float8 is not None, "null", "another replacement of the matmuls"),
        "grad_reduce": (trainer.grad_reduce is not None, "null", "which rounds parts of sums"),
        "param_gather": (trainer.param_gather is not None, "null", "which rounds weights by blocks of a rank's shard"),
        "mlp_chunks": (trainer.mlp_chunks > 1, "1", "another split of the matmuls"),
    }
    for name, (is_set, off, reason) in excluded.items():
        if is_set:
            rule = f"excludes trainer.{name}, {reason}"
            yield Problem("trainer.exact", True, rule, f"write trainer.{name}={off}, {OFF}")


@reads("trainer.exact", "trainer.tp", "model.num_attention_heads", "model.intermediate_size")
def exact_blocks_divide_by_tp(config: Config, world_size: int) -> Iterator[Problem]:
    """A tensor-parallel rank has whole blocks."""
    tp, blocks = config.trainer.tp, num_blocks(config.model)
    if config.trainer.exact and blocks % tp:
        legal = [size for size in range(1, blocks + 1) if blocks % size == 0]
        rule = f"trainer.exact splits the matrices of this model into {blocks} blocks, which tp must divide"
        yield Problem("trainer.tp", tp, rule, f"{nearest_legal('trainer.tp', tp, legal)}, {OFF}")


@reads("trainer.exact", "trainer.cp", "trainer.cp_comm", "data.seq_length", "data.curriculum")
def exact_spans_divide_by_cp(config: Config, world_size: int) -> Iterator[Problem]:
    """A context-parallel rank has whole spans of each sequence."""
    cp, length = config.trainer.cp, config.data.length
    if not config.trainer.exact or cp == 1:
        return
    if config.trainer.cp_comm != "ulysses":
        rule = "trainer.exact needs whole sequences in attention"
        yield Problem("trainer.cp_comm", config.trainer.cp_comm, rule, f"write trainer.cp_comm=ulysses, {OFF}")
    if SPANS % (2 * cp):
        rule = f"trainer.exact splits sequences into {SPANS} spans, two or more of them on a rank"
        yield Problem("trainer.cp", cp, rule, f"{nearest_legal('trainer.cp', cp, (1, 2, 4))}, {OFF}")
    if length < LEAST_TOKENS or length % SPANS:
        rule = f"trainer.exact with trainer.cp={cp} needs a multiple of {SPANS} of at least {LEAST_TOKENS:,} tokens"
        longer = max(LEAST_TOKENS, -(-length // SPANS) * SPANS)
        yield Problem("data.seq_length", length, rule, f"write data.seq_length={longer}, or trainer.cp=1")
    if config.data.curriculum:
        rule = f"trainer.exact with trainer.cp={cp} needs sequences of one length"
        yield Problem("data.curriculum", "set", rule, "write data.curriculum=[], or trainer.cp=1")
