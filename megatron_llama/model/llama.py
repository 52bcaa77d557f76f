"""The Llama model: megatron-core's tensor-parallel linear layers, otherwise plain torch.

Shapes: s sequence, b batch, h hidden, d head_dim, t tensor-parallel size. Activations are [s, b, h], sequence first as
in Megatron, because sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) splits and gathers the first
dimension without a copy. With sequence parallelism, norms and residuals have [s/t, b, h]; docstrings write
[s(/t), b, h].

A ``Llama`` is one chunk of the model: the layers of one (virtual) pipeline stage, with the embedding on the first stage
and the output head on the last. Modules have Hugging Face's names, with q, k, v and gate, up fused.

Constructors take what a mode changes: ``BlockParts`` and ``Wrapper``s, which parallel/assembly.py chooses. Nothing
replaces a method of a built module. ``@recomputable`` marks what elementwise and selective recomputation compute again
in uncompiled blocks; otherwise it has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_llama.arch.parameters import fused_shape, has_bias, head_dim, kv_heads_per_rank, norms_branches, qk_norm
from megatron_llama.config import ModelConfig
from megatron_llama.devices.attention_inputs import AttentionInputs
from megatron_llama.devices.kernels import EAGER
from megatron_llama.model.inputs import BlockInputs, InputBuilder
from megatron_llama.model.loss import Head
from megatron_llama.model.preference import Pairs
from megatron_llama.model.recompute import recomputable
from megatron_llama.model.rms_norm import Normalize, ProjectionNorm, RMSNorm, normalize
from megatron_llama.model.rotary import Rotary, rotate

Attend = Callable[[Tensor, Tensor, Tensor, AttentionInputs | None], Tensor]
"""Type of ``Kernels.attend``: q [b, heads, s, d], k and v [b, kv heads, s, d] to [b, heads, s, d]."""
Matmul = Callable[..., Tensor]
"""Replacement of megatron-core's ``_forward_impl``: input [s(/t), b, in] times weight [out, in], by keywords."""
COLUMN_PARALLEL = "qkv_proj", "gate_up_proj"
"""Matrices whose rows the tensor-parallel ranks split. They split the columns of the others."""


def _no_init(_: Tensor) -> None:
    """Do nothing. megatron-core requires an init method; ``parallelize.init_weights`` fills the weights."""


