"""The one table between our parameters and Hugging Face's tensors.

A rank's parameter is made of rectangles of globally named tensors: ``qkv_proj`` on one tensor-parallel rank is some
rows of q_proj, then some of k_proj, then some of v_proj. Initial weights, checkpoints, import and export, and what
counts once in a norm all read this table, so nothing else needs to know how a matrix is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_llama.config import FinetuneConfig, ModelConfig
from megatron_llama.plan.shapes import kv_copies, matrices

Shape = tuple[int, ...]
# What PEFT puts before a model's own names in an adapter's file.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor, and where it lies in a rank's parameter."""

    name: str
    """Hugging Face's name of the tensor."""
    global_shape: Shape
    """That tensor's shape."""
    offset: Shape
    """Where the rectangle starts in it."""
    local_offset: Shape
    """Where the rectangle starts in the rank's parameter."""
    size: Shape
    """Extent of the rectangle."""
    replica: int = 0
    """Which copy this is among tensor- and pipeline-parallel ranks; copy 0 counts for norms and is written to
    checkpoints."""

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The rectangle in the rank's parameter."""
        return tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.size, strict=True))


@dataclass(frozen=True)
class TensorParallel:
    """The part of the layout that decides how matrices are cut."""

    rank: int
    size: int


def hf_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the Hugging Face checkpoint and its shape, in file order."""
    h = model.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab_size, h)}
    for i in range(model.num_hidden_layers):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{matrix.name}.weight": matrix.shape for matrix in matrices(model).values()}
        shapes[layer + "input_layernorm.weight"] = (h,)
        shapes[layer + "post_attention_layernorm.weight"] = (h,)
    shapes["model.norm.weight"] = (h,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, h)
    return shapes


def lora_shapes(model: ModelConfig, finetune: FinetuneConfig) -> dict[str, Shape]:
    """Every tensor that LoRA adds and its shape, under PEFT's names: A is [rank, in], B is [out, rank]."""
    shapes: dict[str, Shape] = {}
    for name, (rows, columns) in ((n, s) for n, s in hf_shapes(model).items() if len(s) == 2):
        if name.split(".")[-2] in finetune.lora_target_modules:
            shapes[lora_name(name, "lora_A")] = (finetune.lora_rank, columns)
            shapes[lora_name(name, "lora_B")] = (rows, finetune.lora_rank)
    return shapes


def lora_name(weight: str, side: str) -> str:
    """PEFT's name of what LoRA adds to the matrix of a Hugging Face name; ``side`` is lora_A or lora_B."""
    return f"{PEFT_PREFIX}{weight.removesuffix('weight')}{side}.weight"


def is_lora(name: str) -> bool:
    """Whether a tensor's or a parameter's name is that of something that LoRA added."""
    return name.removesuffix(".weight").endswith((".lora_A", ".lora_B"))


def is_saved_module(name: str, finetune: FinetuneConfig) -> bool:
    """Whether LoRA trains this weight of the model itself, whole. As PEFT matches modules_to_save: by the ending."""
    return name.removesuffix(".weight").endswith(tuple(finetune.modules_to_save))


