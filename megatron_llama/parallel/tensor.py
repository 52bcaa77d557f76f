"""The matmul of tensor-parallel layers that torch.compile can trace.

megatron-core's linear layers (model/llama.py) wait for their collectives explicitly, which are graph breaks. This
version uses functional collectives, so torch.compile traces it into one graph. The backward pass gathers the input once
more, unless the compiler saves the gathered input, as Inductor does (docs/guides/tools/traffic.md).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor


def traceable_matmul(input: torch.Tensor, weight: torch.Tensor, bias: None, **how: Any) -> torch.Tensor:
    """Multiply input [s(/t), b, in] by weight [out, in] to [s, b, out]. megatron-core calls it as ``_forward_impl``."""
    assert bias is None, "biases are added outside"
    if not how["allreduce_dgrad"] and not how["sequence_parallel"]:
        return torch.matmul(input, weight.t())
    output: torch.Tensor = _ParallelLinear.apply(input, weight, how["tp_group"], how["sequence_parallel"])
    return output


class _ParallelLinear(torch.autograd.Function):
    """x Wᵀ whose gradient of x is summed over the tensor-parallel ranks."""

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
