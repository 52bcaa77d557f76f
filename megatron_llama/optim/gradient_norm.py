"""Global 2-norms, in which each value counts once, regardless of the number of ranks that hold a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.devices.kernels import largest_magnitude
from megatron_llama.parallel import Shard

_SQUARED_AT_ONCE = 2**18
"""Values that ``_exact_norm`` casts to fp64 together: they fit a processor's cache."""


@torch.no_grad()
def gradient_norm(
    shards: Iterable[Shard], device: torch.device, *, unreduced: bool = False, exact: bool = False
) -> torch.Tensor:
    """Return the 2-norm of all gradients, fp32 scalar, the same on all ranks, with ``exact`` in all layouts.

    With ``unreduced``, gradients are not summed over data-parallel ranks (1-bit Adam). The result is then the root of
    the sum of the ranks' squared norms, which is not finite if one of them is not.
    """
    with_gradient = [(s, s.grad) for s in shards if s.grad is not None]
    owned = [(s, part) for s, grad in with_gradient for part in s.owned(grad, every_replica=unreduced)]
    # Low precision (Storage.keeps_bf16_grads) is last. Another order would change the last bits of the sum.
    parts = [part for s, part in sorted(owned, key=lambda pair: pair[1].dtype != pair[0].parameter.dtype)]
    return _exact_norm(parts, device) if exact else _global_norm(_norms(parts, device), device)


@torch.no_grad()
def parameter_norm(shards: Iterable[Shard], device: torch.device, *, exact: bool = False) -> torch.Tensor:
    """Return the 2-norm of all weights, fp32 scalar, the same on all ranks, with ``exact`` in all layouts."""
    if exact:
        return _exact_norm([part for shard in shards for part in shard.owned(shard.values)], device)
    # One shard at a time: all quantized shards in fp32 together would take the memory of the fp32 model.
    return _global_norm([norm for shard in shards for norm in _norms(shard.owned(shard.values), device)], device)


@torch.no_grad()
def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the factor that clips gradients to a global norm of ``largest`` (Pascanu et al. 2013, arXiv:1211.5063).

    Adds 1e-6 to the norm, as torch's ``clip_grad_norm_``. The factor stays on the device: no sync.
    """
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(shards: Iterable[Shard], factor: torch.Tensor) -> None:
    """Multiply all gradients by ``factor``, in place."""
    grads = [grad for shard in shards if (grad := shard.grad) is not None]
    if grads:  # LoRA may adapt no layer of this rank's stage
        torch._foreach_mul_(grads, factor.to(grads[0].device))


def _norms(parts: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return devices.of(device).kernels(compiled=False).norms(parts)


def _global_norm(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the global norm from this rank's partial norms."""
    if norms:
        squares = torch.cat(norms).square().sum()
    else:  # a rank that counts no replica
        squares = torch.zeros((), device=device)
    dist.all_reduce(squares)
    return squares.sqrt()


def _exact_norm(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the global norm from squares that are added as integers, in any order.

    A value is divided by the power of two above the largest one, and its square split into two numbers of 29 bits. So
    sums of up to 2^33 squares are exact. Two collectives.
    """
    largest = torch.zeros((), device=device)
    for part in parts:
        if part.numel():
            largest = torch.maximum(largest, largest_magnitude(part))
    largest = torch.where(largest.isnan(), torch.inf, largest)  # a maximum over ranks may lose NaN
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = torch.frexp(largest).exponent
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64, device=device), -exponent)
    for part in parts:
        for rows in part.split(max(1, _SQUARED_AT_ONCE // max(1, part[:1].numel()))):
            squares = (rows.double() * scale).square_().mul_(2.0**29)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**29)
            sums += torch.stack((high.to(torch.int64).sum(), low.to(torch.int64).sum()))
    dist.all_reduce(sums)
    high, low = sums.double()
    norm = torch.ldexp((high * 2.0**-29 + low * 2.0**-58).sqrt(), exponent).float()
    return torch.where(largest.isfinite(), norm, largest)
