"""How many parameters a Llama has, in all and on one rank; arithmetic on the shape, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_llama.config.settings import FinetuneConfig, ModelConfig
from megatron_llama.plan.shapes import matrices, padded_vocab_size


@dataclass(frozen=True)
class StageParameters:
    """Parameters that one rank of a pipeline stage holds; padding, copies and LoRA's included."""

    held: int
    trained: int
    """Those that get gradients."""
    quantizable: int
    """Elements of the blocks' seven matrices, which LoRA may keep in 8 or 4 bits."""


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, as published: no padding, no copies, a tied head counted once."""
    return _on_one_rank(model, FinetuneConfig()).held


def parameters_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one block on one tensor-parallel rank: the matrices and two norms."""
    return matrices_per_layer(model, tp) + 2 * model.hidden_size


def matrices_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Elements of one block's seven matrices on one tensor-parallel rank."""
    return sum(math.prod(matrix.local_shape(tp)) for matrix in matrices(model).values())


def lora_parameters(model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int = 1) -> int:
    """What LoRA adds to ``layers`` blocks on one tensor-parallel rank: A [rank, in] and B [out, rank] of each target,
    cut as the matrix is."""
    shapes = [matrices(model)[module].local_shape(tp) for module in finetune.lora_target_modules]
    return layers * finetune.lora_rank * sum(map(sum, shapes))


def trained_parameters(model: ModelConfig, finetune: FinetuneConfig) -> int:
    """Parameters of the whole model that get gradients, copies not counted."""
    return _on_one_rank(model, finetune).trained


def _on_one_rank(model: ModelConfig, finetune: FinetuneConfig) -> StageParameters:
    """The whole model, without padding and copies."""
    return stage_parameters(model, finetune, model.num_hidden_layers, 1, first=True, last=True)


def stage_parameters(
    model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int, *, first: bool, last: bool
) -> StageParameters:
    """What one rank of a pipeline stage with ``layers`` blocks holds."""
    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    # A tied head on the first stage is the table itself; on a later stage it is a copy that is kept equal.
    tables = first + (last and not (model.tie_word_embeddings and first))
    held = layers * parameters_per_layer(model, tp) + last * model.hidden_size + tables * table
    quantizable = layers * matrices_per_layer(model, tp)
    if finetune.method != "lora":
        return StageParameters(held, held, quantizable)

    def saved(module: str) -> bool:
        return module.endswith(tuple(finetune.modules_to_save))

    added = lora_parameters(model, finetune, layers, tp)
    norms = layers * (saved("input_layernorm") + saved("post_attention_layernorm")) + (last and saved("norm"))
    tables = (first and saved("embed_tokens")) + (last and saved("lm_head"))
    return StageParameters(held + added, added + norms * model.hidden_size + tables * table, quantizable)
