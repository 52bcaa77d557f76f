"""FLOPs per token, and model FLOPs utilization (MFU).

A matmul takes 2 FLOPs per weight and token in the forward pass and 4 in the backward pass. Attention's two matmuls are
counted by two conventions: ``causal`` counts the unmasked half of the scores (Megatron-LM), ``full`` counts all scores
(torchtitan, PaLM, NVIDIA's recipes). The embedding lookup, norms, rotations, softmax and recomputation are not counted.
A frozen weight takes 4 FLOPs, as it has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_llama.arch.parameters import head_dim, lora_parameters, matrices_per_layer, saves_module
from megatron_llama.config import FinetuneConfig, ModelConfig

FORWARD_AND_BACKWARD = 3  # the backward pass has two matmuls for each one of the forward pass
CAUSAL, FULL = 6, 12


class RetainedTokens(NamedTuple):
    """Part of each sequence that random-LTD's layers process."""

    layers: int
    """Number of these layers."""
    tokens: int
    """Tokens that they process."""
    of: int
    """Tokens of the sequence."""

    @property
    def share(self) -> float:
        """Share of the tokens."""
        return self.tokens / self.of

    def pairs(self, tokens: float, pairs: float) -> float:
        """Return the expected number of ``pairs`` in attention whose tokens are both retained.

        Args:
            tokens: Pairs of a token with itself.
            pairs: All pairs, including these.
        """
        both = self.share * (self.tokens - 1) / max(1, self.of - 1)
        return (pairs - tokens) * both + tokens * self.share


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of the forward and backward pass per token, in both conventions."""

    causal: float
    """Counts unmasked attention scores."""
    full: float
    """Counts all attention scores."""


def matmul_parameters(model: ModelConfig) -> int:
    """Return the number of weights in matmuls: the blocks' matrices and the output head."""
    return model.num_hidden_layers * matrices_per_layer(model) + model.vocab_size * model.hidden_size


def flops_per_token(model: ModelConfig, seq_length: float, finetune: FinetuneConfig | None = None) -> FlopsPerToken:
    """Return the FLOPs per token in sequences of ``seq_length``, without padding of the vocabulary.

    For packed or padded sequences, ``seq_length`` is the mean over tokens of their document's length, Σ n² / Σ n for
    documents of n tokens: attention between documents and padding count nothing. With a window or blocks it is
    ``Pattern.span``, so that masked keys count in neither convention.
    """
    matmuls = 2 * FORWARD_AND_BACKWARD * matmul_parameters(model)
    if finetune is not None and finetune.method == "lora":
        has_rows = model.tie_word_embeddings and bool(finetune.trainable_token_indices)
        trains_head = has_rows or saves_module("lm_head", model, finetune)
        head = trains_head * model.vocab_size * model.hidden_size
        layers = range(model.num_hidden_layers)
        matmuls -= 2 * (matmul_parameters(model) - head)
        matmuls += 2 * FORWARD_AND_BACKWARD * lora_parameters(model, finetune, layers, padded=False)
    attention = model.num_hidden_layers * model.num_attention_heads * head_dim(model) * seq_length
    return FlopsPerToken(matmuls + CAUSAL * attention, matmuls + FULL * attention)


def with_random_ltd(
    model: ModelConfig, seq_length: float, finetune: FinetuneConfig, retained: RetainedTokens | None
) -> FlopsPerToken:
    """Return ``flops_per_token`` in a step of random-LTD; ``retained`` is None if no token is dropped.

    The result is the mean over all tokens of the batch, dropped ones included. Documents lose tokens at random, so the
    FLOPs of attention are an expected value.
    """
    whole = flops_per_token(model, seq_length, finetune)
    if retained is None:
        return whole
    others = replace(model, num_hidden_layers=model.num_hidden_layers - retained.layers)
    rest = flops_per_token(others, seq_length, finetune)
    matmuls = flops_per_token(model, 0, finetune).full - flops_per_token(others, 0, finetune).full
    attention = retained.pairs(1, seq_length) / seq_length if seq_length else 0.0
    causal, full = (
        getattr(rest, convention)
        + retained.share * matmuls
        + attention * (getattr(whole, convention) - getattr(rest, convention) - matmuls)
        for convention in ("causal", "full")
    )
    return FlopsPerToken(causal, full)


def mfu(flops_per_token: float, tokens_per_second: float, peak_flops: float, world_size: int) -> float:
    """Return the model FLOPs utilization: useful FLOP/s / peak FLOP/s of all devices.

    Args:
        flops_per_token: FLOPs per token of the whole model.
        tokens_per_second: Throughput of the whole job.
        peak_flops: Peak FLOP/s of one device.
        world_size: Number of devices.
    """
    return flops_per_token * tokens_per_second / (peak_flops * world_size)
