"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), and its form over heads that tensor-parallel ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.model.recompute import recomputable

Normalize = Callable[[Tensor, Tensor, float], Tensor]
"""From x, weight and eps to x / rms(x) * weight."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, apply: Normalize | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps
        self.normalize = apply or normalize

    @recomputable
    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h], in x's dtype."""
        return self.normalize(x, self.weight, self.eps)


class ProjectionNorm(RMSNorm):
    """RMSNorm of q or k over the heads of all tensor-parallel ranks, as in OLMo 2 (arXiv:2501.00656).

    A rank has the weights of its heads, [heads * d]. Only one value per token crosses ranks: the mean of squares in the
    forward pass, and the mean of its gradient in the backward pass. Ranks that share a kv head count it equally often,
    so the mean over ranks is the mean over heads. In the backward pass each of them has a part of its gradient.

    Args:
        group: the tensor-parallel ranks. None: one rank.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        super().__init__(size, eps, dtype)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads, d] to [s, b, heads, d], in x's dtype. A collective over the tensor-parallel ranks."""
        flat = x.flatten(-2)
        inverse = torch.rsqrt(mean_over_ranks(flat.detach().float().pow(2), self.group) + self.eps)
        return scale_projection(flat, self.weight, inverse, self.group).view(x.shape)


@recomputable
def scale_projection(x: Tensor, weight: Tensor, inverse: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x * inverse * weight, [s, b, heads * d]. Recomputation needs no collective, as ``inverse`` is saved."""
    scaled: Tensor = _NormalizeProjection.apply(x, weight, inverse, group)
    return scaled


def mean_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean over the last dimension and over the ranks of ``group``, [..., 1]."""
    mean = x.mean(-1, keepdim=True)
    if group is None:
        return mean
    dist.all_reduce(mean, group=group)
    return mean / group.size()


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight."""
    output: Tensor = _Normalize.apply(x, weight, eps)
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight, and 1 / rms(x), fp32.

    x / rms(x) is rounded to x's dtype before the multiplication by the weight, as in Hugging Face's LlamaRMSNorm.
    ``torch.nn.functional.rms_norm`` rounds once, after the multiplication.
    """
    x_fp32 = x.float()
    inverse = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x_fp32 * inverse).type_as(x), inverse


class _Normalize(torch.autograd.Function):
    """RMSNorm that saves x and 1 / rms(x). Autograd would save fp32 copies of x and x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, inverse = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        return *norm_gradients(grad, x, weight, inverse, ctx.needs_input_grad[1]), None


class _NormalizeProjection(torch.autograd.Function):
    """``_Normalize`` with a given ``inverse``, whose dependence on x the gradient includes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inverse: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight, inverse)
        ctx.group = group
        return weight * (x.float() * inverse).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        return *norm_gradients(grad, x, weight, inverse, ctx.needs_input_grad[1], ctx.group), None, None


def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, needs_weight: bool, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and weight; None for a frozen weight. ``inverse``: 1 / rms(x), fp32 [..., 1]."""
    quotient = x.float() * inverse
    grad_weight = None
    if needs_weight:
        by_token = grad * quotient.type_as(x)
        grad_weight = by_token.flatten(0, -2).sum(0, dtype=torch.float32).type_as(weight)
    scaled = (grad * weight).float()
    return (inverse * (scaled - quotient * mean_over_ranks(scaled * quotient, group))).type_as(x), grad_weight
