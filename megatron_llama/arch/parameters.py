"""Shapes of a Llama's tensors, their tensor-parallel sharding, and parameter counts, without torch.

Memory, FLOPs, traffic, LoRA and checkpoint names are derived from this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_llama.arch.lora_targets import Adapter, LayerAdapters, layer_adapters, layer_kinds
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


def matrices(model: ModelConfig) -> Mapping[str, Matrix]:
    """Return the seven matrices by LoRA's names, in the order of Hugging Face's files."""
    heads, keys = model.num_attention_heads, kv_heads(model)
    return _matrices(model.hidden_size, model.intermediate_size, heads, keys, head_dim(model))


@lru_cache  # the planner and the tuner ask hundreds of thousands of times
def _matrices(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> Mapping[str, Matrix]:
    queries, keys = heads * head_dim, kv_heads * head_dim
    table = (
        Matrix("self_attn.q_proj", (queries, hidden), 0, heads),
        Matrix("self_attn.k_proj", (keys, hidden), 0, kv_heads),
        Matrix("self_attn.v_proj", (keys, hidden), 0, kv_heads),
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
QK_NORMS = ("q_norm", "k_norm")
"""Endings of parameter names, without ``.weight``, of the norms of q and k."""
REPLICATED_UNDER_SP = (
    *("norm", "o_proj.bias", "down_proj.bias"),
    *("qkv_proj.lora_A", "gate_up_proj.lora_A", "o_proj.lora_B", "down_proj.lora_B"),
    *("o_proj.lora_magnitude_vector", "down_proj.lora_magnitude_vector"),
)
"""Endings of parameter names, without ``.weight``, that are replicated over tp. With sequence parallelism each rank
applies them to a part of the sequence, so their gradients must be summed over tp."""
KV_HEADS = ("qkv_proj", "qkv_proj.bias", "qkv_proj.lora_B", "qkv_proj.lora_magnitude_vector", "k_norm")
"""Parameters, without ``.weight``, whose key and value rows are replicated with fewer kv heads than tp ranks."""
KV_MODULES = ("k_proj", "v_proj", "k_norm")
"""Hugging Face's modules of these rows."""


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


def has_bias(model: ModelConfig, matrix: str) -> bool:
    """Return whether the modules of a fused matrix have biases."""
    if matrix in ("gate_up_proj", "down_proj"):
        return model.mlp_bias
    return model.attention_bias or (model.model_type == "qwen2" and matrix == "qkv_proj")


def qk_norm(model: ModelConfig) -> str | None:
    """Return the RMSNorm of q and k before the rotation: of each ``head``, of the whole ``projection``, or None.

    All heads share the weight of a ``head`` norm. Each tp rank applies it to its heads, so its gradients are summed
    over tp. The weight of a ``projection`` norm is sharded like the rows of q_proj and k_proj.
    """
    return {"qwen3": "head", "olmo2": "projection"}.get(model.model_type)


def qk_norm_shapes(model: ModelConfig, tp: int = 1) -> dict[str, int]:
    """Return the elements of q_norm and k_norm on one of ``tp`` ranks; empty without them."""
    if qk_norm(model) == "head":
        return dict.fromkeys(QK_NORMS, head_dim(model))
    rows = fused_rows(model, "qkv_proj", tp)
    return {"q_norm": rows["q_proj"], "k_norm": rows["k_proj"]} if qk_norm(model) else {}


def norms_branches(model: ModelConfig) -> bool:
    """Return whether a block's norms follow attention and feed-forward; otherwise they precede them."""
    return model.model_type == "olmo2"


def block_norms(model: ModelConfig) -> tuple[str, str]:
    """Return the names of a block's norms, of attention and of the feed-forward."""
    if norms_branches(model):
        return "post_attention_layernorm", "post_feedforward_layernorm"
    return "input_layernorm", "post_attention_layernorm"


def is_summed_over_tp(parameter: str, model: ModelConfig, *, tp: int, sp: bool) -> bool:
    """Return whether the gradients of a parameter, without ``.weight``, are summed over tp after the backward pass."""
    if parameter.endswith(QK_NORMS):
        return tp > 1 and qk_norm(model) == "head"
    return sp and parameter.endswith(REPLICATED_UNDER_SP)


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
    """Without LoRA, parameters whose gradients are summed over tp or pp ranks (parallel/replicated_gradients.py)."""


