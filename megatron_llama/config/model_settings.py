"""The settings of the model: its shape, and what its tokens see. ``settings.py`` has the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from megatron_llama.config.limits import above_zero, at_least, between, one_of

MOST_LAYERS = 10_000
"""The plan lists layers one by one; the deepest published Llama has 126."""
MOST_HEADS = 10_000
"""Advice looks through them one by one for what divides; published Llamas have up to 128."""


@dataclass
class RopeScaling:
    """Llama 3's frequency scaling of rotary embeddings (Hugging Face's ``rope_type: llama3``)."""

    rope_type: Annotated[str, one_of("llama3")] = "llama3"
    """Kind of scaling; only ``llama3`` is supported."""
    factor: Annotated[float, at_least(1)] = 8.0
    """Low frequencies are divided by this."""
    low_freq_factor: Annotated[float, above_zero()] = 1.0
    """Wavelengths above original_max_position_embeddings / this are scaled fully."""
    high_freq_factor: Annotated[float, above_zero()] = 4.0
    """Wavelengths below original_max_position_embeddings / this are left alone."""
    original_max_position_embeddings: Annotated[int, at_least(1)] = 8192
    """Sequence length before scaling, tokens."""


@dataclass
class SparseAttention:
    """The fixed pattern of blocks (Child et al. 2019, arXiv:1904.10509), under DeepSpeed's names: its mode ``fixed``,
    unidirectional, the same for all heads."""

    block: Annotated[int, at_least(1)] = 64
    """Tokens of a block. Positions count from the beginning of a document."""
    num_local_blocks: Annotated[int, at_least(1)] = 4
    """A token sees what precedes it in its group of this many blocks."""
    num_global_blocks: Annotated[int, at_least(1)] = 1
    """It also sees this many blocks at the end of each earlier group."""


@dataclass
class ModelConfig:
    """The Llama's shape, under Hugging Face's names."""

    name: str = "llama"
    """Preset's name; shown in plans and used for the default run folder."""
    vocab_size: Annotated[int, at_least(2)] = 4096
    """Tokens in the vocabulary. Rows that pad the embedding table for tensor parallelism are added, and masked in
    the loss, on top."""
    hidden_size: Annotated[int, at_least(1)] = 192
    """Width of the residual stream."""
    intermediate_size: Annotated[int, at_least(1)] = 512
    """Width of the SwiGLU feed-forward."""
    num_hidden_layers: Annotated[int, between(1, MOST_LAYERS)] = 4
    """Transformer blocks."""
    num_attention_heads: Annotated[int, between(1, MOST_HEADS)] = 4
    """Query heads."""
    num_key_value_heads: Annotated[int | None, between(1, MOST_HEADS)] = None
    """Key and value heads (grouped-query attention). Derived: num_attention_heads."""
    head_dim: Annotated[int | None, at_least(1)] = None
    """Width of a head. Derived: hidden_size / num_attention_heads."""
    max_position_embeddings: Annotated[int, at_least(1)] = 4096
    """Longest sequence that the model supports, tokens."""
    rms_norm_eps: Annotated[float, above_zero()] = 1e-5
    """Added to the mean square inside RMSNorm."""
    rope_theta: Annotated[float, above_zero()] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling for long contexts; null for Llama 2."""
    sliding_window: Annotated[int | None, at_least(1)] = None
    """A token sees this many tokens, itself included, as in Mistral; null for all before it."""
    sparse_attention: SparseAttention | None = None
    """A token sees local and global blocks only; null for all before it."""
    tie_word_embeddings: bool = False
    """The output head is the embedding table."""
    initializer_range: Annotated[float, above_zero()] = 0.02
    """Standard deviation of initial weights; o_proj and down_proj get it divided by sqrt(2 * num_hidden_layers)."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From what ``asdict`` gives. Raises TypeError for names that are none of a model's."""
        sections = {"rope_scaling": RopeScaling, "sparse_attention": SparseAttention}
        given = {name: kind(**values[name]) for name, kind in sections.items() if values.get(name)}
        return cls(**{**values, **given})
