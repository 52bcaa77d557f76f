"""megatron-core's parallel linear product in a form that torch.compile can trace into one graph.

megatron-core starts asynchronous collectives in its backward pass, to overlap them with products, and waits for them by
hand; each is a graph break. Here they are functional collectives inside the graph, right beside the products, where
the compiler may put one into the other (async_tp.py). The sums are the same. Under sequence parallelism the input's
shard is saved for the backward pass and gathered again there; a compiler may save the gathered input instead, as
Inductor does (docs/traffic.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

from megatron_llama.model.quantized import is_quantized


def make_traceable(block: nn.Module) -> None:
    """Replaces the product of a block's parallel linear layers. That of quantized weights can be traced already."""
    for layer in block.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and not is_quantized(layer):
            layer._forward_impl = _multiply  # type: ignore[method-assign]


def _multiply(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> torch.Tensor:
    """Input [s(/t), b, h] times weight [o, h] to [s, b, o]; a linear layer's ``_forward_impl``."""
    assert bias is None, "a Llama has no biases"
    if not allreduce_dgrad and not sequence_parallel:
        return torch.matmul(input, weight.t())
    product: torch.Tensor = _Product.apply(input, weight, tp_group, sequence_parallel)
    return product


class _Product(torch.autograd.Function):
    """x Wᵀ, where the gradient of x is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, split: bool) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no x
        ctx.group, ctx.split = group, split
        return torch.matmul(all_gather_tensor(x, 0, group) if split else x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        partial = torch.matmul(grad, weight)
        if ctx.split:
            grad_x = reduce_scatter_tensor(partial, "sum", 0, ctx.group)
        else:
            grad_x = all_reduce(partial, "sum", ctx.group)
        if x is None:
            return grad_x, None, None, None
        whole = all_gather_tensor(x, 0, ctx.group) if ctx.split else x
        grad_weight = torch.matmul(grad.flatten(0, 1).t(), whole.flatten(0, 1))
        return grad_x, grad_weight, None, None
