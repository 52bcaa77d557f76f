"""Reduced communication between data-parallel ranks (ZeRO++: Wang et al. 2023, arXiv:2306.10209).

docs/guides/methods/less_communication.md describes the settings:

    trainer.grad_reduce=bf16 or int8   reduce-scatter by one all-to-all in this format (qgZ). Each rank adds the values
                                       that it receives in fp32, in rank order
    trainer.reduce_group               two hops: first the ranks of a node, then the sums among nodes (qgZ)
    trainer.param_gather=int8          weights are gathered in int8 (qwZ); shards are unchanged
    trainer.secondary_group            the gathered weights of the forward pass are saved, split over the ranks of a
                                       node, and the backward pass gathers them there (hpZ)

``fully_shard`` takes custom collectives per unit. A unit's tensors are adjacent in one buffer. An int8 block never
spans two tensors: tensor-parallel ranks must round their copies of a weight or gradient alike, and the neighbours in
the buffer differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_llama import devices
from megatron_llama.config.precision import EXCHANGE_BLOCK

LARGEST = 127
"""Largest code; codes are -127 to 127."""


class Bf16:
    """Message format bf16, rounded to nearest: the relative error is at most 2^-8."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Ignore ``sizes``: bf16 has no blocks."""

    def pack(self, values: Tensor) -> Tensor:
        """Encode [rows, values] as uint8 [rows, 2 * values]."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode to fp32 [rows, values]."""
        return packed.view(torch.bfloat16).float()