class _Linear(nn.Module):
    """Shared by ``ColumnLinear`` and ``RowLinear``: the matmul, which a mode may replace. None: megatron-core's."""

    def __init__(self, *args: Any, matmul: Matmul | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.matmul = matmul

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.matmul is None:
            return super()._forward_impl(*args, **kwargs)  # type: ignore[misc, no-any-return]
        return self.matmul(*args, **kwargs)

    def __repr__(self) -> str:
        return super().__repr__() if self.matmul is None else f"{super().__repr__()[:-1]}, {name_of(self.matmul)})"


class ColumnLinear(_Linear, ColumnParallelLinear):
    """Linear layer [s(/t), b, in] to [s, b, out/t]. A rank holds rows of the matrix. The caller adds the bias."""


class RowLinear(_Linear, RowParallelLinear):
    """Linear layer [s, b, in/t] to [s(/t), b, out]. A rank holds columns; outputs are summed over ranks.

    The caller adds the bias, which every rank has, to the sum.
    """


def parallel_linear(
    matrix: str,
    model: ModelConfig,
    mcore: TransformerConfig,
    *,
    matmul: Matmul | None = None,
    kinds: tuple[Any, Any] = (ColumnLinear, RowLinear),
) -> ColumnLinear | RowLinear:
    """Build the linear layer of a ``matrix``, such as qkv_proj. ``kinds``: subclasses of ColumnLinear and RowLinear."""
    column, row = kinds
    more = {"bias": has_bias(model, matrix), "skip_bias_add": True, "config": mcore, "init_method": _no_init}
    if matrix not in COLUMN_PARALLEL:
        rows, columns = fused_shape(model, matrix)
        return row(columns, rows, input_is_parallel=True, matmul=matmul, **more)  # type: ignore[no-any-return]
    # megatron-core takes t times this rank's rows. With copied kv heads these are more than the rows of q_proj, k_proj
    # and v_proj.
    rows, columns = fused_shape(model, matrix, mcore.tensor_model_parallel_size)
    return column(columns, mcore.tensor_model_parallel_size * rows, matmul=matmul, **more)  # type: ignore[no-any-return]


def build_norm(
    name: str, size: int, model: ModelConfig, mcore: TransformerConfig, *, apply: Normalize = normalize
) -> RMSNorm:
    """Build the norm ``name`` over ``size`` values. q_norm and k_norm normalize each head, or all heads together."""
    kind = qk_norm(model) if name in ("q_norm", "k_norm") else None
    if kind == "projection":
        group = get_tensor_model_parallel_group() if mcore.tensor_model_parallel_size > 1 else None
        return ProjectionNorm(size, model.rms_norm_eps, mcore.params_dtype, group)
    return RMSNorm(size if kind is None else head_dim(model), model.rms_norm_eps, mcore.params_dtype, apply)


@recomputable
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


@recomputable
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Each rank has gate rows, then the up rows of the same units."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class Wrapper(NamedTuple):
    """A function around a method of a block."""

    target: str
    """``block`` (its forward), ``mlp`` (its forward) or ``attention`` (``core_attention``)."""
    wrap: Callable[[nn.Module, Callable[..., Tensor]], Callable[..., Tensor]]
    """From the module and its method to the method's replacement."""
    name: str = ""
    """Shown by ``print(model)``."""


@dataclass(frozen=True)
class BlockParts:
    """The parts of a chunk's blocks, and of the embedding and the head next to them."""

    attend: Attend = EAGER.attend
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    """From x [s, b, heads, d], cosines and sines."""
    activation: Callable[[Tensor], Tensor] = swiglu
    """From [s, b, 2 units/t] to [s, b, units/t]."""
    linear: Callable[[str, ModelConfig, TransformerConfig], nn.Module] = parallel_linear
    norm: Callable[[str, int, ModelConfig, TransformerConfig], nn.Module] = build_norm
    measure_logits: Callable[[Tensor, Tensor, Any, Tensor | None], Tensor | None] | None = None
    """From q, k, mask inputs and the largest logits so far to the largest logits of each head (QK-Clip)."""
    embedding: Callable[..., VocabParallelEmbedding] = VocabParallelEmbedding
    token_rows: Callable[[int, TransformerConfig], Any] | None = None
    """From the hidden size to ``TokenRows`` (model/lora.py)."""
    noise: Callable[[Tensor, Tensor], Tensor] | None = None
    """From embeddings [s(/t), b, h] and keys [b, s] to embeddings with noise (NEFTune)."""
    head: Callable[..., Head] = Head
    inputs: Callable[[ModelConfig], InputBuilder] = partial(InputBuilder, build_visible=EAGER.visible)
    wrappers: Sequence[Wrapper] = ()
    """Wrappers of a block's methods, the innermost first."""


class Wrapped(nn.Module):
    """A module whose constructor takes parts and wraps one of its methods."""

    slots: tuple[str, ...] = ()
    """Names of the parts that are functions."""
    wrappers: tuple[str, ...] = ()
    """Names of the wrappers, the innermost first."""

    def wrap(self, method: str, target: str, wrappers: Sequence[Wrapper]) -> None:
        """Wrap ``method`` by the wrappers for ``target``, the innermost first. Subclasses call it once."""
        for wrapper in wrappers:
            if wrapper.target == target:
                setattr(self, method, wrapper.wrap(self, getattr(self, method)))
                self.wrappers += (wrapper.name,)

    def extra_repr(self) -> str:
        """Return the functions among the parts, and the wrappers."""
        names = [f"{slot}={name_of(getattr(self, slot))}" for slot in self.slots]
        return ", ".join([*names, *([f"wrapped by {', '.join(self.wrappers)}"] if self.wrappers else [])])


def name_of(part: Any) -> str:
    """Return the name of a part, for ``print(model)``."""
    while isinstance(part, partial):
        part = part.func
    return str(getattr(part, "__qualname__", type(part).__name__)).replace(".<locals>", "")


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a parallel linear layer with its bias. megatron-core's layers return (output, bias)."""
    output, bias = layer(x)
    with_bias: Tensor = output if bias is None else output + bias
    return with_bias


class Attention(Wrapped):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); heads are split over tp ranks.

    With fewer kv heads than ranks, neighbouring ranks hold copies of one kv head, whose gradients
    parallel/replicated_gradients.py sums.
    """

    slots = "attend", "rotate"

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, parts: BlockParts) -> None:
        super().__init__()
        tp = mcore.tensor_model_parallel_size
        self.head_dim = head_dim(model)
        self.num_heads = model.num_attention_heads // tp
        self.num_kv_heads = kv_heads_per_rank(model, tp)
        self.attend, self.rotate = parts.attend, parts.rotate
        # One matrix for q, k and v: one matmul instead of three, and with sequence parallelism one gather.
        self.qkv_proj = parts.linear("qkv_proj", model, mcore)
        self.o_proj = parts.linear("o_proj", model, mcore)
        self.has_qk_norm = qk_norm(model) is not None
        if self.has_qk_norm:
            self.q_norm = parts.norm("q_norm", self.num_heads * self.head_dim, model, mcore)
            self.k_norm = parts.norm("k_norm", self.num_kv_heads * self.head_dim, model, mcore)
        self.measure_logits = parts.measure_logits
        self.max_logits: Tensor | None = None
        self.wrap("core_attention", "attention", parts.wrappers)

    def forward(self, x: Tensor, rotary: Rotary, visible: AttentionInputs | None = None) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        return _apply(self.o_proj, self.core_attention(_apply(self.qkv_proj, x), rotary, visible))

    def core_attention(self, qkv: Tensor, rotary: Rotary, visible: AttentionInputs | None) -> Tensor:
        """[s, b, (heads + 2 kv heads) * d] to [s, b, heads * d], for this rank's heads."""
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.view(*qkv.shape[:2], -1, self.head_dim).split(sizes, dim=2)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.has_qk_norm else (q, k)
        q, k = self.rotate(q, *rotary), self.rotate(k, *rotary)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, heads, s, d]
        if self.measure_logits is not None:
            self.max_logits = self.measure_logits(q, k, visible, self.max_logits)
        return merge_heads(self.attend(q, k, v, visible))


