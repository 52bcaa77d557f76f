"""Sums of exact mode that do not depend on the layout.

Two kinds:

* Over blocks (``Tree``): one binary tree over all blocks, of which a rank adds its part. The ranks exchange the nodes
  that they cannot add further. Partial sums are fp32.
* Over samples, tokens and data-parallel ranks (``Total``): integers, whose addition is associative. A value becomes a
  multiple of 2^-50 in int64, so sums are exact below 2^13. fp32 values from 2^-26 on are multiples already. Smaller
  ones are truncated, by less than 1e-15: a millionth of the default ``optim.eps``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_llama import devices
from megatron_llama.devices.kernels import largest_magnitude, to_fixed_point

BITS = 50
"""Binary digits after the point."""
LOGP_BITS = 32
"""Binary digits in preference training, which adds log probabilities of answers: thousands of nats."""
LARGEST = 2.0**12
"""Bound of a sum of absolute values; beyond it the gradients become NaN."""


def to_grid(values: Tensor, bits: int = BITS) -> Tensor:
    """Return floats as multiples of 2^-bits, int64, truncated."""
    return to_fixed_point(values, bits)


def from_grid(total: Tensor, bits: int = BITS) -> Tensor:
    """Return multiples of 2^-bits as fp32."""
    return (total.double() * 2.0**-bits).float()


def add_pairs(leaves: Sequence[Tensor]) -> Tensor:
    """Add tensors in a binary tree: neighbors first; the last of an odd number goes up alone."""
    while len(leaves) > 1:
        pairs = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


class Tree:
    """The sum over blocks in a fixed order, for the ranks of a tensor-parallel group.

    Args:
        blocks: Number of blocks; each rank has an equal part, in order.
        group: The ranks. None: this rank has all blocks.
    """

    def __init__(self, blocks: int, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks = 1 if group is None else group.size()
        self.local = blocks // self.ranks
        self.together = self.local & -self.local  # leaves of a node that this rank completes: a power of two

    def nodes(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Add this rank's leaves, one per block, into the nodes that it completes, fp32."""
        stack: list[tuple[int, Tensor]] = []
        for leaf in leaves:
            stack.append((1, leaf.float()))
            while len(stack) > 1 and stack[-1][0] == stack[-2][0] < self.together:
                size, right = stack.pop()
                stack[-1] = 2 * size, stack[-1][1] + right
        return [node for _, node in stack]

    def total(self, nodes: Sequence[Tensor], *, scatter: bool = False) -> Tensor:
        """Return the sum over all blocks of ``nodes`` [n, ...] each.

        With ``scatter``, return this rank's part of the first dimension, n / ranks; the number of ranks divides n.
        """
        if self.group is None:
            return add_pairs(nodes)
        shape, values = nodes[0].shape, nodes[0].numel()
        size = -(-values // self.ranks)
        sent = nodes[0].new_zeros(self.ranks, len(nodes), size)
        for j, node in enumerate(nodes):
            flat, whole_parts = node.reshape(-1), values // size
            sent[:whole_parts, j] = flat[: whole_parts * size].view(whole_parts, size)
            if whole_parts < self.ranks:
                sent[whole_parts, j, : values - whole_parts * size] = flat[whole_parts * size :]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        part = add_pairs(received.flatten(0, 1).unbind())
        if scatter:
            return part.view(shape[0] // self.ranks, *shape[1:])
        whole = part.new_empty(self.ranks * size)
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole[:values].view(shape)

    def gather(self, part: Tensor) -> Tensor:
        """Gather the ranks' parts of the first dimension [n / ranks, ...] to [n, ...]."""
        if self.group is None:
            return part
        whole = part.new_empty(part.shape[0] * self.ranks, *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.group)
        return whole


class GradShards:
    """How data-parallel ranks hold the gradient of a parameter."""

    def __init__(self, shard_size: int, shard: dist.ProcessGroup) -> None:
        self.shard_size, self.shard = shard_size, shard

    def scatter(self, total: Tensor) -> Tensor:
        """Sum ``total`` [rows, ...] over the shard group, and return this rank's rows, split as by ``fully_shard``."""
        if self.shard_size == 1:
            return total
        rows = -(-total.shape[0] // self.shard_size)
        padded = F.pad(total.reshape(total.shape[0], -1), (0, 0, 0, rows * self.shard_size - total.shape[0]))
        part = padded.new_empty(rows, padded.shape[1])
        dist.reduce_scatter_tensor(part, padded, group=self.shard)
        return part.view(rows, *total.shape[1:])


class Total:
    """The sum of one parameter's gradient over samples and tokens, as integers.

    Args:
        shape: Shape of the parameter on this rank without data parallelism.
        samples: Sequences of a global batch.
        tokens: Its tokens; for a weight that several heads use, tokens times heads.
        shares: How the ranks divide the sum.
        scatters_early: Whether ``end`` sums over the shard group, so that the rank keeps its rows only (ZeRO 2 and 3).
    """

    def __init__(
        self, shape: torch.Size, samples: int, tokens: int, shares: GradShards, *, scatters_early: bool
    ) -> None:
        self.shape, self.samples, self.tokens = shape, samples, tokens
        self.shares, self.scatters_early = shares, scatters_early
        self._whole: Tensor | None = None
        self._rows: Tensor | None = None
        self._bound: Tensor | None = None

    def _buffer(self, device: torch.device) -> Tensor:
        if self._whole is None:
            self._whole = torch.zeros(self.shape, dtype=torch.int64, device=device)
        return self._whole

    def add(self, values: Tensor, *where: slice) -> None:
        """Add ``values``, of one sequence or a part of it, to the elements at ``where``."""
        target, kernels = self._buffer(values.device)[where], devices.of(values.device).kernels(compiled=False)
        self._note(kernels.add_to_grid_(target, values, BITS), self.samples)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add ``values`` [n, ...], of n tokens, to the rows at index ``rows`` [n], int64; rows may repeat."""
        self._note(largest_magnitude(values), self.tokens)
        self._buffer(values.device).index_add_(0, rows, to_grid(values))

    def add_sum(self, values: Tensor, *where: slice) -> None:
        """Add the sum of ``values`` [n, ...] over n tokens or heads to the elements at ``where``."""
        self._note(largest_magnitude(values), self.tokens)
        self._buffer(values.device)[where] += to_grid(values).sum(0)

    def _note(self, largest: Tensor, terms: int) -> None:
        """Raise the bound of this rank's sum to that of ``terms`` values of at most ``largest``."""
        bound = largest * terms
        self._bound = bound if self._bound is None else torch.maximum(self._bound, bound)

    def end(self, device: torch.device) -> None:
        """End the gradient of one micro batch. A collective over the shard group, if it scatters early."""
        if self.scatters_early:
            rows = self.shares.scatter(self._buffer(device))
            self._rows, self._whole = rows if self._rows is None else self._rows.add_(rows), None

    def take(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (this rank's rows of the sum over the shard group, int64; whether it is too large, bool) and reset."""
        if self.scatters_early and self._rows is None:  # no micro batch reached the parameter
            self.end(device)
        rows = self._rows if self._rows is not None else self.shares.scatter(self._buffer(device))
        bound = torch.zeros((), device=device) if self._bound is None else self._bound
        self._whole = self._rows = self._bound = None
        return rows, ~(bound < LARGEST)
