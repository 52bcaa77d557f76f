"""Sizes of one rank's parameters, in the units of ``fully_shard`` (parallel/fsdp.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_llama.arch.names import MAGNITUDE
from megatron_llama.arch.shapes import (
    bias_rows,
    block_norms,
    fused_rows,
    fused_shape,
    matrices,
    qk_norm_shapes,
)
from megatron_llama.config.precision import BYTES, quantized_bytes
from megatron_llama.plan.plan import Plan


class Parameter(NamedTuple):
    """Shape of a parameter on one tensor-parallel rank; a vector has one column."""

    name: str
    rows: int
    columns: int
    trained: bool = True
    quantized: bool = False
    """Whether it is a frozen matrix in 8 or 4 bits."""

    def shard(self, ranks: int) -> int:
        """Return the values of one of ``ranks`` shards; ``fully_shard`` pads the rows."""
        return -(-self.rows // ranks) * self.columns


class Unit(NamedTuple):
    """Parameters that one collective moves."""

    label: str
    number: int
    """Units of this kind in a chunk."""
    parameters: tuple[Parameter, ...]


def target_rows(plan: Plan, matrix: str, tp: int | None = None) -> list[int]:
    """Return the rows on one of ``tp`` ranks (default: the plan's) of each LoRA target module in a fused matrix."""
    finetune, tp = plan.config.finetune, tp or plan.config.trainer.tp
    if finetune.method != "lora":
        return []
    rows = fused_rows(plan.model, matrix, tp)
    return [count for module, count in rows.items() if module in finetune.lora_target_modules]


def key_rows(plan: Plan) -> int:
    """Return the number of trained key and value rows of qkv, or of LoRA's B there. They are its last rows."""
    finetune, tp = plan.config.finetune, plan.config.trainer.tp
    targets = finetune.lora_target_modules if finetune.method == "lora" else ("k_proj", "v_proj")
    return sum(matrices(plan.model)[module].local_shape(tp)[0] for module in ("k_proj", "v_proj") if module in targets)


def block_parameters(plan: Plan, tp: int | None = None) -> tuple[Parameter, ...]:
    """Return the parameters of a block on one of ``tp`` ranks (default: the plan's), in the order of the model."""
    finetune, tp, h = plan.config.finetune, tp or plan.config.trainer.tp, plan.model.hidden_size
    full, parameters = finetune.method != "lora", list[Parameter]()
    biases, branches = bias_rows(plan.model, tp), (("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj"))
    for norm, fused in zip(block_norms(plan.model), branches, strict=True):
        parameters.append(Parameter(norm, h, 1, is_trained(plan, norm)))
        for matrix in fused:
            rows, columns = fused_shape(plan.model, matrix, tp)
            parameters.append(Parameter(matrix, rows, columns, full, plan.quantized is not None))
            if matrix in biases:
                parameters.append(Parameter(f"{matrix}.bias", biases[matrix], 1, full))
            if targets := target_rows(plan, matrix, tp):
                parameters.append(Parameter(f"{matrix}.lora_A", len(targets) * finetune.lora_rank, columns))
                parameters.append(Parameter(f"{matrix}.lora_B", sum(targets), finetune.lora_rank))
                if finetune.use_dora:
                    parameters.append(Parameter(f"{matrix}.{MAGNITUDE}", sum(targets), 1))
    sizes = qk_norm_shapes(plan.model, tp).items()
    return (*parameters, *(Parameter(name, size, 1, is_trained(plan, name)) for name, size in sizes))


def units(plan: Plan, layers: int, is_first: bool, is_last: bool) -> Iterator[Unit]:
    """Yield the units of a pipeline chunk of ``layers`` blocks."""
    h = plan.model.hidden_size
    rows = plan.padded_vocab_size // plan.config.trainer.tp
    embedding = Parameter("embed_tokens", rows, h, is_trained(plan, "embed_tokens"))
    norm = Parameter("norm", h, 1, is_trained(plan, "norm"))
    head = Parameter("lm_head", rows, h, is_trained(plan, "lm_head"))
    yield Unit("blocks", layers, block_parameters(plan))
    if is_first and is_last and plan.model.tie_word_embeddings:
        yield Unit("embedding, norm and head", 1, (embedding, norm))
        return
    if is_first:
        yield Unit("embedding", 1, (embedding,))
    if is_last:
        yield Unit("norm and head", 1, (head, norm))


def is_trained(plan: Plan, module: str) -> bool:
    """Whether a weight of the model has a gradient, that is, LoRA does not freeze it."""
    return plan.config.finetune.method != "lora" or module.endswith(tuple(plan.config.finetune.modules_to_save))


def gathered_bytes(plan: Plan, parameter: Parameter, ranks: int) -> int:
    """Return the bytes of one of ``ranks`` shards of a parameter in the format in which it is gathered."""
    values = parameter.shard(ranks)
    if parameter.quantized and plan.quantized:
        return quantized_bytes(plan.quantized, values)
    return values * BYTES[plan.precision.compute_dtype]
