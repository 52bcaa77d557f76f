"""The Llama model. Its matrices are megatron-core's tensor-parallel layers; the rest is plain torch.

Shapes: s sequence, b batch, h hidden, d head_dim, t tensor-parallel size. Activations are [s, b, h], sequence first as
in Megatron: sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) splits and gathers the first dimension
without a copy. Between the matrices they are then [s/t, b, h], which is written [s(/t), b, h] here.

A ``Llama`` is one chunk of the model: the layers of one (virtual) pipeline stage, with the embedding if it is the first
and the output head if it is the last. Modules have Hugging Face's names, with q, k, v and gate, up fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_llama.config import ModelConfig
from megatron_llama.devices.kernels import EAGER, Kernels
from megatron_llama.devices.visibility import AttentionInputs, Documents
from megatron_llama.model.kv_cache import KVCache, LayerCache
from megatron_llama.model.loss import Head
from megatron_llama.model.offload import Offload
from megatron_llama.model.random_ltd import Subsets, through
from megatron_llama.model.recompute import REMAKING, made_again
from megatron_llama.model.rotary import at_positions, rotary_table, rotate
from megatron_llama.plan.attention_pattern import pattern_of
from megatron_llama.plan.shapes import head_dim, kv_heads_per_rank

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles, each [s, 1 or b, 1, d], fp32."""


def _no_init(_: Tensor) -> None:
    """megatron-core requires an init method; here model/init.py fills the weights, after they have been sharded."""


def _column_parallel(inputs: int, outputs: int, mcore: TransformerConfig) -> ColumnParallelLinear:
    """[s(/t), b, inputs] to [s, b, outputs/t]: each rank has some rows of the matrix. Gathers the sequence first."""
    return ColumnParallelLinear(inputs, outputs, config=mcore, init_method=_no_init, bias=False)


def _row_parallel(inputs: int, outputs: int, mcore: TransformerConfig) -> RowParallelLinear:
    """[s, b, inputs/t] to [s(/t), b, outputs]: each rank has some columns, and the products are summed over ranks."""
    more = {"input_is_parallel": True, "skip_bias_add": False}  # parameters without defaults
    return RowParallelLinear(inputs, outputs, config=mcore, init_method=_no_init, bias=False, **more)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h], in x's dtype."""
        normalized: Tensor = _Normalize.apply(x, self.weight, self.eps)
        return normalized


