"""Mapping between the model's parameters and Hugging Face's tensors.

A rank's parameter consists of rectangles of Hugging Face tensors: ``qkv_proj`` on one tensor-parallel rank is some rows
of q_proj, then of k_proj, then of v_proj. Initial weights, checkpoints, import, export and norms use this mapping, so
that no other code depends on how a matrix is sharded.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from megatron_llama.arch.lora_targets import layer_adapters, module_name
from megatron_llama.arch.parameters import (
    FUSED,
    KV_MODULES,
    QK_NORMS,
    ROW_PARALLEL,
    block_norms,
    has_bias,
    kv_copies,
    matrices,
    qk_norm,
    qk_norm_shapes,
    saves_module,
    trains_bias,
)
from megatron_llama.config import FinetuneConfig, ModelConfig

Shape = tuple[int, ...]
EMBEDDING = "model.embed_tokens.weight"
_BIAS = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.\w+\.(?P<module>\w+)(?:\.base_layer)?\.bias")
# PEFT's prefix of a model's names in an adapter file.
PEFT_PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
"""PEFT's name of DoRA's row norms, and the name of the parameter."""


_TRAINABLE_TOKENS = "trainable_tokens_delta"
TOKEN_ROWS = f"{PEFT_PREFIX}model.embed_tokens.token_adapter.{_TRAINABLE_TOKENS}"
"""PEFT's name of trainable_token_indices' rows."""


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a Hugging Face tensor, and its position in a rank's parameter."""

    name: str
    """Hugging Face's name of the tensor."""
    global_shape: Shape
    """Shape of the whole tensor."""
    offset: Shape
    """Start of the rectangle in the tensor."""
    local_offset: Shape
    """Start of the rectangle in the rank's parameter."""
    size: Shape
    """Extent of the rectangle."""
    replica: int = 0
    """Number of this copy on tensor- and pipeline-parallel ranks; norms and checkpoints count copy 0 only."""

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Slices of the rectangle in the rank's parameter."""
        return tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.size, strict=True))

    def in_blocks(self, block: int) -> Rectangle:
        """Return the rectangle of the matrix of block scales, with one value per ``block`` values of a row."""
        shapes = self.global_shape, self.offset, self.local_offset, self.size
        whole, offset, local_offset, size = ((rows, columns // block) for rows, columns in shapes)
        return Rectangle(self.name, whole, offset, local_offset, size, self.replica)


@dataclass(frozen=True)
class TensorParallel:
    """Tensor-parallel rank and size, which decide how matrices are sharded."""

    rank: int
    size: int


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all tensors of the Hugging Face checkpoint, in file order."""
    h = model.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (model.vocab_size, h)}
    for i in range(model.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{matrix.name}.weight": matrix.shape for matrix in matrices(model).values()}
        for fused, modules in FUSED.items():
            if has_bias(model, fused):
                biased = (matrices(model)[module] for module in modules)
                shapes |= {f"{layer}{matrix.name}.bias": matrix.shape[:1] for matrix in biased}
        shapes |= {f"{layer}self_attn.{norm}.weight": (size,) for norm, size in qk_norm_shapes(model).items()}
        shapes |= {f"{layer}{norm}.weight": (h,) for norm in block_norms(model)}
    shapes["model.norm.weight"] = (h,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, h)
    return shapes


def lora_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """Return the shapes of LoRA's tensors under PEFT's names: A is [rank, in], B [out, rank], a magnitude [out]."""
    shapes: dict[str, Shape] = {}
    for layer in range(model.num_hidden_layers):
        for module, adapter in layer_adapters(model, finetune, layer).items():
            (rows, columns), name = matrices(model)[module].shape, f"{module_name(layer, module)}.weight"
            shapes[lora_name(name, "lora_A")] = (adapter.rank, columns)
            shapes[lora_name(name, "lora_B")] = (rows, adapter.rank)
            if finetune.use_dora:
                shapes[lora_name(name, MAGNITUDE)] = (rows,)
    if finetune.trainable_token_indices:
        shapes[TOKEN_ROWS] = (len(finetune.trainable_token_indices), model.hidden_size)
    return shapes


def lora_name(weight: str, side: str) -> str:
    """Return PEFT's name of lora_A, lora_B or MAGNITUDE (``side``) of the matrix with this Hugging Face name."""
    return f"{PEFT_PREFIX}{weight.removesuffix('weight')}{side}{'' if side == MAGNITUDE else '.weight'}"


def is_lora(name: str) -> bool:
    """Return whether a tensor or parameter of this name belongs to LoRA."""
    return name.removesuffix(".weight").endswith((".lora_A", ".lora_B", f".{MAGNITUDE}", f".{_TRAINABLE_TOKENS}"))


def is_block_matrix(parameter: str) -> bool:
    """Return whether a parameter is one of a block's fused matrices, without LoRA's."""
    stem, _, kind = parameter.rpartition(".")
    return kind == "weight" and stem.rpartition(".")[2] in FUSED


def is_saved_module(name: str, model: ModelConfig, finetune: FinetuneConfig) -> bool:
    """Return whether LoRA trains a weight or bias in full: modules_to_save, by the ending as in PEFT, and ``bias``."""
    if (bias := _BIAS.fullmatch(name)) is not None:
        return trains_bias(model, finetune, int(bias["layer"]), bias["module"])
    return saves_module(name.removesuffix(".weight"), model, finetune)


def peft_name(name: str, model: ModelConfig, finetune: FinetuneConfig) -> str:
    """Return PEFT's name of a trained tensor. The bias of an adapted matrix belongs to PEFT's ``base_layer``."""
    if is_lora(name):
        return name
    bias = _BIAS.fullmatch(name)
    if bias is not None and bias["module"] in layer_adapters(model, finetune, int(bias["layer"])):
        name = name.replace(".bias", ".base_layer.bias")
    return PEFT_PREFIX + name


def rectangles(
    parameter: str,
    model: ModelConfig,
    tp: TensorParallel,
    padded_vocab_size: int,
    finetune: FinetuneConfig | None = None,
) -> list[Rectangle]:
    """Return the rectangles of a parameter on one tensor-parallel rank.

    Args:
        parameter: Name from ``Llama.named_parameters()``; LoRA's need ``finetune``.

    Returns:
        The rectangles. Rows that pad the vocabulary are in none.

    Raises:
        KeyError: Unknown name.
    """
    if is_lora(parameter):
        assert finetune is not None, "LoRA's shapes depend on the settings"
        return _lora_pieces(parameter, model, tp, padded_vocab_size, finetune)
    shapes = hf_shapes(model)
    parameter = parameter.replace(".base_layer.", ".")  # a matrix that LoraLinear wraps
    stem = parameter.removesuffix(".weight").removesuffix(".bias")
    if stem in ("embed_tokens", "lm_head"):
        tied_copy = stem == "lm_head" and model.tie_word_embeddings
        name = EMBEDDING if tied_copy or stem == "embed_tokens" else "lm_head.weight"
        rows = padded_vocab_size // tp.size
        real = max(0, min(rows, model.vocab_size - tp.rank * rows))
        size = (real, model.hidden_size)
        return [Rectangle(name, shapes[name], (tp.rank * rows, 0), (0, 0), size, int(tied_copy))] if real else []
    name = f"model.{parameter}"
    matrix = stem.rpartition(".")[2]
    if matrix in QK_NORMS and qk_norm(model) == "projection":
        return [_rows_of_rank(name, matrix, shapes[name], model, tp)]
    if matrix.endswith("norm") or (matrix in ROW_PARALLEL and parameter.endswith(".bias")):
        return [Rectangle(name, shapes[name], (0,), (0,), shapes[name], replica=tp.rank)]
    if matrix in ROW_PARALLEL:
        rows, columns = shapes[name]
        width = columns // tp.size
        return [Rectangle(name, shapes[name], (0, tp.rank * width), (0, 0), (rows, width))]
    if matrix in FUSED:
        modules = {module: name.replace(matrix, module) for module in FUSED[matrix]}
        return _stack([_rows_of_rank(each, module, shapes[each], model, tp) for module, each in modules.items()])
    raise KeyError(f"no Hugging Face name for parameter {parameter!r}")


def whole_shape(parameter: str, model: ModelConfig, finetune: FinetuneConfig | None = None) -> Shape:
    """Return the unsharded shape of a parameter, without padding.

    In a fused LoRA B, q, k and v may have different ranks. Its number of columns is then the largest that divides all
    ranks, so that no block of 8-bit states crosses two of them.
    """
    parts = rectangles(parameter, model, TensorParallel(0, 1), model.vocab_size, finetune)
    columns = math.gcd(*(part.size[1] for part in parts)) if len(parts[0].size) == 2 else None
    return (sum(part.size[0] for part in parts), *(() if columns is None else (columns,)))


def keep_rows(parts: list[Rectangle], start: int, stop: int) -> list[Rectangle]:
    """Return the parts of the rectangles in rows [start, stop) of the parameter, with local offsets from ``start``."""
    selected = []
    for part in parts:
        first = max(start, part.local_offset[0])
        last = min(stop, part.local_offset[0] + part.size[0])
        if first < last:
            offset = (part.offset[0] + first - part.local_offset[0], *part.offset[1:])
            local_offset, size = (first - start, *part.local_offset[1:]), (last - first, *part.size[1:])
            selected.append(replace(part, offset=offset, local_offset=local_offset, size=size))
    return selected


def rows_of_shard(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return [first, last) of the rows of ``rank``, split as by torch.chunk, which ``fully_shard`` uses."""
    per_rank = -(-rows // size)
    return min(rows, rank * per_rank), min(rows, (rank + 1) * per_rank)


def _rows_of_rank(name: str, module: str, shape: Shape, model: ModelConfig, tp: TensorParallel) -> Rectangle:
    """Return a rank's rows of a tensor that tp shards by rows; ranks that share a kv head hold copies."""
    copies = kv_copies(model, tp.size) if module in KV_MODULES else 1
    part, replica = divmod(tp.rank, copies)
    rows, others = shape[0] * copies // tp.size, (0,) * (len(shape) - 1)  # a vector has no columns
    return Rectangle(name, shape, (part * rows, *others), (0, *others), (rows, *shape[1:]), replica)


def _stack(parts: list[Rectangle]) -> list[Rectangle]:
    """Place rectangles below one another in the parameter."""
    row, stacked = 0, []
    for part in parts:
        stacked.append(replace(part, local_offset=(row, *part.local_offset[1:])))
        row += part.size[0]
    return stacked


def _lora_pieces(
    parameter: str, model: ModelConfig, tp: TensorParallel, padded_vocab_size: int, finetune: FinetuneConfig
) -> list[Rectangle]:
    """Return the rectangles of LoRA's A, sharded like its matrix's columns, or of B and magnitudes, like its rows.

    Unsharded ones are replicated.
    """
    owner, _, side = parameter.rpartition(".")
    if side == _TRAINABLE_TOKENS:
        shape = lora_shapes(model, finetune)[TOKEN_ROWS]
        replica = tp.rank + tp.size * (owner == "head_rows")
        return [Rectangle(TOKEN_ROWS, shape, (0, 0), (0, 0), shape, replica)]
    parts = []
    for matrix in rectangles(f"{owner}.weight", model, tp, padded_vocab_size):
        *_, layer, _, module, _ = matrix.name.split(".")
        adapter = layer_adapters(model, finetune, int(layer)).get(module)
        if adapter is None:
            continue
        (rows, columns), name, rank = matrix.global_shape, lora_name(matrix.name, side), adapter.rank
        offset: Shape
        size: Shape
        if side == MAGNITUDE:
            shape, offset, size = (rows,), matrix.offset[:1], matrix.size[:1]
        elif side == "lora_A":
            shape, offset, size = (rank, columns), (0, matrix.offset[1]), (rank, matrix.size[1])
        else:
            shape, offset, size = (rows, rank), (matrix.offset[0], 0), (matrix.size[0], rank)
        replica = tp.rank if size == shape else matrix.replica
        parts.append(Rectangle(name, shape, offset, (0,) * len(shape), size, replica))
    return _stack(parts)
