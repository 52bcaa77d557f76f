"""The Llama, top to bottom. Its matrices are megatron-core's tensor-parallel layers; the rest is plain torch.

Shapes are written with s sequence, b batch, h hidden, t tensor-parallel size. Activations are [s, b, h], Megatron's
order; with sequence parallelism they are [s/t, b, h] between the matrices. A ``Llama`` is one chunk of the model: the
layers of one (virtual) pipeline stage, with the embedding before the first and the output head after the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_llama.config import ModelConfig
from megatron_llama.model.document_mask import Documents
from megatron_llama.model.kv_cache import KVCache, LayerCache
from megatron_llama.model.loss import hide_padding, token_losses
from megatron_llama.model.rotary import at_positions, rotary_table, rotate
from megatron_llama.plan.shapes import head_dim, kv_heads_per_rank

Rotary = tuple[torch.Tensor, torch.Tensor]


def _no_init(_: torch.Tensor) -> None:
    """Weights are filled by model/init.py; megatron-core still wants a function."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] to [..., h], in x's dtype."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention; each tensor-parallel rank has its own heads.

    With fewer kv heads than ranks, neighbouring ranks hold copies of one kv head (parallel/tensor.py keeps the copies
    equal).
    """

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute_core: bool) -> None:
        super().__init__()
        tp = mcore.tensor_model_parallel_size
        self.head_dim = head_dim(model)
        self.num_heads = model.num_attention_heads // tp
        self.num_kv_heads = kv_heads_per_rank(model, tp)
        self.recompute_core = recompute_core
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = ColumnParallelLinear(
            model.hidden_size, heads * tp * self.head_dim, config=mcore, init_method=_no_init, bias=False
        )
        self.o_proj = RowParallelLinear(
            model.num_attention_heads * self.head_dim,
            model.hidden_size,
            config=mcore,
            init_method=_no_init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(
        self, x: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """[s(/t), b, h] to [s(/t), b, h]; ``mask`` as Documents makes it, where examples are packed."""
        qkv, _ = self.qkv_proj(x)
        if self.recompute_core and torch.is_grad_enabled():
            core = checkpoint(self._core, qkv, rotary, mask, use_reentrant=False, preserve_rng_state=False)
        else:
            core = self._core(qkv, rotary, mask, cache)
        return self.o_proj(core)[0]

    def _core(
        self, qkv: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """[s, b, (heads + 2 kv heads) * d] to [s, b, heads * d], of this rank's heads."""
        s, b = qkv.shape[:2]
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.view(s, b, -1, self.head_dim).split(sizes, dim=2)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (rotate(q, *rotary), rotate(k, *rotary), v))  # [b, heads, s, d]
        grouped = self.num_heads != self.num_kv_heads
        if cache is not None:
            out = cache.attend(q, k, v)
        elif mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            # Fused kernels that take a mask want a kv head for each head; the others hold all scores in memory.
            k, v = (y.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for y in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.permute(2, 0, 1, 3).reshape(s, b, self.num_heads * self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute_product: bool) -> None:
        super().__init__()
        self.recompute_product = recompute_product
        self.gate_up_proj = ColumnParallelLinear(
            model.hidden_size, 2 * model.intermediate_size, config=mcore, init_method=_no_init, bias=False
        )
        self.down_proj = RowParallelLinear(
            model.intermediate_size,
            model.hidden_size,
            config=mcore,
            init_method=_no_init,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s(/t), b, h] to [s(/t), b, h]."""
        gate_up, _ = self.gate_up_proj(x)
        if self.recompute_product and torch.is_grad_enabled():
            product = checkpoint(self._product, gate_up, use_reentrant=False, preserve_rng_state=False)
        else:
            product = self._product(gate_up)
        return self.down_proj(product)[0]

    @staticmethod
    def _product(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, model: ModelConfig, mcore: TransformerConfig, recompute: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.self_attn = Attention(model, mcore, recompute == "selective")
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
        self.mlp = FeedForward(model, mcore, recompute == "selective")
        self.recompute = recompute == "full"
        self.draws_random_numbers = False

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """[s(/t), b, h] to [s(/t), b, h]; ``mask`` for packed examples, ``cache`` for generating."""
        if self.recompute and torch.is_grad_enabled():
            random = self.draws_random_numbers
            return checkpoint(self._forward, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=random)
        return self._forward(x, cos, sin, mask, cache)

    def _forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        h = x + self.self_attn(self.input_layernorm(x), (cos, sin), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Llama(nn.Module):
    """One chunk of the model: ``layers`` by global number, with embedding and head where the chunk is the first or
    the last.

    The attributes below the line are what megatron-core's schedules ask of a model.
    """

    def __init__(
        self,
        model: ModelConfig,
        mcore: TransformerConfig,
        layers: Sequence[int],
        *,
        padded_vocab_size: int,
        recompute: str = "none",
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = is_first, is_last
        self.padded_vocab_size = padded_vocab_size
        self._rotary: Rotary | None = None
        if is_first:
            self.embed_tokens = VocabParallelEmbedding(
                padded_vocab_size,
                model.hidden_size,
                init_method=_no_init,
                config=mcore,
                reduce_scatter_embeddings=mcore.sequence_parallel,
            )
        self.layers = nn.ModuleDict({str(i): Block(model, mcore, recompute) for i in layers})
        if is_last:
            self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, mcore.params_dtype)
            self.lm_head = ColumnParallelLinear(
                model.hidden_size,
                padded_vocab_size,
                config=mcore,
                init_method=_no_init,
                bias=False,
                # Tied and on one stage, the head borrows the embedding's weight; on a later stage it holds a copy.
                skip_weight_param_allocation=model.tie_word_embeddings and is_first,
            )
        # ----------------------------------------------------------------------------------------------------
        self.config = mcore
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = model.tie_word_embeddings
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Take the activations [s(/t), b, h] of the stage before."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Token ids [b, s] to what this chunk makes of them; ``documents`` says which belong together, where several
        examples are packed into a sequence.

        The last chunk gives the loss of each token [s, b], fp32, when it has labels [b, s] (next token ids), else
        this rank's logits [s, b, vocabulary/t], fp32. Other chunks give activations [s(/t), b, h]. With a ``cache``,
        which is for generating, without sequence parallelism, the tokens follow what is in it.
        """
        if self.is_first:
            # With sequence parallelism megatron-core turns [b, s] round itself, and keeps this rank's part of s.
            x = self.embed_tokens(tokens if self.config.sequence_parallel else tokens.t())
        else:
            assert self.input_tensor is not None
            # megatron-core asks for the gradient of what it receives even where there will be none; a compiled block
            # would then differ from those that follow.
            x = self.input_tensor if torch.is_grad_enabled() else self.input_tensor.detach()
        (cos, sin), mask = cache.rotary if cache is not None else self._rotary_for(tokens), None
        if documents is not None:
            positions, mask = documents.positions(), documents.mask()  # once, for all layers
            cos, sin = at_positions(cos, positions), at_positions(sin, positions)
        for number, block in self.layers.items():
            x = block(x, cos, sin, mask, None if cache is None else cache.layers[int(number)])
        if cache is not None:
            x = cache.only_wanted(x)
        if not self.is_last:
            return x
        borrowed = self.embed_tokens.weight if self.lm_head.weight is None else None
        logits, _ = self.lm_head(self.norm(x), weight=borrowed)
        logits = hide_padding(logits.float(), self.model.vocab_size)
        return logits if labels is None else token_losses(logits, labels)

    def _rotary_for(self, tokens: torch.Tensor) -> Rotary:
        length = tokens.shape[1]
        if self._rotary is None or self._rotary[0].shape[0] != length or self._rotary[0].device != tokens.device:
            self._rotary = rotary_table(self.model, length, tokens.device)
        return self._rotary