class _Normalize(torch.autograd.Function):
    """RMSNorm that keeps x and 1 / rms(x) for the backward pass; autograd would keep fp32 copies of x and the quotient.

    The quotient is rounded to x's dtype before it is multiplied, as in Hugging Face's LlamaRMSNorm;
    ``torch.nn.functional.rms_norm`` rounds once, after it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        quotient = x.float() * inverse
        grad_weight = None
        if ctx.needs_input_grad[1]:
            products = grad * quotient.type_as(x)
            grad_weight = products.flatten(0, -2).sum(0, dtype=torch.float32).type_as(weight)
        scaled = (grad * weight).float()
        along = (scaled * quotient).mean(-1, keepdim=True)
        return (inverse * (scaled - quotient * along)).type_as(x), grad_weight, None


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245); heads are split over tp ranks.

    With fewer kv heads than ranks, neighbouring ranks hold copies of one kv head (parallel/tensor.py keeps the copies
    equal).
    """

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute: str, kernels: Kernels) -> None:
        super().__init__()
        self.attend = kernels.attend
        tp = mcore.tensor_model_parallel_size
        self.head_dim = head_dim(model)
        self.num_heads = model.num_attention_heads // tp
        self.num_kv_heads = kv_heads_per_rank(model, tp)
        self.recomputes_core = recompute == "selective"
        self._again = partial(made_again, recompute in REMAKING)
        # One matrix for q, k and v: one product, and with sequence parallelism one gather of the sequence, not three.
        # tp times this rank's heads: with copied kv heads that is more rows than q_proj, k_proj and v_proj have.
        qkv_heads = tp * (self.num_heads + 2 * self.num_kv_heads)
        self.qkv_proj = _column_parallel(model.hidden_size, qkv_heads * self.head_dim, mcore)
        self.o_proj = _row_parallel(model.num_attention_heads * self.head_dim, model.hidden_size, mcore)

    def forward(
        self, x: Tensor, rotary: Rotary, what: AttentionInputs | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        qkv, _ = self.qkv_proj(x)  # megatron-core's layers return (output, bias)
        if self.recomputes_core and torch.is_grad_enabled():
            out = checkpoint(self._core_attention, qkv, rotary, what, use_reentrant=False, preserve_rng_state=False)
            return self.o_proj(out)[0]
        q, k, v = self._heads(qkv)
        rotated_q, rotated_k = rotate(q, *rotary), rotate(k, *rotary)
        with self._again((rotated_q, lambda: rotate(q, *rotary)), (rotated_k, lambda: rotate(k, *rotary))):
            by_head = self._attend(rotated_q, rotated_k, v, what, cache)
        out = _by_token(by_head)
        with self._again((out, lambda: _by_token(by_head))):
            return self.o_proj(out)[0]

    def _core_attention(self, qkv: Tensor, rotary: Rotary, what: AttentionInputs | None) -> Tensor:
        """[s, b, (heads + 2 kv heads) * d] to [s, b, heads * d], of this rank's heads."""
        q, k, v = self._heads(qkv)
        return _by_token(self._attend(rotate(q, *rotary), rotate(k, *rotary), v, what))

    def _heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """[s, b, (heads + 2 kv heads) * d] to queries, keys and values, each [s, b, heads, d]."""
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        return qkv.view(*qkv.shape[:2], -1, self.head_dim).split(sizes, dim=2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, what: AttentionInputs | None, cache: LayerCache | None = None
    ) -> Tensor:
        """Queries, keys and values, each [s, b, heads, d], to [b, heads, s, d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return self.attend(q, k, v, what) if cache is None else cache.attend(q, k, v, what, self.attend)


def _by_token(by_head: Tensor) -> Tensor:
    """[b, heads, s, d] to [s, b, heads * d]."""
    b, heads, s, d = by_head.shape
    return by_head.permute(2, 0, 1, 3).reshape(s, b, heads * d)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute: str) -> None:
        super().__init__()
        self._again = partial(made_again, recompute in REMAKING)
        self.gate_up_proj = _column_parallel(model.hidden_size, 2 * model.intermediate_size, mcore)
        self.down_proj = _row_parallel(model.intermediate_size, model.hidden_size, mcore)

    def forward(self, x: Tensor) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)  # each rank has gate rows, then the up rows that belong to them
        activated = F.silu(gate)
        with self._again((activated, lambda: F.silu(gate))):
            hidden = activated * up
        with self._again((hidden, lambda: F.silu(gate) * up)):
            return self.down_proj(hidden)[0]


class Block(nn.Module):
    """One transformer layer. ``recompute`` is trainer.recompute:

    * elementwise: what is between matrix products and attention (model/recompute.py);
    * selective: that, and attention, which is cheap to compute where its scores are not (arXiv:2205.05198);
    * full: the whole block, of which only the input is kept (Chen et al. 2016, arXiv:1604.06174).
    """

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute: str, kernels: Kernels) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.self_attn = Attention(model, mcore, recompute, kernels)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.mlp = FeedForward(model, mcore, recompute)
        self.recompute = recompute
        self._again = partial(made_again, recompute in REMAKING)
        self.draws_random_numbers = False  # LoRA's dropout is the only source; model/lora.py sets it

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, what: AttentionInputs | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """[s(/t), b, h] to [s(/t), b, h]; ``what`` the tokens see, all of them if None; ``cache`` is for generation."""
        in_graph = self.recompute in REMAKING and torch.compiler.is_compiling()
        if (self.recompute == "full" or in_graph) and torch.is_grad_enabled():
            preserve = self.draws_random_numbers  # else there is no state to restore, and no device to wait for
            more: dict[str, Any] = {"context_fn": REMAKING[self.recompute]} if in_graph else {}
            forward = self._forward
            return checkpoint(forward, x, cos, sin, what, use_reentrant=False, preserve_rng_state=preserve, **more)
        return self._forward(x, cos, sin, what, cache)

    def _forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, what: AttentionInputs | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        normalized = self.input_layernorm(x)
        with self._again((normalized, lambda: self.input_layernorm(x))):
            h = x + self.self_attn(normalized, (cos, sin), what, cache)
        normalized = self.post_attention_layernorm(h)
        with self._again((normalized, lambda: self.post_attention_layernorm(h))):
            return h + self.mlp(normalized)


class Llama(nn.Module):
    """One chunk of the model: ``layers`` by global number, with the embedding if first and the head if last.

    ``offload``: what the blocks keep for the backward pass waits in the host's memory. ``kernels`` are
    the device's.

    The attributes below the line are part of the interface that megatron-core's schedules expect of a model.
    """

    def __init__(
        self,
        model: ModelConfig,
        mcore: TransformerConfig,
        layers: Sequence[int],
        *,
        padded_vocab_size: int,
        recompute: Callable[[int], str] = lambda layer: "none",
        offload: bool = False,
        kernels: Kernels = EAGER,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.kernels, self.offload = kernels, offload
        self.is_first, self.is_last = is_first, is_last
        self.padded_vocab_size = padded_vocab_size
        self._rotary: Rotary | None = None
        self.working_copies: Any = None  # parallel/working_copies.py's, if the rank casts its weights itself
        if is_first:
            self.embed_tokens = VocabParallelEmbedding(
                padded_vocab_size,
                model.hidden_size,
                init_method=_no_init,
                config=mcore,
                reduce_scatter_embeddings=mcore.sequence_parallel,
            )
        self.layers = nn.ModuleDict({str(i): Block(model, mcore, recompute(i), self.kernels) for i in layers})
        if is_last:
            self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
            # Tied, and on one stage: the head uses the embedding's weight. On a later stage it has a copy.
            tied = model.tie_word_embeddings and is_first
            self.lm_head = Head(model.hidden_size, padded_vocab_size, model.vocab_size, mcore, tied=tied)
            self.lm_head.kernels = self.kernels
        # ----------------------------------------------------------------------------------------------------
        self.config = mcore
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = model.tie_word_embeddings
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Receives the activations [s(/t), b, h] of the previous stage; megatron-core calls it before ``forward``."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        documents: Documents | None = None,
        cache: KVCache | None = None,
        subsets: Subsets | None = None,
    ) -> Tensor:
        """The forward pass of this chunk for token ids [b, s], int64.

        Returns the activations [s(/t), b, h], or on the last chunk, given ``labels`` [b, s] (next token ids, int64),
        the sum of the tokens' losses times ``loss_weights`` [b, s], fp32 scalar (without gradients [2], see
        ``Head.forward``), else this rank's logits
        [s, b, vocabulary/t], fp32.

        ``documents`` tells which tokens belong together where a sequence holds several documents. With a ``cache``, for
        generation without sequence parallelism, the tokens follow those in the cache. ``subsets`` are what some layers
        see of the tokens, in random-LTD.
        """
        if self.is_first:
            # [b, s] to [s(/t), b, h]. With sequence parallelism megatron-core transposes, and scatters the sequence.
            x = self.embed_tokens(tokens if self.config.sequence_parallel else tokens.t())
        else:
            assert self.input_tensor is not None
            # megatron-core sets requires_grad on received activations in validation too; there the first block would
            # compile to another graph than the following ones.
            x = self.input_tensor if torch.is_grad_enabled() else self.input_tensor.detach()
        table = cos, sin = self._rotary_for(tokens) if cache is None else cache.rotary
        what = None
        if cache is None or cache.from_the_start:
            what = self.kernels.visible(tokens, documents, pattern_of(self.model))
        if documents is not None:
            positions = documents.positions()
            cos, sin = at_positions(cos, positions), at_positions(sin, positions)
        offload = Offload(self.offload, cos, sin, *(() if what is None else (what.cu_seqlens, what.mask)))
        for number, block in self.layers.items():
            subset = None if subsets is None else subsets.of(int(number))
            with offload.of(block):
                if subset is not None:
                    some = subset.visible(tokens.shape[1], pattern_of(self.model), self.kernels.visible)
                    x = through(block, x, subset, table, some)
                else:
                    x = block(x, cos, sin, what, None if cache is None else cache.layers[int(number)])
        if cache is not None:
            x = cache.select(x)
        if not self.is_last:
            return x
        tied_weight = self.embed_tokens.weight if self.lm_head.weight is None else None
        loss_or_logits: Tensor = self.lm_head(self.norm(x), tied_weight, labels, loss_weights)
        return loss_or_logits

    def _rotary_for(self, tokens: Tensor) -> Rotary:
        """Cosines and sines for tokens [b, s], kept until length or device change."""
        length = tokens.shape[1]
        if self._rotary is None or self._rotary[0].shape[0] != length or self._rotary[0].device != tokens.device:
            self._rotary = rotary_table(self.model, length, tokens.device)
        return self._rotary