@recomputable
def merge_heads(x: Tensor) -> Tensor:
    """[b, heads, s, d] to [s, b, heads * d]."""
    b, heads, s, d = x.shape
    return x.permute(2, 0, 1, 3).reshape(s, b, heads * d)


class FeedForward(Wrapped):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)). gate and up are one matrix."""

    slots = ("activation",)

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, parts: BlockParts) -> None:
        super().__init__()
        self.gate_up_proj = parts.linear("gate_up_proj", model, mcore)
        self.down_proj = parts.linear("down_proj", model, mcore)
        self.activation = parts.activation
        self.wrap("forward", "mlp", parts.wrappers)

    def forward(self, x: Tensor) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        return _apply(self.down_proj, self.activation(_apply(self.gate_up_proj, x)))


class Block(Wrapped):
    """Transformer layer. parallel/assembly.py lists the wrappers of its methods."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, parts: BlockParts) -> None:
        super().__init__()
        self.input_layernorm = parts.norm("input_layernorm", model.hidden_size, model, mcore)
        self.self_attn = Attention(model, mcore, parts)
        self.post_attention_layernorm = parts.norm("post_attention_layernorm", model.hidden_size, model, mcore)
        self.mlp = FeedForward(model, mcore, parts)
        self.wrap("forward", "block", parts.wrappers)

    def forward(self, x: Tensor, rotary: Rotary, visible: AttentionInputs | None = None) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]. With ``visible=None`` a token attends to all tokens up to itself."""
        h = x + self.self_attn(self.input_layernorm(x), rotary, visible)
        return h + self.mlp(self.post_attention_layernorm(h))


class PostNormBlock(Wrapped):
    """Transformer layer of OLMo 2: norms after attention and feed-forward, before their addition to the residual."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, parts: BlockParts) -> None:
        super().__init__()
        self.self_attn = Attention(model, mcore, parts)
        self.post_attention_layernorm = parts.norm("post_attention_layernorm", model.hidden_size, model, mcore)
        self.mlp = FeedForward(model, mcore, parts)
        self.post_feedforward_layernorm = parts.norm("post_feedforward_layernorm", model.hidden_size, model, mcore)
        self.wrap("forward", "block", parts.wrappers)

    def forward(self, x: Tensor, rotary: Rotary, visible: AttentionInputs | None = None) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]. With ``visible=None`` a token attends to all tokens up to itself."""
        h = x + self.post_attention_layernorm(self.self_attn(x, rotary, visible))
        return h + self.post_feedforward_layernorm(self.mlp(h))


class Llama(nn.Module):
    """One chunk of the model.

    Args:
        layers: global numbers of the chunk's layers.
        padded_vocab_size: vocabulary, padded to a multiple of tp.
        parts: of the blocks, the embedding and the head.
        layer_parts: from a layer's global number and ``parts`` to the parts of its block.
        is_first: the chunk has the embedding.
        is_last: the chunk has the output head.
    """

    def __init__(
        self,
        model: ModelConfig,
        mcore: TransformerConfig,
        layers: Sequence[int],
        *,
        padded_vocab_size: int,
        parts: BlockParts,
        layer_parts: Callable[[int, BlockParts], BlockParts] = lambda _, parts: parts,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last, self.noise = is_first, is_last, parts.noise
        self.padded_vocab_size = padded_vocab_size
        self.build_inputs = parts.inputs(model)
        if is_first:
            self.embed_tokens = parts.embedding(
                padded_vocab_size,
                model.hidden_size,
                init_method=_no_init,
                config=mcore,
                reduce_scatter_embeddings=mcore.sequence_parallel,
            )
        block = PostNormBlock if norms_branches(model) else Block
        self.layers = nn.ModuleDict({str(i): block(model, mcore, layer_parts(i, parts)) for i in layers})
        if is_last:
            self.norm = parts.norm("norm", model.hidden_size, model, mcore)
            # On one stage, the head of tied embeddings uses the embedding's weight. On a later stage it has a copy.
            tied = model.tie_word_embeddings and is_first
            self.lm_head = parts.head(model.hidden_size, padded_vocab_size, model.vocab_size, mcore, tied=tied)
        self.embed_rows = self.head_rows = None
        if parts.token_rows is not None and is_first:
            self.embed_rows = parts.token_rows(model.hidden_size, mcore)
        if parts.token_rows is not None and is_last and model.tie_word_embeddings:
            self.head_rows = self.embed_rows or parts.token_rows(model.hidden_size, mcore)
        # Attributes that megatron-core's schedules require of a model.
        self.config = mcore
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = model.tie_word_embeddings
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Store the activations [s(/t), b, h] of the previous stage. megatron-core calls it before ``forward``."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        inputs: BlockInputs | None = None,
        token_index: Tensor | None = None,
        pairs: Pairs | None = None,
        noise_keys: Tensor | None = None,
    ) -> Tensor:
        """Run this chunk on token ids [b, s], int64.

        Args:
            tokens: [b, s], int64. Every chunk takes them.
            labels: [b, s], int64, ids of the next tokens.
            loss_weights: [b, s], fp32.
            inputs: from ``build_inputs``, or ``KVCache.inputs``. Default: each sequence is one document.
            token_index: [b], int64, the token of each row whose logits are computed. Default: all tokens.
            pairs: answers for preference training.
            noise_keys: [b, s], int32, keys of the embeddings' noise. Default: no noise.

        Returns:
            Activations [s(/t), b, h]. On the last chunk with ``labels``, the sum of losses times ``loss_weights``, fp32
            scalar (with ``pairs`` or under ``no_grad`` a vector, see ``Head.forward``). On the last chunk without
            ``labels``, this rank's logits [s, b, vocabulary/t], fp32.
        """
        inputs = inputs or self.build_inputs(tokens)
        x = self.embed(tokens) if self.is_first else self.received()
        if self.is_first and self.noise is not None and noise_keys is not None:
            x = self.noise(x, noise_keys)
        for number, block in self.layers.items():
            x = block(x, *inputs.of(int(number)))
        if not self.is_last:
            return x
        if token_index is not None:
            x = x[token_index, torch.arange(x.shape[1], device=x.device)][None]
        loss_or_logits: Tensor = self.lm_head(self.norm(x), self.tied_weight(), labels, loss_weights, pairs)
        return loss_or_logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [b, s] to [s(/t), b, h]."""
        # With sequence parallelism megatron-core itself transposes and scatters the sequence.
        x: Tensor = self.embed_tokens(tokens if self.config.sequence_parallel else tokens.t())
        return x if self.embed_rows is None else self.embed_rows.replace(x, tokens)

    def received(self) -> Tensor:
        """Return the activations of the previous stage [s(/t), b, h]."""
        assert self.input_tensor is not None
        # megatron-core sets requires_grad on received activations in validation too. The first block would then compile
        # to another graph than the following blocks.
        return self.input_tensor if torch.is_grad_enabled() else self.input_tensor.detach()

    def tied_weight(self) -> Tensor | None:
        """Return the embedding's weight if the head has no weight, or if it has trained rows, else None."""
        if self.head_rows is not None:
            return self.head_rows.in_table((self.embed_tokens if self.is_first else self.lm_head).weight)
        return self.embed_tokens.weight if self.lm_head.weight is None else None
