"""Cross entropy over a vocabulary that is split over tensor-parallel ranks: the logits are never gathered."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def hide_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """This rank's logits [s, b, padded/t], fp32, with the vocabulary's padding masked, so that it gets no probability.

    Otherwise the softmax, and with it the loss, would depend on how far tp pads the vocabulary.
    """
    local = logits.shape[-1]
    start = parallel_state.get_tensor_model_parallel_rank() * local
    if start + local <= vocab_size:
        return logits
    is_padding = torch.arange(start, start + local, device=logits.device) >= vocab_size
    return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token [s, b], fp32, from this rank's logits [s, b, padded/t] and labels [b, s]."""
    return vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
