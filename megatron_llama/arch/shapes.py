"""The shapes of a Llama's tensors, how tensor parallelism cuts them, and how many parameters they add up to: the one
table that memory, FLOPs, traffic, LoRA and the names of checkpoints are derived from. Arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_llama.config.precision import has_8bit_states
from megatron_llama.config.settings import FinetuneConfig, ModelConfig


@dataclass(frozen=True)
class Matrix:
    """One of the seven weight matrices of a block."""

    name: str
    """Hugging Face's name inside the block, without ``.weight``."""
    shape: tuple[int, int]
    """(out, in)."""
    cut: int
    """The dimension that tensor parallelism cuts: 0 (column-parallel, by Megatron's name) or 1 (row-parallel)."""
    most_parts: int
    """The matrix is cut into at most this many parts; more ranks hold copies."""

    def local_shape(self, tp: int) -> tuple[int, int]:
        """(out, in) on one of ``tp`` ranks."""
        parts = min(tp, self.most_parts)
        rows, columns = self.shape
        return (rows // parts, columns) if self.cut == 0 else (rows, columns // parts)


def matrices(model: ModelConfig) -> dict[str, Matrix]:
    """The seven matrices by LoRA's name for them, in the order of Hugging Face's files."""
    hidden, ffn, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    queries, keys = heads * head_dim(model), kv_heads(model) * head_dim(model)
    table = (
        Matrix("self_attn.q_proj", (queries, hidden), 0, heads),
        Matrix("self_attn.k_proj", (keys, hidden), 0, kv_heads(model)),
        Matrix("self_attn.v_proj", (keys, hidden), 0, kv_heads(model)),
        Matrix("self_attn.o_proj", (hidden, queries), 1, heads),
        Matrix("mlp.gate_proj", (ffn, hidden), 0, ffn),
        Matrix("mlp.up_proj", (ffn, hidden), 0, ffn),
        Matrix("mlp.down_proj", (hidden, ffn), 1, ffn),
    )
    return {matrix.name.partition(".")[2]: matrix for matrix in table}


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The four parameters of a block that hold its matrices, and Hugging Face's modules in each, by rows."""
ROW_PARALLEL = ("o_proj", "down_proj")
"""Fused matrices that tensor parallelism cuts by columns; the others are cut by rows (column-parallel)."""
REPLICATED_UNDER_SP = ("norm", "qkv_proj.lora_A", "gate_up_proj.lora_A", "o_proj.lora_B", "down_proj.lora_B")
"""Endings of the parameters, without ``.weight``, that every tensor-parallel rank holds whole and, under sequence
parallelism, applies to a part of the sequence."""
KV_HEADS = ("qkv_proj", "qkv_proj.lora_B")
"""Parameters, without ``.weight``, whose rows of keys and values tensor-parallel ranks share if kv heads are few."""


def fused_matrix(module: str) -> str:
    """The fused matrix that holds one of Hugging Face's modules: ``k_proj`` is in ``qkv_proj``."""
    return next(matrix for matrix, modules in FUSED.items() if module in modules)


def fused_rows(model: ModelConfig, matrix: str, tp: int = 1) -> dict[str, int]:
    """Rows on one of ``tp`` ranks of each of Hugging Face's modules in a fused matrix, from the first row on."""
    return {module: matrices(model)[module].local_shape(tp)[0] for module in FUSED[matrix]}


def fused_shape(model: ModelConfig, matrix: str, tp: int = 1) -> tuple[int, int]:
    """(out, in) of a fused matrix on one of ``tp`` ranks."""
    return sum(fused_rows(model, matrix, tp).values()), matrices(model)[FUSED[matrix][0]].local_shape(tp)[1]


LEAST_LOSS_CHUNK, MOST_LOSS_CHUNK = 512, 2048
"""Bounds of ``loss_chunk``. With fewer tokens, reading the head's weight and its gradient takes longer than the
products; with more, nothing gets faster."""


def loss_chunk(hidden_size: int) -> int:
    """Tokens whose logits are there at once. With ``hidden_size`` of them they are as large as the gradient of the
    head's weight, which is there in any case."""
    return min(max(hidden_size, LEAST_LOSS_CHUNK), MOST_LOSS_CHUNK)


def kv_heads(model: ModelConfig) -> int:
    """Key and value heads, derived where not given."""
    return model.num_attention_heads if model.num_key_value_heads is None else model.num_key_value_heads


def head_dim(model: ModelConfig) -> int:
    """Width of a head, derived where not given."""
    return model.hidden_size // model.num_attention_heads if model.head_dim is None else model.head_dim


def kv_heads_per_rank(model: ModelConfig, tp: int) -> int:
    """Key and value heads on one tensor-parallel rank: where there are fewer heads than ranks, neighbours hold the
    same one."""
    return max(1, kv_heads(model) // tp)


def kv_copies(model: ModelConfig, tp: int) -> int:
    """Neighbouring tensor-parallel ranks that hold the same kv head; 1 where there are enough heads for all."""
    return max(1, tp // kv_heads(model))


def can_cut(model: ModelConfig, tp: int) -> bool:
    """Whether ``tp`` ranks can share every matrix equally: whole heads, or whole groups of ranks for a kv head."""
    kv = kv_heads(model)
    return model.num_attention_heads % tp == 0 and model.intermediate_size % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The next multiple of ``tp``: each rank holds the same number of rows."""
    return -(-vocab_size // tp) * tp


@dataclass(frozen=True)
class StageParameters:
    """Parameters that one rank of a pipeline stage holds; padding, copies and LoRA's included."""

    held: int
    trained: int
    """Those that get gradients."""
    quantizable: int
    """Elements of the blocks' seven matrices, which LoRA may keep in 8 or 4 bits."""
    in_blocks: int = 0
    """Trained ones whose optimizer states can be in 8 bits."""
    summed: int = 0
    """Without LoRA, those whose gradients tensor- or pipeline-parallel ranks sum (parallel/tensor.py)."""


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, as published: no padding, no copies, a tied head counted once."""
    return whole_model(model, FinetuneConfig()).held


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


def whole_model(model: ModelConfig, finetune: FinetuneConfig) -> StageParameters:
    """The whole model with LoRA's parameters, without padding and copies."""
    return stage_parameters(model, finetune, model.num_hidden_layers, 1, first=True, last=True)


def stage_parameters(
    model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int, *, first: bool, last: bool, sp: bool = False
) -> StageParameters:
    """What one rank of a pipeline stage with ``layers`` blocks holds; ``sp`` with sequence parallelism."""
    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    # A tied head on the first stage is the table itself; on a later stage it is a copy that is kept equal.
    tables = first + (last and not (model.tie_word_embeddings and first))
    held = layers * parameters_per_layer(model, tp) + last * model.hidden_size + tables * table
    quantizable = layers * matrices_per_layer(model, tp)
    in_blocks = layers * sum(cut[0] * cut[1] for whole, cut in _trained(model, finetune, tp) if has_8bit_states(whole))
    table_in_blocks = table * has_8bit_states((model.vocab_size, model.hidden_size))
    if finetune.method != "lora":
        summed = sp * (2 * layers + last) * model.hidden_size + (model.tie_word_embeddings and first != last) * table
        if kv_copies(model, tp) > 1:
            summed += layers * math.prod(fused_shape(model, "qkv_proj", tp))
        return StageParameters(held, held, quantizable, in_blocks + tables * table_in_blocks, summed)

    def saved(module: str) -> bool:
        return module.endswith(tuple(finetune.modules_to_save))

    added = lora_parameters(model, finetune, layers, tp)
    norms = layers * (saved("input_layernorm") + saved("post_attention_layernorm")) + (last and saved("norm"))
    tables = (first and saved("embed_tokens")) + (last and saved("lm_head"))
    trained = added + norms * model.hidden_size + tables * table
    return StageParameters(held + added, trained, quantizable, in_blocks + tables * table_in_blocks)


def _trained(model: ModelConfig, finetune: FinetuneConfig, tp: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The shapes of a block's trained matrices: as one parameter whole, and on one of ``tp`` ranks."""
    lora, rank = finetune.method == "lora", finetune.lora_rank
    for names in FUSED.values():
        parts = [matrices(model)[name] for name in names if not lora or name in finetune.lora_target_modules]
        if not parts:
            continue
        below = [
            (sum(rows for rows, _ in shapes), shapes[0][1])
            for shapes in ([part.shape for part in parts], [part.local_shape(tp) for part in parts])
        ]
        if lora:  # A has ``rank`` rows for each matrix, B the matrices' rows
            yield tuple((rank * len(parts), columns) for _, columns in below)
            yield tuple((rows, rank) for rows, _ in below)
        else:
            yield tuple(below)
