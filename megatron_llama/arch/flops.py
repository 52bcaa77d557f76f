"""FLOPs of a token, and the utilisation of the devices' peak (MFU).

A matrix product takes 2 FLOPs per weight and token in the forward pass and 4 in the backward pass. Attention's two
products with the sequence come on top, by either of two conventions: ``causal`` counts the half of the square that is
not masked (Megatron-LM), ``full`` counts all of it (torchtitan, PaLM, NVIDIA's recipes). The input embedding is a
look-up and costs nothing; norms, rotations and the softmax are not counted; what recomputation does a second time is
not counted either. A weight that LoRA leaves frozen takes 4 FLOPs, not 6: it has no gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_llama.arch.shapes import head_dim, lora_parameters, matrices_per_layer
from megatron_llama.config import FinetuneConfig, ModelConfig

FORWARD_AND_BACKWARD = 3  # the backward pass has two products for each one of the forward pass
CAUSAL, FULL = 6, 12


class RetainedTokens(NamedTuple):
    """The part of each sequence that some of the layers see."""

    layers: int
    """How many layers."""
    tokens: int
    """Tokens that they see."""
    of: int
    """Tokens of the sequence."""

    @property
    def share(self) -> float:
        """Of the tokens."""
        return self.tokens / self.of

    def pairs(self, tokens: float, pairs: float) -> float:
        """How many of ``pairs`` of tokens that see each other, ``tokens`` of them being a token and itself, are
        expected to be left in a random subset: both of a pair must be in it."""
        both = self.share * (self.tokens - 1) / max(1, self.of - 1)
        return (pairs - tokens) * both + tokens * self.share


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of forward and backward for one token of training, in both conventions."""

    causal: float
    """Attention counted where it is not masked."""
    full: float
    """Attention counted as the whole square."""


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: the blocks' matrices and the output head."""
    return model.num_hidden_layers * matrices_per_layer(model) + model.vocab_size * model.hidden_size


def flops_per_token(model: ModelConfig, seq_length: float, finetune: FinetuneConfig | None = None) -> FlopsPerToken:
    """FLOPs that one token costs in a sequence of ``seq_length``; padding of the vocabulary is not counted.

    Where sequences are packed or padded, ``seq_length`` is the length of a token's own document, averaged over the
    tokens: Σ n² / Σ n for documents of n tokens. Attention then counts inside documents, and padding not at all. With a
    window or blocks it is ``Pattern.span`` in place of n: what is left out counts in neither convention.
    """
    products = 2 * FORWARD_AND_BACKWARD * matmul_parameters(model)
    if finetune is not None and finetune.method == "lora":
        head = model.vocab_size * model.hidden_size if "lm_head" in finetune.modules_to_save else 0
        products -= 2 * (matmul_parameters(model) - head)
        products += 2 * FORWARD_AND_BACKWARD * lora_parameters(model, finetune, model.num_hidden_layers)
    attention = model.num_hidden_layers * model.num_attention_heads * head_dim(model) * seq_length
    return FlopsPerToken(products + CAUSAL * attention, products + FULL * attention)


def with_random_ltd(
    model: ModelConfig, seq_length: float, finetune: FinetuneConfig, kept: RetainedTokens | None
) -> FlopsPerToken:
    """``flops_per_token`` in a step in which some layers see ``kept`` of each sequence; None: all see all.

    It is what a token of the batch costs on average, so that tokens per second count the dropped ones and FLOPs don't.
    Documents lose tokens at random; what is counted of attention is its expected value.
    """
    whole = flops_per_token(model, seq_length, finetune)
    if kept is None:
        return whole
    others = replace(model, num_hidden_layers=model.num_hidden_layers - kept.layers)
    rest = flops_per_token(others, seq_length, finetune)
    products = flops_per_token(model, 0, finetune).full - flops_per_token(others, 0, finetune).full
    attention = kept.pairs(1, seq_length) / seq_length if seq_length else 0.0
    causal, full = (
        getattr(rest, convention)
        + kept.share * products
        + attention * (getattr(whole, convention) - getattr(rest, convention) - products)
        for convention in ("causal", "full")
    )
    return FlopsPerToken(causal, full)


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops: float, world_size: int) -> float:
    """Model FLOPs utilisation: useful FLOP/s over the peak of all devices, 1.0 being all of it.

    ``tokens_per_second`` is that of the whole job and ``peak_flops`` one device's, so the number of devices is
    part of the formula: dividing by a single device's peak is how published figures came out 16 times too high.
    """
    return flops_per_token * tokens_per_second / (peak_flops * world_size)
