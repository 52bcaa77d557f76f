"""Parallel linear layers of exact mode: one matmul per sequence and block.

A column-parallel layer splits its outputs into blocks, a row-parallel layer its inputs. All layouts have the results of
the same matmuls (matmuls.py). Outputs of a row-parallel layer and gradients of a column-parallel layer's input are
sums over blocks (``Tree``). Gradients of weights are added sequence by sequence (``Total``).

Context-parallel ranks have spans of a sequence. Long sequences are multiplied span by span in all layouts, except in
the gradient of a weight, a sum over tokens: the ranks gather the sequences, and divide the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.arch.exact_blocks import Rows, span_length
from megatron_llama.model.llama import ColumnLinear, RowLinear
from megatron_llama.parallel.context_division import zigzags
from megatron_llama.parallel.context_parallel import to_natural_order
from megatron_llama.parallel.exact.matmuls import ALL, aligned, product
from megatron_llama.parallel.exact.sums import Total, Tree

Output = tuple[Tensor, Tensor | None]
"""(output, bias that the caller adds), as megatron-core's layers return."""


class Context:
    """The parts of sequences: spans with one matmul each, and the ranks that divide the sequences.

    Args:
        group: Context-parallel ranks. None: one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def spans(self, rows: int) -> list[slice]:
        """Return the spans of this rank's ``rows`` of a sequence."""
        size = span_length(rows * self.ranks)
        return [slice(start, start + size) for start in range(0, rows, size)]

    def gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' parts [s/cp, b, n] of sequences to [s, b, n]."""
        if self.group is None:
            return x
        parts = x.new_empty(self.ranks, *x.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return to_natural_order(parts, zigzags(self.ranks, self.ranks * x.shape[0]))

    def computed(self, blocks: list[slice]) -> list[list[slice]]:
        """Return runs of adjacent blocks of which this rank computes the weight's gradient."""
        return [blocks] if self.group is None else [[block] for block in blocks[self.rank :: self.ranks]]


class ColumnMatmul(NamedTuple):
    """A column-parallel layer: blocks of rows of the weight."""

    rows: list[Rows]
    tree: Tree
    total: Total
    context: Context
    gathers: bool
    """Whether the input is split along the sequence (sequence parallelism)."""

    @property
    def slices(self) -> list[slice]:
        """Rows of each block."""
        return [slice(row.first, row.stop) for row in self.rows]


class RowMatmul(NamedTuple):
    """A row-parallel layer: equal blocks of columns of the weight."""

    blocks: int
    tree: Tree
    total: Total
    context: Context
    scatters: bool
    """Whether the output is split along the sequence (sequence parallelism)."""

    def slices(self, columns: int) -> list[slice]:
        """Return the blocks of a weight with ``columns`` on this rank."""
        size = columns // self.blocks
        return [slice(start, start + size) for start in range(0, columns, size)]


class _ExactLinear(nn.Module):
    """Shared by the two layers: how they multiply, and the sum of the bias's gradient."""

    how: ColumnMatmul | RowMatmul
    bias_total: Total | None = None

    def forward(self, x: Tensor) -> Output:
        """[s(/t), b, in] to [s, b, out/t], or [s, b, in/t] to [s(/t), b, out]."""
        output: Tensor = (_Column if isinstance(self.how, ColumnMatmul) else _Row).apply(x, self.weight, self.how)
        total = self.bias_total
        return output, None if total is None else _Bias.apply(self.bias, output, total)


class ExactColumnLinear(_ExactLinear, ColumnLinear):
    """Column-parallel layer."""


class ExactRowLinear(_ExactLinear, RowLinear):
    """Row-parallel layer."""


def sequences(x: Tensor) -> Iterator[Tensor]:
    """Yield each sequence of x [s, b, n] as [s, n], contiguous and aligned."""
    for i in range(x.shape[1]):
        yield aligned(x[:, i])


def together(outputs: list[Tensor]) -> Tensor:
    """Return the outputs [s, n] of b sequences as [s, b, n]."""
    return torch.stack(outputs, dim=1) if len(outputs) > 1 else outputs[0].unsqueeze(1)


def by_node(nodes: list[list[Tensor]]) -> list[Tensor]:
    """Return the nodes [s, b, n] of the trees of b sequences, which have nodes [s, n]."""
    return [together(list(same)) for same in zip(*nodes, strict=True)]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: ColumnMatmul) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        whole = how.tree.gather(x) if how.gathers else x
        blocks, spans = how.slices, how.context.spans(len(whole))
        return together([product(sequence, weight.t(), spans, blocks) for sequence in sequences(whole)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        how: ColumnMatmul = ctx.how
        nodes = [how.tree.nodes(_column_leaves(sequence, weight, how)) for sequence in sequences(grad)]
        grad_x = how.tree.total(by_node(nodes), scatter=how.gathers).to(x.dtype)
        whole, grad = how.context.gather(how.tree.gather(x) if how.gathers else x), how.context.gather(grad)
        for sequence, tokens in zip(sequences(grad), sequences(whole), strict=True):
            for rows in how.context.computed(how.slices):
                blocks = [slice(row.start - rows[0].start, row.stop - rows[0].start) for row in rows]
                where = slice(rows[0].start, rows[-1].stop)
                how.total.add(product(sequence[:, where].t(), tokens, blocks, [ALL]), where)
        how.total.end(x.device)
        return grad_x, None, None


def _column_leaves(grad: Tensor, weight: Tensor, how: ColumnMatmul) -> Iterator[Tensor]:
    """Yield each block's part of the gradient of one sequence's input [s, in]. ``grad``: [s, out/t]."""
    spans = how.context.spans(len(grad))
    for leaf in range(how.tree.local):
        total: Tensor | None = None
        for row, part in zip(how.rows, how.slices, strict=True):
            if row.leaf == leaf:
                more = product(grad, weight, spans, [ALL], part)
                total = more.float() if total is None else total + more
        assert total is not None, "each block has queries or intermediate units"
        yield total


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: RowMatmul) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        blocks, spans = how.slices(weight.shape[1]), how.context.spans(len(x))
        nodes = [
            how.tree.nodes(product(sequence, weight.t(), spans, [ALL], block) for block in blocks)  # each is [s, out]
            for sequence in sequences(x)
        ]
        return how.tree.total(by_node(nodes), scatter=how.scatters).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        how: RowMatmul = ctx.how
        whole = how.tree.gather(grad) if how.scatters else grad
        blocks, spans = how.slices(weight.shape[1]), how.context.spans(len(whole))
        grad_x = together([product(sequence, weight, spans, blocks) for sequence in sequences(whole)])
        whole, x = how.context.gather(whole), how.context.gather(x)
        for sequence, inputs in zip(sequences(whole), sequences(x), strict=True):
            for columns in how.context.computed(blocks):
                parts = [slice(part.start - columns[0].start, part.stop - columns[0].start) for part in columns]
                where = slice(columns[0].start, columns[-1].stop)
                how.total.add(product(sequence.t(), inputs[:, where], [ALL], parts), slice(None), where)
        how.total.end(x.device)
        return grad_x, None, None


class _Bias(torch.autograd.Function):
    """The bias, broadcast to the output; its gradient is summed over tokens as integers."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, output: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return bias.expand_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.total.add_sum(grad.flatten(0, 1))
        ctx.total.end(grad.device)
        return None, None, None
