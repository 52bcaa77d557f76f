"""The Llama model: megatron-core's tensor-parallel linear layers, otherwise plain torch.

Shapes: s sequence, b batch, h hidden, d head_dim, t tensor-parallel size. Activations are [s, b, h], sequence first as
in Megatron, because sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) splits and gathers the first
dimension without a copy. With sequence parallelism, norms and residuals have [s/t, b, h]; docstrings write
[s(/t), b, h].

A ``Llama`` is one chunk of the model: the layers of one (virtual) pipeline stage, with the embedding on the first stage
and the output head on the last. Modules have Hugging Face's names, with q, k, v and gate, up fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_llama.arch.shapes import fused_shape, has_bias, head_dim, kv_heads_per_rank, norms_branches, qk_norm
from megatron_llama.config import ModelConfig
from megatron_llama.devices.kernels import EAGER, Kernels
from megatron_llama.devices.visibility import AttentionInputs
from megatron_llama.model.inputs import BlockInputs, InputBuilder
from megatron_llama.model.loss import Head
from megatron_llama.model.norm import ProjectionNorm, RMSNorm
from megatron_llama.model.recompute import recomputable
from megatron_llama.model.rotary import Rotary, rotate

Attend = Callable[[Tensor, Tensor, Tensor, AttentionInputs | None], Tensor]
"""Type of ``Kernels.attend``: q [b, heads, s, d], k and v [b, kv heads, s, d] to [b, heads, s, d]."""


def _no_init(_: Tensor) -> None:
    """Do nothing. megatron-core requires an init method; ``parallelize.init_weights`` fills the weights."""


def _column_parallel(matrix: str, model: ModelConfig, mcore: TransformerConfig) -> ColumnParallelLinear:
    """Build a linear layer [s(/t), b, in] to [s, b, out/t]. A rank holds rows of the matrix. The caller adds the bias.

    megatron-core takes t times this rank's rows. With copied kv heads these are more than the rows of q_proj, k_proj
    and v_proj.
    """
    tp = mcore.tensor_model_parallel_size
    rows, columns = fused_shape(model, matrix, tp)
    more = {"bias": has_bias(model, matrix), "skip_bias_add": True}
    return ColumnParallelLinear(columns, tp * rows, config=mcore, init_method=_no_init, **more)


def _row_parallel(matrix: str, model: ModelConfig, mcore: TransformerConfig) -> RowParallelLinear:
    """Build a linear layer [s, b, in/t] to [s(/t), b, out]. A rank holds columns; outputs are summed over ranks.

    The caller adds the bias, which every rank has, to the sum.
    """
    more = {"bias": has_bias(model, matrix), "input_is_parallel": True, "skip_bias_add": True}
    rows, columns = fused_shape(model, matrix)
    return RowParallelLinear(columns, rows, config=mcore, init_method=_no_init, **more)


def _qk_norm(rows: int, model: ModelConfig, mcore: TransformerConfig, group: ProcessGroup) -> nn.Module:
    """Build the norm of q or k [s, b, heads, d]: of each head, or of this rank's ``rows`` with the other ranks'."""
    if qk_norm(model) == "head":
        return RMSNorm(head_dim(model), model.rms_norm_eps, mcore.params_dtype)
    over_ranks = group if mcore.tensor_model_parallel_size > 1 else None
    return ProjectionNorm(rows, model.rms_norm_eps, mcore.params_dtype, over_ranks)


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a parallel linear layer with its bias. megatron-core's layers return (output, bias)."""
    output, bias = layer(x)
    with_bias: Tensor = output if bias is None else output + bias
    return with_bias


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); heads are split over tp ranks.

    With fewer kv heads than ranks, neighbouring ranks hold copies of one kv head. parallel/tensor.py sums their
    gradients.
    """

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, attend: Attend) -> None:
        super().__init__()
        tp = mcore.tensor_model_parallel_size
        self.head_dim = head_dim(model)
        self.num_heads = model.num_attention_heads // tp
        self.num_kv_heads = kv_heads_per_rank(model, tp)
        self.attend = attend
        self.rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
        # One matrix for q, k and v: one matmul instead of three, and with sequence parallelism one gather.
        self.qkv_proj = _column_parallel("qkv_proj", model, mcore)
        self.o_proj = _row_parallel("o_proj", model, mcore)
        self.has_qk_norm = qk_norm(model) is not None
        if self.has_qk_norm:
            self.q_norm = _qk_norm(self.num_heads * self.head_dim, model, mcore, self.qkv_proj.tp_group)
            self.k_norm = _qk_norm(self.num_kv_heads * self.head_dim, model, mcore, self.qkv_proj.tp_group)

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
        return merge_heads(self.attend(q, k, v, visible))


@recomputable
def merge_heads(x: Tensor) -> Tensor:
    """[b, heads, s, d] to [s, b, heads * d]."""
    b, heads, s, d = x.shape
    return x.permute(2, 0, 1, 3).reshape(s, b, heads * d)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)). gate and up are one matrix."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig) -> None:
        super().__init__()
        self.gate_up_proj = _column_parallel("gate_up_proj", model, mcore)
        self.down_proj = _row_parallel("down_proj", model, mcore)
        self.activation: Callable[[Tensor], Tensor] = swiglu

    def forward(self, x: Tensor) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        return _apply(self.down_proj, self.activation(_apply(self.gate_up_proj, x)))


@recomputable
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


@recomputable
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Each rank has gate rows, then the up rows of the same units."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


class Block(nn.Module):
    """Transformer layer. parallel/parallelize.py wraps ``forward`` for recomputation, the compiler, random-LTD and
    offload."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, attend: Attend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.self_attn = Attention(model, mcore, attend)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.mlp = FeedForward(model, mcore)

    def forward(self, x: Tensor, rotary: Rotary, visible: AttentionInputs | None = None) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]. With ``visible=None`` a token attends to all tokens up to itself."""
        h = x + self.self_attn(self.input_layernorm(x), rotary, visible)
        return h + self.mlp(self.post_attention_layernorm(h))


class PostNormBlock(nn.Module):
    """Transformer layer of OLMo 2: norms after attention and feed-forward, before their addition to the residual."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, attend: Attend) -> None:
        super().__init__()
        self.self_attn = Attention(model, mcore, attend)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.mlp = FeedForward(model, mcore)
        self.post_feedforward_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)

    def forward(self, x: Tensor, rotary: Rotary, visible: AttentionInputs | None = None) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]. With ``visible=None`` a token attends to all tokens up to itself."""
        h = x + self.post_attention_layernorm(self.self_attn(x, rotary, visible))
        return h + self.post_feedforward_layernorm(self.mlp(h))


class Llama(nn.Module):
    """One chunk of the model.

    Args:
        layers: global numbers of the chunk's layers.
        padded_vocab_size: vocabulary, padded to a multiple of tp.
        kernels: the device's kernels.
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
        kernels: Kernels = EAGER,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = is_first, is_last
        self.padded_vocab_size = padded_vocab_size
        self.build_inputs = InputBuilder(model, kernels.visible)
        if is_first:
            self.embed_tokens = VocabParallelEmbedding(
                padded_vocab_size,
                model.hidden_size,
                init_method=_no_init,
                config=mcore,
                reduce_scatter_embeddings=mcore.sequence_parallel,
            )
        block = PostNormBlock if norms_branches(model) else Block
        self.layers = nn.ModuleDict({str(i): block(model, mcore, kernels.attend) for i in layers})
        if is_last:
            self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
            # On one stage, the head of tied embeddings uses the embedding's weight. On a later stage it has a copy.
            tied = model.tie_word_embeddings and is_first
            self.lm_head = Head(model.hidden_size, padded_vocab_size, model.vocab_size, mcore, tied=tied)
            self.lm_head.kernels = kernels
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
    ) -> Tensor:
        """Run this chunk on token ids [b, s], int64.

        Args:
            tokens: [b, s], int64. Every chunk takes them.
            labels: [b, s], int64, ids of the next tokens.
            loss_weights: [b, s], fp32.
            inputs: from ``build_inputs``, or ``KVCache.inputs``. Default: each sequence is one document.
            token_index: [b], int64, the token of each row whose logits are computed. Default: all tokens.

        Returns:
            Activations [s(/t), b, h]. On the last chunk with ``labels``, the sum of losses times ``loss_weights``, fp32
            scalar (under ``no_grad`` [2], see ``Head.forward``). On the last chunk without ``labels``, this rank's
            logits [s, b, vocabulary/t], fp32.
        """
        inputs = inputs or self.build_inputs(tokens)
        x = self.embed(tokens) if self.is_first else self.received()
        for number, block in self.layers.items():
            x = block(x, *inputs.of(int(number)))
        if not self.is_last:
            return x
        if token_index is not None:
            x = x[token_index, torch.arange(x.shape[1], device=x.device)][None]
        loss_or_logits: Tensor = self.lm_head(self.norm(x), self.tied_weight(), labels, loss_weights)
        return loss_or_logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [b, s] to [s(/t), b, h]."""
        # With sequence parallelism megatron-core itself transposes and scatters the sequence.
        x: Tensor = self.embed_tokens(tokens if self.config.sequence_parallel else tokens.t())
        return x

    def received(self) -> Tensor:
        """Return the activations of the previous stage [s(/t), b, h]."""
        assert self.input_tensor is not None
        # megatron-core sets requires_grad on received activations in validation too. The first block would then compile
        # to another graph than the following blocks.
        return self.input_tensor if torch.is_grad_enabled() else self.input_tensor.detach()

    def tied_weight(self) -> Tensor | None:
        """Return the embedding's weight if the head has no weight, else None."""
        return self.embed_tokens.weight if self.lm_head.weight is None else None
