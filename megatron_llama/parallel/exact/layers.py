"""Norms, SwiGLU, attention and embedding of exact mode.

IEEE's basic operations on elements, and torch's sums over the last dimension, are bit-identical in all layouts. Other
functions need not: on a CPU, torch's sigmoid has other bits at the end of a tensor than elsewhere. So exponentials run
on blocks, and attention head by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor

from megatron_llama.devices.attention_inputs import AttentionInputs
from megatron_llama.devices.kernels import EAGER, AttentionKernels
from megatron_llama.model.recompute import recomputable
from megatron_llama.model.rms_norm import RMSNorm
from megatron_llama.parallel.context_parallel import DividedInputs, Ulysses
from megatron_llama.parallel.exact.linear import Context
from megatron_llama.parallel.exact.matmuls import aligned
from megatron_llama.parallel.exact.sums import Total, Tree, add_pairs

Mean = Callable[[Tensor], Tensor]
"""Mean over the dimensions that a norm covers, which broadcasts to its input."""


class ExactNorm(RMSNorm):
    """``RMSNorm`` with the weight's gradient summed over tokens as integers."""

    total: Total
    counts: bool
    """Whether this rank adds the weight's gradient; False if another rank has the same heads."""

    @recomputable
    def forward(self, x: Tensor) -> Tensor:
        """[..., h] to [..., h]."""
        how = self.total, lambda squares: squares.mean(-1, keepdim=True), self.counts
        normalized: Tensor = _ExactNormalize.apply(x.contiguous(), self.weight, self.eps, *how)
        return normalized


class _ExactNormalize(torch.autograd.Function):
    """Norms of model/rms_norm.py by ``mean``, with the weight's gradient summed over tokens as integers.

    The weight has the shape of the dimensions that the norm covers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, total: Total, mean: Mean, counts: bool = True
    ) -> Tensor:
        x_fp32 = x.float()
        inverse = torch.rsqrt(mean(x_fp32.pow(2)) + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.total, ctx.mean, ctx.counts = total, mean, counts
        return weight * (x_fp32 * inverse).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad = grad.contiguous()
        quotient = x.float() * inverse
        if ctx.counts:
            ctx.total.add_sum((grad * quotient.type_as(x)).view(-1, weight.numel()))
        ctx.total.end(grad.device)
        scaled = (grad * weight).float()
        along = ctx.mean(scaled * quotient)
        return (inverse * (scaled - quotient * along)).type_as(x), *[None] * 5


class Heads(NamedTuple):
    """The heads of a norm over all heads of q or k."""

    tree: Tree
    """Its group has the ranks that split the heads."""
    copies: int
    """Neighboring ranks that hold the same head."""

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x [s, b, heads, d] over the heads of all ranks and over d, [s, b, 1, 1]."""
        by_head = x.sum(-1).movedim(2, 0)
        unique = self.tree.gather(by_head)[:: self.copies]
        return (add_pairs(unique.unbind()) / (len(unique) * x.shape[3]))[..., None, None]


class ExactProjectionNorm(RMSNorm):
    """``ProjectionNorm`` with sums over heads in the tree's order. Has collectives, so it is not recomputable."""

    total: Total
    heads: Heads

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads, d] to [s, b, heads, d]."""
        weight, x = self.weight.view(x.shape[2:]), x.contiguous()
        normalized: Tensor = _ExactNormalize.apply(x, weight, self.eps, self.total, self.heads.mean)
        return normalized


class Units(NamedTuple):
    """This rank's intermediate units."""

    blocks: int
    context: Context

    def parts(self, shape: torch.Size) -> Iterator[tuple[slice, int, slice]]:
        """Yield the index of each span, sequence and block in a tensor [s, b, units / t]."""
        width = shape[2] // self.blocks
        for span in self.context.spans(shape[0]):
            for i in range(shape[1]):
                for j in range(self.blocks):
                    yield span, i, slice(j * width, (j + 1) * width)


@recomputable
def swiglu(gate_up: Tensor, units: Units) -> Tensor:
    """silu(gate) * up of [s, b, 2 units / t]."""
    gate, up = gate_up.chunk(2, dim=-1)
    product: Tensor = _ExactSwiGLU.apply(gate, up, units)
    return product


