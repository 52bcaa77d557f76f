"""Mapping between Hugging Face's tensors and the tensors of other programs' checkpoints.

A Hugging Face tensor consists of runs: rectangles of another program's tensor.

* megatron-core interleaves q, k and v by kv head in ``linear_qkv``, and stacks gate and up in ``linear_fc1``.
  All layers are one tensor with a leading dimension.
* torchtitan rotates neighboring elements of a head, so the rows of q and k are permuted.

Import and export use this mapping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megatron_llama.arch.hf_tp_mapping import Shape, hf_shapes
from megatron_llama.arch.parameters import FUSED, head_dim, kv_heads
from megatron_llama.config import ConfigError, ModelConfig, Problem


@dataclass(frozen=True)
class TensorPart:
    """A rectangle of a Hugging Face tensor, and its place in another program's tensor."""

    key: str
    """Name of the other tensor."""
    offset: Shape
    """Start in Hugging Face's tensor."""
    size: Shape
    lead: Shape
    """Index in the leading dimensions that only the other tensor has: the layer."""
    start: Shape
    """Start in the other tensor, without leading dimensions."""
    step: int = 1
    """Distance of neighboring rows in the other tensor."""


@dataclass(frozen=True)
class Names:
    """Runs of each Hugging Face tensor, and the shapes of the other program's tensors."""

    runs: Mapping[str, list[TensorPart]]
    shapes: Mapping[str, Shape]
    """Expected shapes; the vocabulary may be padded."""


VOCAB_ENDS = (
    *("word_embeddings.weight", "output_layer.weight", "tok_embeddings.weight", "output.weight"),
    *("transformer.wte.weight", "lm_head.weight"),
)
"""Endings of tensors whose rows other programs pad."""
HEADS = ("output_layer.weight", "output.weight", "lm_head.weight")
"""Endings of output heads."""
_MEGATRON = {
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
}


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Return {weight of a layer: its names} of ``ours=theirs`` and ``ours=first|second``."""
    pairs = (pair.split("=") for pair in text.split())
    return {f"{ours}.weight": tuple(f"{name}.weight" for name in theirs.split("|")) for ours, theirs in pairs}


_TORCHTITAN = _table(
    "self_attn.q_proj=attention.wq|attention.qkv_linear.wq self_attn.k_proj=attention.wk|attention.qkv_linear.wk "
    "self_attn.v_proj=attention.wv|attention.qkv_linear.wv self_attn.o_proj=attention.wo mlp.gate_proj=feed_forward.w1 "
    "mlp.down_proj=feed_forward.w2 mlp.up_proj=feed_forward.w3 input_layernorm=attention_norm "
    "post_attention_layernorm=ffn_norm"
)
_LITGPT = _table(
    "self_attn.o_proj=attn.proj self_attn.q_norm=attn.norm_q self_attn.k_norm=attn.norm_k mlp.gate_proj=mlp.fc_1 "
    "mlp.up_proj=mlp.fc_2 mlp.down_proj=mlp.proj input_layernorm=norm_1 post_attention_layernorm=norm_2"
)
_TOP = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
_TORCHTITAN_TOP = dict(zip(_TOP, ("tok_embeddings.weight", "norm.weight", "output.weight"), strict=True))
_LITGPT_TOP = dict(zip(_TOP, ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"), strict=True))
_CORE_TOP = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
MEGATRON_TOP = dict(zip(_TOP, _CORE_TOP, strict=True))


def megatron_names(model: ModelConfig, keys: Collection[str] = (), prefix: str = "", *, stacked: bool = True) -> Names:
    """Return megatron-core's names of ``model``.

    Args:
        keys: Names in a checkpoint, which decide between two names of a norm. Empty: the current ones.
        prefix: Start of each name.
        stacked: Whether the layers of a weight are one tensor, or have a number in their names.
    """
    runs, shapes = dict[str, list[TensorPart]](), dict[str, Shape]()
    for name, shape in hf_shapes(model).items():
        layer, inner = _split_layer(name)
        if layer is None:
            key, rows = prefix + MEGATRON_TOP[name], shape[0]
            runs[name] = [whole_run(key, shape)]
        else:
            base = f"{prefix}decoder.layers." if stacked else f"{prefix}decoder.layers.{layer}."
            lead = (layer,) if stacked else ()
            inner_key, parts, rows = _megatron_parts(model, inner, shape, keys, base)
            key = base + inner_key
            runs[name] = [_rows(key, lead, first, start, count, shape) for first, start, count in parts]
        layers = (model.num_hidden_layers,) if stacked and layer is not None else ()
        shapes[key] = (*layers, rows, *shape[1:])
    return Names(runs, shapes)


def torchtitan_names(model: ModelConfig, keys: Collection[str] = (), prefix: str = "") -> Names:
    """Return torchtitan's names of ``model``, which must be a Llama. ``keys`` decide between two names."""
    runs, shapes = dict[str, list[TensorPart]](), dict[str, Shape]()
    half = head_dim(model) // 2
    for name, shape in hf_shapes(model).items():
        layer, inner = _split_layer(name)
        if layer is None:
            key = prefix + _TORCHTITAN_TOP[name]
        else:
            base = f"{prefix}layers.{layer}."
            key = base + _choose(_TORCHTITAN, inner, keys, base)
        runs[name] = [whole_run(key, shape)]
        if inner in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            # Row i of a head's first half is row 2i of torchtitan's head, of its second half row 2i + 1.
            runs[name] = [
                TensorPart(key, (first + part * half, 0), (half, shape[1]), (), (first + part, 0), 2)
                for first in range(0, shape[0], 2 * half)
                for part in (0, 1)
            ]
        shapes[key] = shape
    return Names(runs, shapes)


