"""The global 2-norm: each value counts once, however many ranks hold a copy of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard

PIECE = 2**20
"""Numbers of a gradient that are widened at a time on a CPU: enough to hide the calls, few enough for its cache."""


@torch.no_grad()
def gradient_norm(shards: Iterable[Shard], device: torch.device, *, own_shares: bool = False) -> torch.Tensor:
    """2-norm of all gradients, fp32 scalar, the same on all ranks.

    ``own_shares``: the data-parallel ranks have not summed theirs (1-bit Adam); then it is the root of the sum of the
    squares of all their norms, which is infinite or NaN if one of them is.
    """
    with_gradient = [(s, s.grad) for s in shards if s.grad is not None]
    parts = [(s, part) for s, grad in with_gradient for part in s.owned(grad, every_replica=own_shares)]
    whole = [part for s, part in parts if part.dtype == s.parameter.dtype]
    narrow = [part for s, part in parts if part.dtype != s.parameter.dtype]  # Plan.narrow_gradients
    return _global_norm(_norms(whole) + _norms_by_pieces(narrow), device)


@torch.no_grad()
def parameter_norm(shards: Iterable[Shard], device: torch.device) -> torch.Tensor:
    """2-norm of all weights, fp32 scalar, the same on all ranks."""
    # Keep the norms, not the values: all quantized shards in fp32 at once would be the whole model.
    return _global_norm([norm for shard in shards for norm in _norms(shard.owned(shard.values))], device)


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


def _norms(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The norms of the parts' rows, in fp32. Of a whole matrix torch adds the squares one after the other on a CPU,
    which loses 0.3 % of the norm of 45 M numbers, and other shares of the same matrix in other layouts."""
    return [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).view(-1) for part in parts]


def _norms_by_pieces(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """``_norms`` of parts in bf16 on a CPU, where torch's own takes five times as long: some rows are widened at a
    time, in memory that stays in the cache."""
    rows = [some for part in parts for some in part.split(max(1, PIECE // math.prod(part.shape[1:])))]
    wide = torch.empty(max((some.numel() for some in rows), default=0))
    return _norms(wide[: some.numel()].view(some.shape).copy_(some) for some in rows)


def _global_norm(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of all ranks' parts, of whose pieces these are this rank's norms."""
    if norms:
        squares = torch.cat(norms).square().sum()
    else:  # on a rank that counts none of its copies
        squares = torch.zeros((), device=device)
    dist.all_reduce(squares)
    return squares.sqrt()