def parameters(model: ModelConfig) -> int:
    """Return the parameters of the whole model, as published: no padding, no copies, a tied head counted once."""
    return whole_model(model, FinetuneConfig()).held


def parameters_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Return the parameters of one block on one tensor-parallel rank: the matrices, biases and norms."""
    norms = 2 * model.hidden_size + sum(qk_norm_shapes(model, tp).values())
    return matrices_per_layer(model, tp) + norms + sum(bias_rows(model, tp).values())


def bias_rows(model: ModelConfig, tp: int = 1) -> dict[str, int]:
    """Return the elements of one block's biases on one tensor-parallel rank, by fused matrix."""
    return {
        matrix: fused_shape(model, matrix, 1 if matrix in ROW_PARALLEL else tp)[0]
        for matrix in FUSED
        if has_bias(model, matrix)
    }


def matrices_per_layer(model: ModelConfig, tp: int = 1) -> int:
    """Return the elements of one block's seven matrices on one tensor-parallel rank."""
    return sum(math.prod(matrix.local_shape(tp)) for matrix in matrices(model).values())


@dataclass(frozen=True)
class StackedAdapters:
    """The adapters of a fused matrix on one tensor-parallel rank, stacked by rows: A [ranks, in], B [out, width]."""

    modules: Mapping[str, Adapter]
    """Adapters by Hugging Face module, in order."""
    rows: tuple[int, ...]
    """Rows of each module in B."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rows of each module in A, columns in B."""
        return tuple(adapter.rank for adapter in self.modules.values())

    @property
    def width(self) -> int:
        """Columns of B: the largest rank. Columns above a module's rank are padding, always 0."""
        return max(self.ranks)


def stacked_adapters(model: ModelConfig, adapters: LayerAdapters, matrix: str, tp: int = 1) -> StackedAdapters | None:
    """Return the adapters of a fused matrix; None without any."""
    rows = {module: count for module, count in fused_rows(model, matrix, tp).items() if module in adapters}
    return StackedAdapters({module: adapters[module] for module in rows}, tuple(rows.values())) if rows else None


def lora_parameters(
    model: ModelConfig, finetune: FinetuneConfig, layers: Iterable[int], tp: int = 1, *, padded: bool = True
) -> int:
    """Return LoRA's parameters in some layers on one tensor-parallel rank, without ``padded`` without B's padding.

    A [rank, in] and B [out, rank] of each target, and DoRA's magnitudes [out], are sharded like its matrix.
    """
    total = 0
    for adapters, those in layer_kinds(model, finetune, layers):
        for matrix in FUSED:
            if (stack := stacked_adapters(model, adapters, matrix, tp)) is None:
                continue
            widths = (stack.width,) * len(stack.ranks) if padded else stack.ranks
            b = sum(rows * (width + finetune.use_dora) for rows, width in zip(stack.rows, widths, strict=True))
            total += len(those) * (sum(stack.ranks) * fused_shape(model, matrix, tp)[1] + b)
    return total


def saves_module(module: str, model: ModelConfig, finetune: FinetuneConfig) -> bool:
    """Return whether a module is in modules_to_save, by the ending, as in PEFT. A tied output head is the embedding."""
    module = "embed_tokens" if module == "lm_head" and model.tie_word_embeddings else module
    return module.endswith(tuple(finetune.modules_to_save))


def whole_model(model: ModelConfig, finetune: FinetuneConfig) -> StageParameters:
    """Return the parameters of the whole model, including LoRA, without padding and copies."""
    return stage_parameters(model, finetune, range(model.num_hidden_layers), 1, first=True, last=True, padded=False)


