"""Rules on float8 matmuls."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.arch.shapes import FUSED, ROW_PARALLEL, matrices
from megatron_llama.config.precision import QUANTIZED_BITS
from megatron_llama.config.problems import Problem
from megatron_llama.config.settings import Config
from megatron_llama.plan.rules.rule import reads

OFF = "trainer.float8=null"


@reads("trainer.float8", "trainer.async_tp", "finetune.frozen_dtype", "finetune.method")
def float8_replaces_plain_matmuls(config: Config, world_size: int) -> Iterator[Problem]:
    """float8 excludes other replacements of the blocks' matmuls."""
    value = config.trainer.float8
    if value is None:
        return
    if config.trainer.async_tp:
        rule = "excludes trainer.async_tp, which fuses collectives into matmuls of other formats"
        yield Problem("trainer.float8", value, rule, f"write {OFF}, or trainer.async_tp=false")
    kind = config.finetune.frozen_dtype
    if config.finetune.method == "lora" and kind in QUANTIZED_BITS:
        rule = f"excludes finetune.frozen_dtype={kind}: quantized matrices are multiplied in bf16 or fp32"
        yield Problem("trainer.float8", value, rule, f"write {OFF}, or finetune.frozen_dtype=bf16")


def check_float8_sizes(config: Config, multiple: int) -> Iterator[Problem]:
    """Yield a problem for each size of a matmul that is not a multiple of ``multiple``, which the device needs."""
    value, tp = config.trainer.float8, config.trainer.tp
    if value is None or multiple == 1:
        return
    table = matrices(config.model)
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
            yield Problem("trainer.float8", value, rule, f"write {OFF}, or change the size")