def litgpt_names(model: ModelConfig, keys: Collection[str] = ()) -> Names:
    """Return litgpt's names of ``model``. q, k and v are one matrix: consecutive, or interleaved until 2024."""
    runs, shapes = dict[str, list[TensorPart]](), dict[str, Shape]()
    for name, shape in hf_shapes(model).items():
        layer, inner = _split_layer(name)
        base, module = f"transformer.h.{layer}.", inner.split(".")[-2] if layer is not None else ""
        key, parts, rows = _LITGPT_TOP.get(name, ""), [(0, 0, shape[0])], shape[0]
        if module in FUSED["qkv_proj"]:
            key, rows = f"{base}attn.qkv.{inner.rpartition('.')[2]}", _qkv_rows(model)
            if key not in keys and (old := key.replace(".qkv.", ".attn.")) in keys:
                key, parts = old, list(_interleaved(model, module))
            else:
                queries = model.num_attention_heads * head_dim(model)
                start = {"q_proj": 0, "k_proj": queries, "v_proj": (rows + queries) // 2}[module]
                parts = [(0, start, shape[0])]
        elif layer is not None:
            key = base + _choose(_LITGPT, inner, keys, base)
        runs[name] = [_rows(key, (), first, start, count, shape) for first, start, count in parts]
        shapes[key] = (rows, *shape[1:])
    return Names(runs, shapes)


def plain_names(model: ModelConfig, prefix: str = "") -> Names:
    """Return Hugging Face's own names after ``prefix``."""
    shapes = hf_shapes(model)
    runs = {name: [whole_run(prefix + name, shape)] for name, shape in shapes.items()}
    return Names(runs, {prefix + name: shape for name, shape in shapes.items()})


def _split_layer(name: str) -> tuple[int | None, str]:
    """Return (layer, name inside the layer); (None, name) for tensors outside the layers."""
    if not name.startswith("model.layers."):
        return None, name
    number, _, inner = name.removeprefix("model.layers.").partition(".")
    return int(number), inner


def _choose(table: Mapping[str, tuple[str, ...]], inner: str, keys: Collection[str], base: str) -> str:
    if inner not in table:
        rule = f"has {inner}, which has no name in this format"
        raise ConfigError([Problem("model", None, rule, "use a Hugging Face folder of this model")])
    names = table[inner]
    return next((name for name in names if base + name in keys), names[0])


def _megatron_parts(
    model: ModelConfig, inner: str, shape: Shape, keys: Collection[str], base: str
) -> tuple[str, list[tuple[int, int, int]], int]:
    """Return the name inside a layer, (first row here, first row there, rows) of each part, and the rows there."""
    module = inner.split(".")[-2]
    if module in FUSED["gate_up_proj"]:
        return "mlp.linear_fc1.weight", [(0, shape[0] * (module == "up_proj"), shape[0])], 2 * shape[0]
    if module in FUSED["qkv_proj"]:
        parts = list(_interleaved(model, module))
        return f"self_attention.linear_qkv.{inner.rpartition('.')[2]}", parts, _qkv_rows(model)
    return _choose(_MEGATRON, inner, keys, base), [(0, 0, shape[0])], shape[0]


def _qkv_rows(model: ModelConfig) -> int:
    return (model.num_attention_heads + 2 * kv_heads(model)) * head_dim(model)


def _interleaved(model: ModelConfig, module: str) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of q, k or v in ``linear_qkv``: for each kv head its query heads, then its key, its value."""
    queries, size = model.num_attention_heads // kv_heads(model), head_dim(model)
    for group in range(kv_heads(model)):
        start = group * (queries + 2) * size
        if module == "q_proj":
            yield group * queries * size, start, queries * size
        else:
            yield group * size, start + (queries + (module == "v_proj")) * size, size


def whole_run(key: str, shape: Shape) -> TensorPart:
    """Return the run of a tensor with the same rows elsewhere."""
    return TensorPart(key, (0,) * len(shape), shape, (), (0,) * len(shape))


def _rows(key: str, lead: Shape, first: int, start: int, count: int, shape: Shape) -> TensorPart:
    others = (0,) * (len(shape) - 1)
    return TensorPart(key, (first, *others), (count, *shape[1:]), lead, (start, *others))