def stage_parameters(
    model: ModelConfig,
    finetune: FinetuneConfig,
    numbers: Sequence[int],
    tp: int,
    *,
    first: bool,
    last: bool,
    sp: bool = False,
    padded: bool = True,
) -> StageParameters:
    """Return the parameters of one rank of a pipeline stage.

    Args:
        numbers: Numbers of the stage's layers.
        sp: Whether it uses sequence parallelism.
        padded: Whether B's padding counts, with different ranks.
    """
    layers = len(numbers)
    table = padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size
    # A tied head on the first stage is the embedding; on a later stage it is a synchronized copy.
    tables = first + (last and not (model.tie_word_embeddings and first))
    held = layers * parameters_per_layer(model, tp) + last * model.hidden_size + tables * table
    quantizable = layers * matrices_per_layer(model, tp)
    in_blocks = sum(
        len(those) * cut[0] * cut[1]
        for adapters, those in layer_kinds(model, finetune, numbers)
        for whole, cut in _trained(model, finetune, adapters, tp)
        if has_8bit_states(whole)
    )
    table_in_blocks = table * has_8bit_states((model.vocab_size, model.hidden_size))
    if finetune.method != "lora":
        summed = sp * last * model.hidden_size + (model.tie_word_embeddings and first != last) * table
        summed += layers * _summed_per_layer(model, tp, sp)
        return StageParameters(held, held, quantizable, in_blocks + tables * table_in_blocks, summed)

    def saved(module: str) -> bool:
        return saves_module(module, model, finetune)

    added = lora_parameters(model, finetune, numbers, tp, padded=padded)
    token_rows = (first or (last and model.tie_word_embeddings)) * len(finetune.trainable_token_indices)
    added += token_rows * model.hidden_size
    in_blocks += token_rows * model.hidden_size * has_8bit_states((token_rows, model.hidden_size))
    norms = layers * sum(map(saved, block_norms(model))) + (last and saved("norm"))
    tables = (first and saved("embed_tokens")) + (last and tables > first and saved("lm_head"))
    trained = added + norms * model.hidden_size + tables * table
    trained += layers * sum(size for name, size in qk_norm_shapes(model, tp).items() if saved(name))
    biases = bias_rows(model, tp).items()
    trained += sum(rows for layer in numbers for matrix, rows in biases if trains_bias(model, finetune, layer, matrix))
    return StageParameters(held + added, trained, quantizable, in_blocks + tables * table_in_blocks)


def trains_bias(model: ModelConfig, finetune: FinetuneConfig, layer: int, matrix: str) -> bool:
    """Return whether LoRA's ``bias`` trains the biases of a fused matrix, or of one of its modules."""
    adapters = layer_adapters(model, finetune, layer)
    return finetune.bias == "all" or (
        finetune.bias == "lora_only" and any(module in adapters for module in FUSED.get(matrix, (matrix,)))
    )


def _summed_per_layer(model: ModelConfig, tp: int, sp: bool) -> int:
    """Return the elements of one block whose gradients are summed over all tp ranks or over the ranks of a kv head."""
    biases = bias_rows(model, tp)
    sizes = dict.fromkeys(block_norms(model), model.hidden_size) | qk_norm_shapes(model, tp)
    sizes |= {f"{matrix}.bias": rows for matrix, rows in biases.items()}
    summed = sum(size for name, size in sizes.items() if is_summed_over_tp(name, model, tp=tp, sp=sp))
    if kv_copies(model, tp) > 1:
        summed += math.prod(fused_shape(model, "qkv_proj", tp)) + biases.get("qkv_proj", 0)
        summed += sizes["k_norm"] if qk_norm(model) == "projection" else 0
    return summed


def _trained(
    model: ModelConfig, finetune: FinetuneConfig, adapters: LayerAdapters, tp: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield (unsharded shape, shape on one of ``tp`` ranks) of the trained matrices of a block with ``adapters``."""
    for matrix in FUSED:
        if finetune.method != "lora":
            yield tuple(fused_shape(model, matrix, size) for size in (1, tp))
            continue
        stacks = [stacked_adapters(model, adapters, matrix, size) for size in (1, tp)]
        if stacks[0] is not None:
            yield tuple((sum(stacks[0].ranks), fused_shape(model, matrix, size)[1]) for size in (1, tp))
            width = math.gcd(*stacks[0].ranks)  # as hf_tp_mapping.whole_shape
            yield tuple((sum(stack.rows), width) for stack in stacks if stack is not None)
