"""Parallel linear layers of exact mode: one matmul per sequence and block.

A column-parallel layer splits its outputs into blocks, a row-parallel layer its inputs. All layouts run the same
matmuls on contiguous operands. Outputs of a row-parallel layer and gradients of a column-parallel layer's input are
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

from megatron_llama.arch.blocks import Rows, span_length
from megatron_llama.parallel.context import to_natural_order
from megatron_llama.parallel.exact.sums import Total, Tree
from megatron_llama.topology import zigzags

Output = tuple[Tensor, Tensor | None]
"""(output, bias that the caller adds), as megatron-core's layers return."""
_ALIGNMENT = 64
"""Bytes. Kernels may take another path for other addresses."""


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

    def computes(self, number: int) -> bool:
        """Whether this rank computes the weight's gradient of block ``number``."""
        return number % self.ranks == self.rank


class Column(NamedTuple):
    """A column-parallel layer: blocks of rows of the weight."""

    rows: list[Rows]
    tree: Tree
    total: Total
    context: Context
    gathers: bool
    """Whether the input is split along the sequence (sequence parallelism)."""


class Row(NamedTuple):
    """A row-parallel layer: equal blocks of columns of the weight."""

    blocks: int
    tree: Tree
    total: Total
    context: Context
    scatters: bool
    """Whether the output is split along the sequence (sequence parallelism)."""


def aligned(x: Tensor) -> Tensor:
    """Return ``x`` in contiguous memory at an aligned address."""
    x = x.contiguous()
    is_aligned = type(x) is not Tensor or x.data_ptr() % _ALIGNMENT == 0  # a rehearsal's tensors have no address
    return x if is_aligned else x.clone()


def column_forward(layer: nn.Module, how: Column, bias_total: Total | None, x: Tensor) -> Output:
    """[s(/t), b, in] to [s, b, out/t]: replaces ``ColumnParallelLinear.forward``."""
    output: Tensor = _Column.apply(x, layer.weight, how)
    return output, _bias(layer, output, bias_total)


def row_forward(layer: nn.Module, how: Row, bias_total: Total | None, x: Tensor) -> Output:
    """[s, b, in/t] to [s(/t), b, out]: replaces ``RowParallelLinear.forward``."""
    output: Tensor = _Row.apply(x, layer.weight, how)
    return output, _bias(layer, output, bias_total)


def _bias(layer: nn.Module, output: Tensor, total: Total | None) -> Tensor | None:
    return None if total is None else _Bias.apply(layer.bias, output, total)  # type: ignore[no-any-return]


def sequences(x: Tensor) -> Iterator[Tensor]:
    """Yield each sequence of x [s, b, n] as [s, n], contiguous and aligned."""
    for i in range(x.shape[1]):
        yield aligned(x[:, i])


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Column) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        whole = how.tree.gather(x) if how.gathers else x
        output = x.new_empty(*whole.shape[:2], weight.shape[0])
        parts = [aligned(weight[row.first : row.stop]) for row in how.rows]
        for i, sequence in enumerate(sequences(whole)):
            for span in how.context.spans(len(sequence)):
                tokens = aligned(sequence[span])
                for row, part in zip(how.rows, parts, strict=True):
                    output[span, i, row.first : row.stop] = torch.mm(tokens, part.t())
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        how: Column = ctx.how
        parts = [aligned(weight[row.first : row.stop]) for row in how.rows]
        nodes = [how.tree.nodes(_column_leaves(grad[:, i], parts, how)) for i in range(grad.shape[1])]
        grad_x = how.tree.total(torch.stack(nodes, dim=2), scatter=how.gathers).to(x.dtype)
        whole, grad = how.context.gather(how.tree.gather(x) if how.gathers else x), how.context.gather(grad)
        for i, sequence in enumerate(sequences(whole)):
            for number, row in enumerate(how.rows):
                if how.context.computes(number):
                    rows = slice(row.first, row.stop)
                    how.total.add(torch.mm(aligned(grad[:, i, rows]).t(), sequence), rows)
        how.total.end(x.device)
        return grad_x, None, None


def _column_leaves(grad: Tensor, parts: list[Tensor], how: Column) -> Iterator[Tensor]:
    """Yield each block's part of the gradient of one sequence's input [s, in]. ``grad``: [s, out/t]."""
    for leaf in range(how.tree.local):
        total: Tensor | None = None
        for row, part in zip(how.rows, parts, strict=True):
            if row.leaf == leaf:
                spans = how.context.spans(len(grad))
                more = torch.cat([torch.mm(aligned(grad[span, row.first : row.stop]), part) for span in spans])
                total = more.float() if total is None else total + more
        assert total is not None, "each block has queries or intermediate units"
        yield total


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Row) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        parts = [aligned(part) for part in weight.chunk(how.blocks, dim=1)]
        nodes = [how.tree.nodes(_row_leaves(x[:, i], parts, how)) for i in range(x.shape[1])]
        return how.tree.total(torch.stack(nodes, dim=2), scatter=how.scatters).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        how: Row = ctx.how
        whole = how.tree.gather(grad) if how.scatters else grad
        parts = [aligned(part) for part in weight.chunk(how.blocks, dim=1)]
        columns = [slice(j * parts[0].shape[1], (j + 1) * parts[0].shape[1]) for j in range(len(parts))]
        grad_x = torch.empty_like(x)
        for i, sequence in enumerate(sequences(whole)):
            for span in how.context.spans(len(sequence)):
                tokens = aligned(sequence[span])
                for part, block in zip(parts, columns, strict=True):
                    grad_x[span, i, block] = torch.mm(tokens, part)
        whole, x = how.context.gather(whole), how.context.gather(x)
        for i, sequence in enumerate(sequences(whole)):
            for number, block in enumerate(columns):
                if how.context.computes(number):
                    how.total.add(torch.mm(sequence.t(), aligned(x[:, i, block])), slice(None), block)
        how.total.end(x.device)
        return grad_x, None, None


def _row_leaves(x: Tensor, parts: list[Tensor], how: Row) -> Iterator[Tensor]:
    """Yield each block's part of the output [s, out] of one sequence x [s, in/t]."""
    for block, part in zip(x.chunk(how.blocks, dim=1), parts, strict=True):
        spans = how.context.spans(len(x))
        yield torch.cat([torch.mm(aligned(block[span]), part.t()) for span in spans])


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
