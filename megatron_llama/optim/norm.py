"""The global 2-norm: each value counts once, however many ranks hold a copy of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard


@torch.no_grad()
def gradient_norm(shards: Iterable[Shard], device: torch.device, *, own_shares: bool = False) -> torch.Tensor:
    """2-norm of all gradients, fp32 scalar, the same on all ranks.

    ``own_shares``: the data-parallel ranks have not summed theirs (1-bit Adam); then it is the root of the sum of the
    squares of all their norms, which is infinite or NaN if one of them is.
    """
    with_gradient = [(s, s.grad) for s in shards if s.grad is not None]
    return _global_norm([part for s, grad in with_gradient for part in s.owned(grad, every_replica=own_shares)], device)


@torch.no_grad()
def parameter_norm(shards: Iterable[Shard], device: torch.device) -> torch.Tensor:
    """2-norm of all weights, fp32 scalar, the same on all ranks."""
    parts: list[torch.Tensor] = []
    for shard in shards:
        own = list(shard.owned(shard.values))
        # Keep the norms, not the values: all shards dequantized at once would be the model in fp32.
        parts += own if shard.quantized is None else torch._foreach_norm(own) if own else []
    return _global_norm(parts, device)


@torch.no_grad()
def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """The factor that clips gradients to a global norm of ``largest`` (Pascanu et al. 2013, arXiv:1211.5063).

    As torch's ``clip_grad_norm_``, with 1e-6 added to the norm. It stays on the device, so nothing is synchronized.
    """
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(shards: Iterable[Shard], factor: torch.Tensor) -> None:
    """Multiplies all gradients by ``factor``, in place."""
    grads = [grad for shard in shards if (grad := shard.grad) is not None]
    torch._foreach_mul_(grads, factor.to(grads[0].device))


def _global_norm(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if parts:
        squares = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).square().sum()
    else:  # on a rank that counts none of its copies
        squares = torch.zeros((), device=device)
    dist.all_reduce(squares)
    return squares.sqrt()
