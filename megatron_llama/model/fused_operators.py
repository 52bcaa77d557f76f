"""Norms, rotations and SwiGLU of uncompiled blocks in few kernels, on devices that fuse operators (``fuse_rows``).

Forward and backward functions are fused separately, so that the saved tensors are the same with and without a compiler.
Results are rounded as in the plain functions. Blocks that torch.compile compiles do not need this: it fuses them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.devices.kernels import Kernels
from megatron_llama.model.recompute import recomputable
from megatron_llama.model.rms_norm import norm_gradients, rms_norm
from megatron_llama.model.rotary import rotated

aten = torch.ops.aten


class FusedOperators(NamedTuple):
    """Parts of uncompiled blocks (model/llama.py)."""

    normalize: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]


@cache
def fused_operators(kernels: Kernels) -> FusedOperators | None:
    """Return the fused operators, or None if the device does not fuse."""
    plain = (rms_norm, norm_gradients, rotated, rotation_gradient, swiglu, swiglu_gradient)
    fused = [kernels.fuse_rows(function) for function in plain]
    if None in fused:
        return None
    norm, rotation, glu = (_Pair(*fused[start : start + 2]) for start in (0, 2, 4))  # type: ignore[arg-type]

    def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _FusedNormalize.apply(x, weight, eps, norm)  # type: ignore[no-any-return]

    @recomputable
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _Rotate.apply(x, cos, sin, rotation)  # type: ignore[no-any-return]

    @recomputable
    def activation(gate_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_up, glu)  # type: ignore[no-any-return]

    return FusedOperators(normalize, rotate, activation)


class _Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _FusedNormalize(torch.autograd.Function):
    """RMSNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fused: _Pair) -> Tensor:
        output, inverse = fused.forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.fused = fused
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.fused.backward(grad, *ctx.saved_tensors, ctx.needs_input_grad[1]), None, None


class _Rotate(torch.autograd.Function):
    """Rotation by the angles of each position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, fused: _Pair) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.fused = fused
        return fused.forward(x, cos, sin)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.fused.backward(grad, *ctx.saved_tensors), None, None, None


def rotation_gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of ``rotate``, rounded as autograd does: x is cast to fp32 twice, so two casts are added."""
    first, second = (grad.float() * sin).chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1).type_as(grad) + (grad.float() * cos).type_as(grad)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, fused: _Pair) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.fused = fused
        return fused.forward(gate_up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.fused.backward(grad, *ctx.saved_tensors), None


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, as model/llama.py."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``swiglu``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat((aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)
