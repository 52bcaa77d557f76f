"""The feed-forward network in chunks of tokens (``trainer.mlp_chunks``).

A block saves only the network's input. The backward pass computes one chunk at a time again, with its gradients. So
tensors [s, b, intermediate] exist for one chunk only. DeepSpeed calls this TiledMLP (ALST, arXiv:2506.13996).
Collectives move the same bytes per pass, in more calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.model.recompute import without_recipes


def run_in_chunks(chunks: int, mlp: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[s(/t), b, h] to [s(/t), b, h]. The last chunk may be shorter. Not compiled."""
    saver: Tensor = _Saver.apply(torch.empty(0, requires_grad=True), x)
    output: Tensor = _InChunks.apply(mlp, forward, chunks, [saver], x, *_trained(mlp))
    return output


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


class _Saver(torch.autograd.Function):
    """A node that saves the network's input before the network runs.

    Functions save tensors after their forward pass. Recomputation of the block stops at the last saved tensor, so it
    would run the network. ``_InChunks`` keeps the output, without which torch 2.11 frees the node.
    """

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return dummy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _InChunks(torch.autograd.Function):
    """The network as one operation. Its parameters are inputs, so that each one has a single gradient."""

    @staticmethod
    def forward(ctx: Any, mlp: Any, run: Any, chunks: int, saver: Any, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.mlp, ctx.run, ctx.chunks, ctx.saver = mlp, run, chunks, saver
        with without_recipes():
            return torch.cat([run(part) for part in x.chunk(chunks)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saver = ctx.saver.pop()  # frees x before the end of the backward pass
        (x,) = saver.grad_fn.saved_tensors
        needs_x = ctx.needs_input_grad[4]
        trained = _trained(ctx.mlp)  # with ZeRO 3, they are gathered again
        of_x: list[Tensor] = []
        sums: list[Tensor] = []
        for part, of_output in zip(x.chunk(ctx.chunks), grad.chunk(ctx.chunks), strict=True):
            part = part.detach().requires_grad_(needs_x)
            with torch.enable_grad():
                output = ctx.run(part)
            grads = torch.autograd.grad(output, [*([part] if needs_x else []), *trained], of_output)
            of_x += grads[:needs_x]
            sums = _added(sums, grads[needs_x:])
        of_trained = [total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True)]
        return None, None, None, None, torch.cat(of_x) if needs_x else None, *of_trained


def _added(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Add the gradients of a chunk to sums in fp32: bf16 sums would depend on the number of chunks."""
    if not sums:
        return [grad.float() for grad in grads]
    return [total.add_(grad) for total, grad in zip(sums, grads, strict=True)]
