"""The parameters of one rank, in the units that ``fully_shard`` gathers and scatters (parallel/data.py), as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_llama.arch.shapes import fused_rows, fused_shape, matrices
from megatron_llama.config.precision import BYTES, quantized_bytes
from megatron_llama.plan.plan import Plan


class Parameter(NamedTuple):
    """A parameter on one tensor-parallel rank; a vector has one column."""

    name: str
    rows: int
    columns: int
    trained: bool = True
    quantized: bool = False
    """A frozen matrix in 8 or 4 bits."""

    def shard(self, ranks: int) -> int:
        """Values of one of ``ranks`` shards: ``fully_shard`` fills up the rows."""
        return -(-self.rows // ranks) * self.columns


class Unit(NamedTuple):
    """Parameters that travel in one collective."""

    what: str
    number: int
    """Units of this kind in a chunk."""
    parameters: tuple[Parameter, ...]


def target_rows(plan: Plan, matrix: str) -> list[int]:
    """Rows on one rank of each module in a fused matrix that LoRA adapts."""
    finetune, tp = plan.config.finetune, plan.config.trainer.tp
    if finetune.method != "lora":
        return []
    rows = fused_rows(plan.model, matrix, tp)
    return [count for module, count in rows.items() if module in finetune.lora_target_modules]


def key_rows(plan: Plan) -> int:
    """Of the trained rows of qkv, or of LoRA's B there, those of keys and values, which come last."""
    finetune, tp = plan.config.finetune, plan.config.trainer.tp
    wanted = finetune.lora_target_modules if finetune.method == "lora" else ("k_proj", "v_proj")
    return sum(matrices(plan.model)[module].local_shape(tp)[0] for module in ("k_proj", "v_proj") if module in wanted)


def block_parameters(plan: Plan) -> tuple[Parameter, ...]:
    """Those of a block, in the order of the model."""
    finetune, tp, h = plan.config.finetune, plan.config.trainer.tp, plan.model.hidden_size
    full, found = finetune.method != "lora", []
    for norm, those in (
        ("input_layernorm", ("qkv_proj", "o_proj")),
        ("post_attention_layernorm", ("gate_up_proj", "down_proj")),
    ):
        found.append(Parameter(norm, h, 1, is_trained(plan, norm)))
        for matrix in those:
            rows, columns = fused_shape(plan.model, matrix, tp)
            found.append(Parameter(matrix, rows, columns, full, plan.quantized is not None))
            if targets := target_rows(plan, matrix):
                found.append(Parameter(f"{matrix}.lora_A", len(targets) * finetune.lora_rank, columns))
                found.append(Parameter(f"{matrix}.lora_B", sum(targets), finetune.lora_rank))
    return tuple(found)


def units(plan: Plan, layers: int, is_first: bool, is_last: bool) -> Iterator[Unit]:
    """Those of a chunk of ``layers`` blocks."""
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
    """Whether a weight of the model itself gets gradients: each one but those that LoRA freezes."""
    return plan.config.finetune.method != "lora" or module.endswith(tuple(plan.config.finetune.modules_to_save))


def gathered_bytes(plan: Plan, parameter: Parameter, ranks: int) -> int:
    """Bytes of one of ``ranks`` shards of a parameter as it is gathered, for the layers to compute with."""
    values = parameter.shard(ranks)
    if parameter.quantized and plan.quantized:
        return quantized_bytes(plan.quantized, values)
    return values * BYTES[plan.precision.compute_dtype]
