"""Matmuls of the blocks in float8, with torchao's recipes for training (``trainer.float8``).

A linear layer has three matmuls: the output x Wᵀ, the gradient of the input g W and the gradient of the weight gᵀ x.
Each operand is cast to float8 with a dynamic scale, max float8 / max |operand|:

    recipe        a scale for                                  dtype of x and W    dtype of g
    tensorwise    the whole operand                            e4m3                e5m2
    rowwise       each row of the left operand and each        e4m3                e4m3
                  column of the right one, a power of two

Weights, activations between layers, and results of matmuls keep their dtype; the embedding, norms, attention and the
head do not use float8. Source: torchao 0.18, ``torchao.float8`` (``Float8LinearConfig.from_recipe_name``). On
one rank a matmul is bit-identical to torchao's emulation (tests/parallel/test_float8.py). q, k and v are one matrix
here, and so are gate and up.

Tensor-parallel ranks exchange the maximum of an operand that they split, as with torchao on DTensors. Context-parallel
ranks do the same, because they split the tokens. So a layout has the scales of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

from megatron_llama.config import ModelConfig
from megatron_llama.devices.kernels import Float8Operand, Kernels
from megatron_llama.model.llama import COLUMN_PARALLEL, parallel_linear
from megatron_llama.parallel.groups import Groups

LEAST_MAXIMUM = 1e-12
"""Divisor of a scale for an operand of zeros, as in torchao."""


class Float8Recipe(NamedTuple):
    """How operands are cast."""

    by_row: bool
    """A scale per row or column, rounded down to a power of two; otherwise one scale."""
    grad: torch.dtype
    """Dtype of the output's gradient."""
    operand: torch.dtype = torch.float8_e4m3fn
    """Dtype of inputs and weights."""


RECIPES = {"tensorwise": Float8Recipe(False, torch.float8_e5m2), "rowwise": Float8Recipe(True, torch.float8_e4m3fn)}


class Layer(NamedTuple):
    """Recipe, kernels and process groups of a layer's matmuls."""

    recipe: Float8Recipe
    kernels: Kernels
    is_column: bool
    """Whether tensor-parallel ranks split the rows of the weight, otherwise its columns."""
    group: dist.ProcessGroup | None
    """The tensor-parallel ranks; None if there is one."""
    gathers: bool
    """Whether the input is split along the sequence and gathered (sequence parallelism)."""
    context: dist.ProcessGroup | None
    """The context-parallel ranks, which split the tokens; None if there is one."""


def float8_linear(
    matrix: str, model: ModelConfig, mcore: TransformerConfig, *, name: str, kernels: Kernels, groups: Groups
) -> nn.Module:
    """Build a parallel linear layer with the matmuls of recipe ``name``, tensorwise or rowwise."""
    group, context = (groups[axis] if groups[axis].size() > 1 else None for axis in ("tp", "cp"))
    is_column = matrix in COLUMN_PARALLEL
    layer = Layer(RECIPES[name], kernels, is_column, group, is_column and mcore.sequence_parallel, context)
    return parallel_linear(matrix, model, mcore, matmul=partial(_linear, layer))


def _linear(layer: Layer, input: torch.Tensor, weight: torch.Tensor, bias: None, **_: Any) -> torch.Tensor:
    """Multiply input [s(/t), b, in] by weight [out, in] to [s, b, out]. megatron-core calls it as ``_forward_impl``."""
    assert bias is None, "a Llama has no biases"
    output: torch.Tensor = _Float8Linear.apply(input, weight, layer)
    return output


class _Float8Linear(torch.autograd.Function):
    """x Wᵀ with float8 operands. The gradient of a column-parallel x is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no x
        ctx.layer = layer
        whole = _gathered(x, layer)
        split_in = None if layer.is_column else layer.group
        by_token = None if layer.recipe.by_row else layer.context  # a token is on one context-parallel rank
        rows = _cast(whole.flatten(0, 1), layer.recipe.operand, layer, -1, split_in, by_token)
        # Tensorwise: one scale for the whole matrix, whichever of its sides is split.
        columns = _cast(weight.t(), layer.recipe.operand, layer, 0, split_in if layer.recipe.by_row else layer.group)
        return layer.kernels.float8_mm(rows, columns, x.dtype, fast=True).view(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: Layer = ctx.layer
        split_out = layer.group if layer.is_column else None
        flat = grad.flatten(0, 1)
        by_row = layer.recipe.by_row
        rows = _cast(flat, layer.recipe.grad, layer, -1, split_out, None if by_row else layer.context)
        columns = _cast(weight, layer.recipe.operand, layer, 0, split_out if by_row else layer.group)
        partial_sum = layer.kernels.float8_mm(rows, columns, grad.dtype).view(*grad.shape[:-1], weight.shape[1])
        grad_x = _summed(partial_sum, layer)
        if x is None:
            return grad_x, None, None
        # Contracted over tokens, which tensor-parallel ranks do not split: by row, they exchange no scales here.
        whole = _gathered(x, layer).flatten(0, 1)
        split_in = None if layer.is_column else layer.group
        left = _cast(flat.t(), layer.recipe.grad, layer, -1, None if by_row else split_out, layer.context)
        right = _cast(whole, layer.recipe.operand, layer, 0, None if by_row else split_in, layer.context)
        return grad_x, layer.kernels.float8_mm(left, right, grad.dtype), None


def _gathered(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return the input of all tokens [s, b, in]."""
    if not layer.gathers or layer.group is None:
        return x
    whole: torch.Tensor = all_gather_tensor(x, 0, layer.group)
    return whole


def _summed(grad: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Sum the gradient of a column-parallel layer's input over the ranks, each of which has a part of the rows."""
    if not layer.is_column or layer.group is None:
        return grad
    if layer.gathers:
        scattered: torch.Tensor = reduce_scatter_tensor(grad, "sum", 0, layer.group)
        return scattered
    reduced: torch.Tensor = all_reduce(grad, "sum", layer.group)
    return reduced


def _cast(
    values: torch.Tensor, dtype: torch.dtype, layer: Layer, dim: int, *groups: dist.ProcessGroup | None
) -> Float8Operand:
    """Cast a matrix to float8.

    Args:
        dim: the dimension that the matmul sums over, -1 or 0, for a scale per row or column.
        groups: ranks that split the values behind one scale; None: no ranks split them along this axis.
    """
    by_row = layer.recipe.by_row
    maximum = values.abs().amax(dim, keepdim=True) if by_row else values.abs().amax()
    maximum = maximum.float()
    for group in groups:
        if group is not None:
            maximum = all_reduce(maximum, "max", group)
    # In fp64, as torchao: eager and compiled code are then bit-identical.
    largest = torch.finfo(dtype).max
    scale = (largest / maximum.double().clamp(min=LEAST_MAXIMUM)).float()
    if by_row:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return Float8Operand((values.float() * scale).clamp(-largest, largest).to(dtype), scale)
