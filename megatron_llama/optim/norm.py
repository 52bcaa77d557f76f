"""The global 2-norm, each value counted once however many ranks hold it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard


@torch.no_grad()
def gradient_norm(shards: Iterable[Shard], device: torch.device) -> torch.Tensor:
    """2-norm of all gradients, fp32 scalar, the same on all ranks."""
    return _global_norm([part for s in shards if s.grad is not None for part in s.owned(s.grad)], device)


@torch.no_grad()
def parameter_norm(shards: Iterable[Shard], device: torch.device) -> torch.Tensor:
    """2-norm of all weights, fp32 scalar, the same on all ranks."""
    parts: list[torch.Tensor] = []
    for shard in shards:
        own = list(shard.owned(shard.values))
        # The norm stands for its values: those of all shards, unpacked, would be the model in fp32.
        parts += own if shard.quantized is None else torch._foreach_norm(own) if own else []
    return _global_norm(parts, device)


@torch.no_grad()
def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """What to multiply gradients by for a global norm of at most ``largest`` (Pascanu et al. 2013, arXiv:1211.5063).

    Like torch's ``clip_grad_norm_``, which adds 1e-6 to the norm; no value is read back to the host.
    """
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(shards: Iterable[Shard], factor: torch.Tensor) -> None:
    """Multiply all gradients by ``factor``, in place."""
    grads = [grad for shard in shards if (grad := shard.grad) is not None]
    torch._foreach_mul_(grads, factor.to(grads[0].device))


def _global_norm(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if parts:
        squares = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).square().sum()
    else:  # a rank whose copies all count elsewhere
        squares = torch.zeros((), device=device)
    dist.all_reduce(squares)
    return squares.sqrt()
