"""The global 2-norm: each value counts once, however many ranks hold a copy of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.parallel import Shard


@torch.no_grad()
def gradient_norm(shards: Iterable[Shard], device: torch.device, *, own_shares: bool = False) -> torch.Tensor:
    """2-norm of all gradients, fp32 scalar, the same on all ranks.

    ``own_shares``: the data-parallel ranks have not summed theirs (1-bit Adam); then it is the root of the sum of the
    squares of all their norms, which is infinite or NaN if one of them is.
    """
    with_gradient = [(s, s.grad) for s in shards if s.grad is not None]
    parts = [(s, part) for s, grad in with_gradient for part in s.owned(grad, every_replica=own_shares)]
    whole = [part for s, part in parts if part.dtype == s.parameter.dtype]
    narrow = [part for s, part in parts if part.dtype != s.parameter.dtype]  # Storage.keeps_bf16_grads
    return _global_norm(_norms(whole + narrow, device), device)


@torch.no_grad()
def parameter_norm(shards: Iterable[Shard], device: torch.device) -> torch.Tensor:
    """2-norm of all weights, fp32 scalar, the same on all ranks."""
    # Keep the norms, not the values: all quantized shards in fp32 at once would be the whole model.
    return _global_norm([norm for shard in shards for norm in _norms(shard.owned(shard.values), device)], device)


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


def _norms(parts: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return devices.of(device).kernels(compiled=False).norms(parts)


def _global_norm(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of all ranks' parts, of whose pieces these are this rank's norms."""
    if norms:
        squares = torch.cat(norms).square().sum()
    else:  # on a rank that counts none of its copies
        squares = torch.zeros((), device=device)
    dist.all_reduce(squares)
    return squares.sqrt()