class Int8:
    """Message format int8, by blocks of EXCHANGE_BLOCK values of a tensor with one fp32 scale, max |x| / 127.

    Values are rounded to nearest (not unbiased): the error is at most half a scale, 1/254 of the block's largest value.
    A block is sent as its scale and its codes; a tensor's last block is padded with zeros. A block with a non-finite
    value arrives with at least one non-finite value.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes`` are the numbers of values of each tensor in a row."""
        self.sizes = list(sizes)
        self.padded = [-(-size // EXCHANGE_BLOCK) * EXCHANGE_BLOCK for size in sizes]

    def pack(self, values: Tensor) -> Tensor:
        """Encode [rows, values] as uint8 [rows, blocks * (4 + EXCHANGE_BLOCK)]."""
        parts = values.float().split(self.sizes, dim=1)
        if self.sizes != self.padded:
            parts = [F.pad(part, (0, to - part.shape[1])) for part, to in zip(parts, self.padded, strict=True)]
        blocks = torch.cat(parts, dim=1).unflatten(1, (-1, EXCHANGE_BLOCK))  # a copy, so in-place operations are safe
        scales = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True)) / LARGEST
        codes = blocks.div_(scales.where(scales != 0, 1)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode to fp32 [rows, values]."""
        scales, codes = packed.unflatten(1, (-1, 4 + EXCHANGE_BLOCK)).split([4, EXCHANGE_BLOCK], dim=-1)
        values = (codes.view(torch.int8) * scales.contiguous().view(torch.float32)).flatten(1)
        if self.sizes == self.padded:
            return values
        parts = zip(values.split(self.padded, dim=1), self.sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)


FORMATS: dict[str, type[Bf16 | Int8]] = {"bf16": Bf16, "int8": Int8}


class Hops(NamedTuple):
    """Groups of a rank that reduces gradients in two hops."""

    inside: dist.ProcessGroup
    """Ranks of the same node."""
    across: dist.ProcessGroup
    """Ranks with the same number in their nodes."""


def reduce_scatter_sum(parts: Tensor, form: Bf16 | Int8, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter [ranks, values] to fp32 [values]: the sum over ranks of row ``group.rank()``."""
    sent = form.pack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = received.split(1)
    total = form.unpack(first)
    for other in others:
        total += form.unpack(other)
    return total[0]


class _Buffers:
    """Allocator that ``fully_shard`` requires of a custom collective."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a collective's input or result."""
        return torch.empty(*size, dtype=dtype, device=device)


class GradientExchange(_Buffers):
    """Reduce-scatter of a unit's gradients, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, kind: str, sizes: Sequence[int], hops: Hops | None = None) -> None:
        """Create a reduce-scatter.

        Args:
            kind: bf16 or int8.
            sizes: values of each trained tensor in a shard, including padding.
            hops: reduce inside a node first, for all nodes together, then across nodes.
        """
        self.form, self.hops = FORMATS[kind](sizes), hops
        self.form_inside = FORMATS[kind]([*sizes] * hops.across.size()) if hops else None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor`` [ranks * values] to ``output_tensor`` [values]."""
        assert op == dist.ReduceOp.SUM and not async_op, "see shard_chunk"
        parts = input_tensor.view(group.size(), -1)
        if self.hops is not None and self.form_inside is not None:
            # Ranks are (node, local rank). Inside a node, a rank sums for the ranks with its local rank in all nodes.
            nodes, inside = self.hops.across.size(), self.hops.inside.size()
            by_local_rank = parts.unflatten(0, (nodes, inside)).transpose(0, 1).flatten(1)
            parts = reduce_scatter_sum(by_local_rank, self.form_inside, self.hops.inside).view(nodes, -1)
            group = self.hops.across
        output_tensor.copy_(reduce_scatter_sum(parts, self.form, group))


class ReplicaAllReduce:
    """All-reduce of a unit's gradients over the ranks with replicas of its shard, for ``set_all_reduce_hook``.

    Each rank sums a part and sends the sum to all ranks in the same format, so a value is rounded twice.
    """

    def __init__(self, kind: str, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        """Create an all-reduce over ``group``, with ``kind`` and ``sizes`` as in GradientExchange."""
        self.group, self.sizes = group, list(sizes)
        self.part_sizes = [-(-size // group.size()) for size in sizes]
        self.form = FORMATS[kind](self.part_sizes)

    def __call__(self, shard: Tensor) -> None:
        """Sum ``shard`` [values] in place."""
        if devices.of(shard.device).asynchronous:  # the caller may free it while this stream still reads it
            shard.record_stream(torch.accelerator.current_stream())
        ranks = self.group.size()
        tensors = zip(shard.split(self.sizes), self.part_sizes, strict=True)
        padded = [F.pad(tensor, (0, ranks * size - len(tensor))).view(ranks, size) for tensor, size in tensors]
        packed = self.form.pack(reduce_scatter_sum(torch.cat(padded, dim=1), self.form, self.group)[None])
        gathered = packed.new_empty(ranks, packed.shape[1])
        dist.all_gather_into_tensor(gathered.view(-1), packed.view(-1), group=self.group)
        sums = zip(self.form.unpack(gathered).split(self.part_sizes, dim=1), self.sizes, strict=True)
        shard.copy_(torch.cat([whole.reshape(-1)[:size] for whole, size in sums]))


class WeightGather(_Buffers):
    """All-gather of a unit's weights, for ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, kind: str | None, sizes: Sequence[int], secondary: dist.ProcessGroup | None) -> None:
        """Create an all-gather.

        Args:
            kind: int8, or None for the dtype of the weights.
            sizes: values of each tensor in a shard.
            secondary: ranks among which the backward pass gathers. None: the ranks of the forward pass.
        """
        self.form = None if kind is None else FORMATS[kind](sizes)
        self.secondary = secondary
        self._secondary_shard: Tensor | None = None  # this rank's part of the weights of the last forward pass

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather [values] of each rank to [ranks * values]. ``input_tensor`` is a part of ``output_tensor``."""
        assert not async_op, "fully_shard waits for no handle"
        if self.secondary is not None and torch._C._current_graph_task_id() != -1:  # inside a backward pass
            assert self._secondary_shard is not None, "a backward pass comes after its forward pass"
            dist.all_gather_into_tensor(output_tensor, self._secondary_shard, group=self.secondary)
            return
        if self.form is None:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        else:
            sent = self.form.pack(input_tensor[None])
            gathered = sent.new_empty(group.size(), sent.shape[1])
            dist.all_gather_into_tensor(gathered.view(-1), sent.view(-1), group=group)
            for row, packed in zip(output_tensor.view(group.size(), -1), gathered.split(1), strict=True):
                row.copy_(self.form.unpack(packed)[0])  # this rank's row too: all ranks compute with the same weights
        if self.secondary is not None:
            part = output_tensor.view(self.secondary.size(), -1)[self.secondary.rank()]
            shard = self._secondary_shard
            self._secondary_shard = part.clone() if shard is None else shard.copy_(part)


def set_collectives(
    unit: FSDPModule,
    parameters: Sequence[Tensor],
    shard_size: int,
    *,
    grad_reduce: str | None,
    hops: Hops | None,
    replicas: dist.ProcessGroup | None,
    param_gather: str | None,
    secondary: dist.ProcessGroup | None,
) -> None:
    """Set the custom collectives of a ``fully_shard`` unit.

    Args:
        parameters: the unit's unsharded parameters, in the order of ``fully_shard``.
        shard_size: number of ranks that share the shards.
        grad_reduce: bf16, int8, or None for the built-in reduce-scatter.
        hops: groups of a two-hop reduction.
        replicas: ranks that hold replicas of this rank's shards.
        param_gather: int8, or None for the weights' dtype.
        secondary: ranks among which the backward pass gathers.
    """

    def shard_sizes(tensors: Sequence[Tensor]) -> list[int]:
        return [-(-len(tensor) // shard_size) * (tensor.numel() // len(tensor)) for tensor in tensors]

    trained = shard_sizes([tensor for tensor in parameters if tensor.requires_grad])
    if grad_reduce is not None and trained:
        unit.set_custom_reduce_scatter(GradientExchange(grad_reduce, trained, hops))  # type: ignore[arg-type]
        if replicas is not None:
            unit.set_all_reduce_hook(ReplicaAllReduce(grad_reduce, trained, replicas))
    if param_gather is not None or secondary is not None:
        gather = WeightGather(param_gather, shard_sizes(parameters), secondary)
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
