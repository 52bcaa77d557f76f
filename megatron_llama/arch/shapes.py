"""Shapes of a Llama's tensors, their tensor-parallel sharding, and parameter counts, without torch.

Memory, FLOPs, traffic, LoRA and checkpoint names are derived from this table.
"""


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
    """Sharded dimension: 0 (column-parallel, by Megatron's name) or 1 (row-parallel)."""
    most_parts: int
    """Maximum number of shards; more ranks hold copies."""

    def local_shape(self, tp: int) -> tuple[int, int]:
        """Return (out, in) on one of ``tp`` ranks."""
        parts = min(tp, self.most_parts)
        rows, columns = self.shape
        return (rows // parts, columns) if self.cut == 0 else (rows, columns // parts)


def matrices(model: ModelConfig) -> dict[str, Matrix]:
    """Return the seven matrices by LoRA's names, in the order of Hugging Face's files."""
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
"""Fused matrices of a block, and the Hugging Face modules whose rows they contain, in order."""
ROW_PARALLEL = ("o_proj", "down_proj")
"""Fused matrices that tp shards along dim 1 (row-parallel); the others are sharded along dim 0 (column-parallel)."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Endings of parameter names, without ``.weight``, whose weight all heads share. Each tp rank applies them to its
heads, so their gradients must be summed over tp, with and without sequence parallelism."""
REPLICATED_UNDER_SP = (
    "norm", "qkv_proj.lora_A", "gate_up_proj.lora_A", "o_proj.lora_B", "down_proj.lora_B",
    "o_proj.lora_magnitude_vector", "down_proj.lora_magnitude_vector",
)
"""Endings of parameter names, without ``.weight``, that are replicated over tp. With sequence parallelism each rank
applies them to a part of the sequence, so their gradients must be summed over tp."""
KV_HEADS = ("qkv_proj", "qkv_proj.bias", "qkv_proj.lora_B", "qkv_proj.lora_magnitude_vector")
"""Parameters, without ``.weight``, whose key and value rows are replicated with fewer kv heads than tp ranks."""


def fused_matrix(module: str) -> str:
    """Return the fused matrix that contains a Hugging Face module: ``k_proj`` is in ``qkv_proj``."""
    return next(matrix for matrix, modules in FUSED.items() if module in modules)


def fused_rows(model: ModelConfig, matrix: str, tp: int = 1) -> dict[str, int]:
    """Return the rows of each Hugging Face module in a fused matrix on one of ``tp`` ranks, in order."""
    return {module: matrices(model)[module].local_shape(tp)[0] for module in FUSED[matrix]}


def fused_shape(model: ModelConfig, matrix: str, tp: int = 1) -> tuple[int, int]:
    """Return (out, in) of a fused matrix on one of ``tp`` ranks."""
    return sum(fused_rows(model, matrix, tp).values()), matrices(model)[FUSED[matrix][0]].local_shape(tp)[1]


LEAST_LOSS_CHUNK, MOST_LOSS_CHUNK = 512, 2048
"""Bounds of ``loss_chunk``, tokens. Below, reading the head's weight and gradient takes longer than the matmuls; above,
there is no further speedup."""


def loss_chunk(hidden_size: int) -> int:
    """Return the number of tokens whose logits are computed together.

    With ``hidden_size`` tokens, the logits are as large as the gradient of the head's weight, which exists anyway.
    """
    return min(max(hidden_size, LEAST_LOSS_CHUNK), MOST_LOSS_CHUNK)


def kv_heads(model: ModelConfig) -> int:
    """Return the number of key and value heads, derived if not set."""
    return model.num_attention_heads if model.num_key_value_heads is None else model.num_key_value_heads


def head_dim(model: ModelConfig) -> int:
    """Return the head dimension, derived if not set."""
    return model.hidden_size // model.num_attention_heads if model.head_dim is None else model.head_dim


def has_qkv_bias(model: ModelConfig) -> bool:
    """Return whether q_proj, k_proj and v_proj have biases."""
    return model.model_type == "qwen2"


def has_qk_norm(model: ModelConfig) -> bool:
    """Return whether each head of q and k has an RMSNorm before the rotation."""
    return model.model_type == "qwen3"


def kv_heads_per_rank(model: ModelConfig, tp: int) -> int:
    """Return the key and value heads on one tensor-parallel rank; with fewer heads than ranks, neighbors share one."""
    return max(1, kv_heads(model) // tp)


def kv_copies(model: ModelConfig, tp: int) -> int:
    """Return the number of neighboring tensor-parallel ranks that hold the same kv head."""
    return max(1, tp // kv_heads(model))


def can_cut(model: ModelConfig, tp: int) -> bool:
    """Return whether ``tp`` ranks can shard every matrix equally: whole heads, or whole groups of ranks per kv head."""
    kv = kv_heads(model)
    return model.num_attention_heads % tp == 0 and model.intermediate_size % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of ``tp``."""
    return -(-vocab_size // tp) * tp


@dataclass(frozen=True)
class StageParameters:
    """Parameters that one rank of a pipeline stage holds, including padding, copies and LoRA."""

    held: int
    trained: int
    """Parameters with gradients."""
    quantizable: int
    """Elements of the blocks' seven matrices, which LoRA may quantize to 8 or 4 bits."""
    in_blocks: int = 0
    """Trained parameters whose optimizer states can be in 8 bits."""
    summed: int = 0
    """Without LoRA, parameters whose gradients are summed over tp or pp ranks (parallel/tensor.py)."""


def parameters(model: ModelConfig) -> int:
    """Return the parameters of the whole model, as published: no padding, no copies, a tied head counted once."""
    return whole_model(model, FinetuneConfig()).held


def parameters_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Return the parameters of one block on one tensor-parallel rank: the matrices, biases and norms."""
    return matrices_per_layer(model, tp) + 2 * model.hidden_size + bias_rows(model, tp) + head_norms(model)


def bias_rows(model: ModelConfig, tp: int = 1) -> int:
    """Return the elements of one block's biases on one tensor-parallel rank."""
    return has_qkv_bias(model) * fused_shape(model, "qkv_proj", tp)[0]


def head_norms(model: ModelConfig) -> int:
    """Return the elements of one block's HEAD_NORMS."""
    return has_qk_norm(model) * len(HEAD_NORMS) * head_dim(model)


def matrices_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Return the elements of one block's seven matrices on one tensor-parallel rank."""
    return sum(math.prod(matrix.local_shape(tp)) for matrix in matrices(model).values())


def lora_parameters(model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int = 1) -> int:
    """Return LoRA's parameters in ``layers`` blocks on one tensor-parallel rank.

    A [rank, in] and B [out, rank] of each target, and DoRA's magnitudes [out], are sharded like its matrix.
    """
    shapes = [matrices(model)[module].local_shape(tp) for module in finetune.lora_target_modules]
    magnitudes = finetune.use_dora * sum(rows for rows, _ in shapes)
    return layers * (finetune.lora_rank * sum(map(sum, shapes)) + magnitudes)


def whole_model(model: ModelConfig, finetune: FinetuneConfig) -> StageParameters:
    """Return the parameters of the whole model, including LoRA, without padding and copies."""
    return stage_parameters(model, finetune, model.num_hidden_layers, 1, first=True, last=True)


def stage_parameters(
    model: ModelConfig, finetune: FinetuneConfig, layers: int, tp: int, *, first: bool, last: bool, sp: bool = False
) -> StageParameters:
    """Return the parameters of one rank of a pipeline stage with ``layers`` blocks; ``sp``: sequence parallelism."""
    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    # A tied head on the first stage is the embedding; on a later stage it is a synchronized copy.
    tables = first + (last and not (model.tie_word_embeddings and first))
    held = layers * parameters_per_layer(model, tp) + last * model.hidden_size + tables * table
    quantizable = layers * matrices_per_layer(model, tp)
    in_blocks = layers * sum(cut[0] * cut[1] for whole, cut in _trained(model, finetune, tp) if has_8bit_states(whole))
    table_in_blocks = table * has_8bit_states((model.vocab_size, model.hidden_size))
    if finetune.method != "lora":
        summed = sp * (2 * layers + last) * model.hidden_size + (model.tie_word_embeddings and first != last) * table
        summed += (tp > 1) * layers * head_norms(model)
        if kv_copies(model, tp) > 1:
            summed += layers * (math.prod(fused_shape(model, "qkv_proj", tp)) + bias_rows(model, tp))
        return StageParameters(held, held, quantizable, in_blocks + tables * table_in_blocks, summed)

    def saved(module: str) -> bool:
        return module.endswith(tuple(finetune.modules_to_save))

    added = lora_parameters(model, finetune, layers, tp)
    norms = layers * (saved("input_layernorm") + saved("post_attention_layernorm")) + (last and saved("norm"))
    tables = (first and saved("embed_tokens")) + (last and saved("lm_head"))
    trained = added + norms * model.hidden_size + tables * table
    trained += layers * sum(map(saved, HEAD_NORMS)) * has_qk_norm(model) * head_dim(model)
    return StageParameters(held + added, trained, quantizable, in_blocks + tables * table_in_blocks)


def _trained(model: ModelConfig, finetune: FinetuneConfig, tp: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (unsharded shape, shape on one of ``tp`` ranks) of a block's trained matrices."""
    lora, rank = finetune.method == "lora", finetune.lora_rank
    for names in FUSED.values():
        parts = [matrices(model)[name] for name in names if not lora or name in finetune.lora_target_modules]
        if not parts:
            continue
        below = [
            (sum(rows for rows, _ in shapes), shapes[0][1])
            for shapes in ([part.shape for part in parts], [part.local_shape(tp) for part in parts])
        ]
        if lora:  # A has ``rank`` rows per matrix, B has the matrices' rows
            yield tuple((rank * len(parts), columns) for _, columns in below)
            yield tuple((rows, rank) for rows, _ in below)
        else:
            yield tuple(below)