def pieces(
    parameter: str,
    model: ModelConfig,
    tp: TensorParallel,
    padded_vocab_size: int,
    finetune: FinetuneConfig | None = None,
) -> list[Piece]:
    """The rectangles that make up one of our parameters on one tensor-parallel rank.

    ``parameter`` is a name of ``Llama.named_parameters()``; those of LoRA need ``finetune``. Rows that pad the
    vocabulary belong to no rectangle.
    """
    if is_lora(parameter):
        assert finetune is not None, "LoRA's tensors have the shape that the settings give them"
        return _lora_pieces(parameter, model, tp, padded_vocab_size, finetune)
    shapes = hf_shapes(model)
    parameter = parameter.replace(".base_layer.", ".")  # what LoRA has wrapped is still the same matrix
    stem = parameter.removesuffix(".weight")
    if stem in ("embed_tokens", "lm_head"):
        tied_copy = stem == "lm_head" and model.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied_copy or stem == "embed_tokens" else "lm_head.weight"
        rows = padded_vocab_size // tp.size
        real = max(0, min(rows, model.vocab_size - tp.rank * rows))
        size = (real, model.hidden_size)
        return [Piece(name, shapes[name], (tp.rank * rows, 0), (0, 0), size, int(tied_copy))] if real else []
    name = f"model.{parameter}"
    if stem.endswith("norm"):
        return [Piece(name, shapes[name], (0,), (0,), shapes[name], replica=tp.rank)]
    if stem.endswith("qkv_proj"):
        return _qkv_pieces(name, shapes, model, tp)
    if stem.endswith("gate_up_proj"):
        names = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        return _stack([_row_part(n, shapes[n], tp.rank, tp.size) for n in names])
    if stem.endswith(("o_proj", "down_proj")):
        rows, columns = shapes[name]
        width = columns // tp.size
        return [Piece(name, shapes[name], (0, tp.rank * width), (0, 0), (rows, width))]
    raise KeyError(f"no Hugging Face name for parameter {parameter!r}")


def keep_rows(parts: list[Piece], start: int, stop: int) -> list[Piece]:
    """What is left of the rectangles in rows [start, stop) of the parameter, with local offsets counted from
    ``start``."""
    kept = []
    for part in parts:
        first = max(start, part.local_offset[0])
        last = min(stop, part.local_offset[0] + part.size[0])
        if first < last:
            cut = first - part.local_offset[0]
            kept.append(
                replace(
                    part,
                    offset=(part.offset[0] + cut, *part.offset[1:]),
                    local_offset=(first - start, *part.local_offset[1:]),
                    size=(last - first, *part.size[1:]),
                )
            )
    return kept


def _row_part(name: str, shape: Shape, part: int, parts: int, replica: int = 0) -> Piece:
    rows = shape[0] // parts
    return Piece(name, shape, (part * rows, 0), (0, 0), (rows, shape[1]), replica)


def _stack(parts: list[Piece]) -> list[Piece]:
    """Put rectangles below one another."""
    row, stacked = 0, []
    for part in parts:
        stacked.append(replace(part, local_offset=(row, 0)))
        row += part.size[0]
    return stacked


def _qkv_pieces(name: str, shapes: dict[str, Shape], model: ModelConfig, tp: TensorParallel) -> list[Piece]:
    copies = kv_copies(model, tp.size)
    q, k, v = (name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj"))
    head, copy = tp.rank // copies, tp.rank % copies
    kv = [_row_part(n, shapes[n], head, tp.size // copies, copy) for n in (k, v)]
    return _stack([_row_part(q, shapes[q], tp.rank, tp.size), *kv])


def _lora_pieces(
    parameter: str, model: ModelConfig, tp: TensorParallel, padded_vocab_size: int, finetune: FinetuneConfig
) -> list[Piece]:
    """A shares its matrix's columns and B its rows; what tensor parallelism does not cut is whole on every rank."""
    owner, _, side = parameter.rpartition(".")
    rank, parts = finetune.lora_rank, []
    for matrix in pieces(f"{owner}.weight", model, tp, padded_vocab_size):
        if matrix.name.split(".")[-2] not in finetune.lora_target_modules:
            continue
        (rows, columns), name = matrix.global_shape, lora_name(matrix.name, side)
        if side == "lora_A":
            shape, offset, size = (rank, columns), (0, matrix.offset[1]), (rank, matrix.size[1])
        else:
            shape, offset, size = (rows, rank), (matrix.offset[0], 0), (matrix.size[0], rank)
        parts.append(Piece(name, shape, offset, (0, 0), size, tp.rank if size == shape else matrix.replica))
    return _stack(parts)