class _ExactSwiGLU(torch.autograd.Function):
    """silu(gate) * up in fp32, rounded once, block by block. Saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, units: Units) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.units = units
        product = gate.new_empty(gate.shape)
        for part in units.parts(gate.shape):
            gate_fp32, up_fp32 = aligned(gate[part]).float(), aligned(up[part]).float()
            product[part] = gate_fp32 * _sigmoid(gate_fp32) * up_fp32
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grads = grad.new_empty(2, *grad.shape)
        for part in ctx.units.parts(gate.shape):
            gate_fp32, up_fp32, grad_fp32 = (aligned(x[part]).float() for x in (gate, up, grad))
            sigmoid = _sigmoid(gate_fp32)
            grads[0][part] = grad_fp32 * up_fp32 * (sigmoid * (1 + gate_fp32 * (1 - sigmoid)))
            grads[1][part] = grad_fp32 * (gate_fp32 * sigmoid)
        return grads[0], grads[1], None


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class SharedHeads:
    """Attention in which each query head has a copy of its kv head, and runs alone.

    Args:
        tree: The query heads of a kv head, over the ranks that share it.
        group: Context-parallel ranks. None: one rank.
    """

    def __init__(self, tree: Tree, group: dist.ProcessGroup | None) -> None:
        self.tree = tree
        self.divided = None if group is None else Ulysses(HeadByHead(), group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, visible: Any = None) -> Tensor:
        """Return the attention of q [b, heads, s, d] to k and v [b, kv heads, s, d] as [b, heads, s, d]."""
        copies = q.shape[1] // k.shape[1]
        k, v = (_Share.apply(x, copies, self.tree) for x in (k, v))
        if isinstance(visible, DividedInputs):
            assert self.divided is not None, "the inputs are divided by context-parallel ranks"
            return self.divided.attend(q, k, v, visible.of_whole)
        return HeadByHead().attend(q, k, v, visible)


class HeadByHead(AttentionKernels):
    """Attention with one call per sequence and head: a kernel may choose its path by the number of heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: AttentionInputs | None = None) -> Tensor:
        """Return the attention of q, k and v [b, heads, s, d] as [b, heads, s, d]."""
        rows = []
        for i in range(q.shape[0]):
            seen = _of_row(visible, i)
            heads = ([x[i : i + 1, j : j + 1].contiguous() for x in (q, k, v)] for j in range(q.shape[1]))
            rows.append(torch.cat([EAGER.attend(query, key, value, seen) for query, key, value in heads], dim=1))
        return torch.cat(rows)


def _of_row(visible: AttentionInputs | None, row: int) -> AttentionInputs | None:
    """Return the visible keys of one sequence of a micro batch."""
    if visible is None:
        return None
    lengths = None if visible.lengths is None else visible.lengths[row : row + 1]
    mask = None if visible.mask is None else visible.mask[row if len(visible.mask) > 1 else 0][None]
    return visible._replace(lengths=lengths, mask=mask)


class _Share(torch.autograd.Function):
    """Repeats each kv head for its query heads on this rank; the gradient is the sum over all of its query heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, tree: Tree) -> Tensor:
        ctx.copies, ctx.tree = copies, tree
        return x.repeat_interleave(copies, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        heads = grad.unflatten(1, (-1, ctx.copies))
        return ctx.tree.total(ctx.tree.nodes(heads.unbind(2))).type_as(grad), None, None


class ExactEmbedding(VocabParallelEmbedding):
    """Token ids to [s(/t), b, h]. Takes [b, s] under sequence parallelism, otherwise [s, b]."""

    tree: Tree
    total: Total

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the ids up."""
        scatters, tree, total = self.reduce_scatter_embeddings, self.tree, self.total
        return _Embed.apply(self.weight, tokens.t() if scatters else tokens, tree, total, scatters)  # type: ignore


class _Embed(torch.autograd.Function):
    """Rows of a table that tensor-parallel ranks split; the gradient is summed over tokens as integers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, tree: Tree, total: Total, scatters: bool) -> Tensor:
        rank = 0 if tree.group is None else tree.group.rank()
        local = tokens - rank * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        local = torch.where(here, local, 0)
        ctx.save_for_backward(local, here)
        ctx.how = tree, total, scatters
        rows = F.embedding(local, weight) * here.unsqueeze(-1)  # the other ranks' rows are zeros: their sum is exact
        if tree.group is None:
            return rows
        if not scatters:
            dist.all_reduce(rows, group=tree.group)
            return rows
        part = rows.new_empty(rows.shape[0] // tree.ranks, *rows.shape[1:])
        dist.reduce_scatter_tensor(part, rows.contiguous(), group=tree.group)
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        local, here = ctx.saved_tensors
        tree, total, scatters = ctx.how
        whole = tree.gather(grad) if scatters else grad
        total.add_rows(local.flatten(), (whole * here.unsqueeze(-1)).flatten(0, 1))
        total.end(grad.device)
        return None, None, None, None, None
