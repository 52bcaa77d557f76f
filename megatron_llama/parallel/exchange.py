"""Fewer bytes between data-parallel ranks (ZeRO++: Wang et al. 2023, arXiv:2306.10209).
docs/guides/methods/less_communication.md

    trainer.grad_reduce=bf16 or int8   each rank sends each other one, once, the values that the other sums, in this
                                       format (qgZ). They are added in fp32, in the order of ranks
    trainer.reduce_group               first among the ranks of a node, then the sums among nodes (qgZ's two hops)
    trainer.param_gather=int8          weights are gathered in int8 (qwZ); the shards themselves stay exact
    trainer.secondary_group            what the forward pass gathered is kept, split over the ranks of a node; the
                                       backward pass gathers it there (hpZ)

``fully_shard`` takes a unit's collectives from outside. A unit's tensors lie side by side in one buffer; blocks of int8
stay inside a tensor, as weights and gradients that tensor-parallel ranks hold in copies must be rounded alike on each,
whatever lies beside them.
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
"""Codes are -127 to 127."""


class Bf16:
    """Messages in bf16, rounded to nearest: a value is off by at most 2^-8 of its size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes`` are not needed: each value has its own exponent."""

    def pack(self, values: Tensor) -> Tensor:
        """[rows, values] to bytes, uint8 [rows, 2 values]."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse: fp32 [rows, values]."""
        return packed.view(torch.bfloat16).float()


class Int8:
    """Messages in int8 by blocks of EXCHANGE_BLOCK values of a tensor with one fp32 scale, max |x| / 127, rounded to
    nearest: a value is off by at most half a scale, 1/254 of the largest one in its block. Not unbiased.

    A block is sent as its scale and its codes, the last one of a tensor filled with zeros. A block with a value that is
    not finite arrives with at least one that is not.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: values of each tensor in a row."""
        self.sizes = list(sizes)
        self.padded = [-(-size // EXCHANGE_BLOCK) * EXCHANGE_BLOCK for size in sizes]

    def pack(self, values: Tensor) -> Tensor:
        """[rows, values] to bytes, uint8 [rows, blocks * 260]."""
        parts = values.float().split(self.sizes, dim=1)
        if self.sizes != self.padded:
            parts = [F.pad(part, (0, to - part.shape[1])) for part, to in zip(parts, self.padded, strict=True)]
        blocks = torch.cat(parts, dim=1).unflatten(1, (-1, EXCHANGE_BLOCK))  # a copy, which may be written to
        scales = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True)) / LARGEST
        codes = blocks.div_(scales.where(scales != 0, 1)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse: fp32 [rows, values]."""
        scales, codes = packed.unflatten(1, (-1, 4 + EXCHANGE_BLOCK)).split([4, EXCHANGE_BLOCK], dim=-1)
        values = (codes.view(torch.int8) * scales.contiguous().view(torch.float32)).flatten(1)
        if self.sizes == self.padded:
            return values
        parts = zip(values.split(self.padded, dim=1), self.sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)


FORMATS: dict[str, type[Bf16 | Int8]] = {"bf16": Bf16, "int8": Int8}


class Hops(NamedTuple):
    """The two groups of a rank that exchanges gradients in two hops."""

    inside: dist.ProcessGroup
    """The ranks of its node."""
    across: dist.ProcessGroup
    """The ranks with its number in their nodes."""


def sum_of_own(parts: Tensor, form: Bf16 | Int8, group: dist.ProcessGroup) -> Tensor:
    """[ranks, values] to fp32 [values]: over all ranks, the sum of the row that has this rank's number in ``group``."""
    sent = form.pack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = received.split(1)
    total = form.unpack(first)
    for other in others:
        total += form.unpack(other)
    return total[0]


class _Buffers:
    """New memory for each collective, which ``fully_shard`` asks for."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of a collective's input or result."""
        return torch.empty(*size, dtype=dtype, device=device)


class GradientExchange(_Buffers):
    """A reduce_scatter over the ranks that share the shards of a unit: FSDPModule.set_custom_reduce_scatter's."""

    def __init__(self, kind: str, sizes: Sequence[int], hops: Hops | None = None) -> None:
        """``kind``: bf16 or int8. ``sizes``: values of each trained tensor in a shard, its padding included. With
        ``hops`` it goes first inside a node, for all nodes at once, then across."""
        self.form, self.hops = FORMATS[kind](sizes), hops
        self.form_inside = FORMATS[kind]([*sizes] * hops.across.size()) if hops else None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """[ranks * values] to the sum of this rank's [values]."""
        assert op == dist.ReduceOp.SUM and not async_op, "see shard_chunk"
        parts = input_tensor.view(group.size(), -1)
        if self.hops is not None and self.form_inside is not None:
            # Ranks are (node, number in it): a rank adds up for its namesakes, those with its number in every node.
            nodes, inside = self.hops.across.size(), self.hops.inside.size()
            for_namesakes = parts.unflatten(0, (nodes, inside)).transpose(0, 1).flatten(1)
            parts = sum_of_own(for_namesakes, self.form_inside, self.hops.inside).view(nodes, -1)
            group = self.hops.across
        output_tensor.copy_(sum_of_own(parts, self.form, group))


class SumOverCopies:
    """An all_reduce of a unit's gradients over the ranks with copies of its shard: FSDPModule.set_all_reduce_hook's.

    Each rank sums a part, and sends the sum to all in the same format: it is rounded twice.
    """

    def __init__(self, kind: str, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        """As GradientExchange, for the copies in ``group``."""
        self.group, self.sizes = group, list(sizes)
        self.pieces = [-(-size // group.size()) for size in sizes]
        self.form = FORMATS[kind](self.pieces)

    def __call__(self, shard: Tensor) -> None:
        """Sums ``shard`` [values] in place."""
        if devices.of(shard.device).asynchronous:  # it may be freed while this stream still works on it
            shard.record_stream(torch.accelerator.current_stream())
        ranks = self.group.size()
        tensors = zip(shard.split(self.sizes), self.pieces, strict=True)
        filled = [F.pad(tensor, (0, ranks * piece - len(tensor))).view(ranks, piece) for tensor, piece in tensors]
        own = self.form.pack(sum_of_own(torch.cat(filled, dim=1), self.form, self.group)[None])
        gathered = own.new_empty(ranks, own.shape[1])
        dist.all_gather_into_tensor(gathered.view(-1), own.view(-1), group=self.group)
        sums = zip(self.form.unpack(gathered).split(self.pieces, dim=1), self.sizes, strict=True)
        shard.copy_(torch.cat([whole.reshape(-1)[:size] for whole, size in sums]))


class WeightGather(_Buffers):
    """An all_gather of a unit's weights: FSDPModule.set_custom_all_gather's."""

    def __init__(self, kind: str | None, sizes: Sequence[int], secondary: dist.ProcessGroup | None) -> None:
        """``kind``: int8, or None for the dtype that the weights have. ``sizes``: values of each tensor in a shard.
        ``secondary``: the ranks among which the backward pass gathers; None: as the forward pass."""
        self.form = None if kind is None else FORMATS[kind](sizes)
        self.secondary = secondary
        self._kept: Tensor | None = None  # this rank's part of what the last forward pass gathered

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """[values] of each rank to [ranks * values]. ``input_tensor`` is a part of ``output_tensor``."""
        assert not async_op, "nobody waits for it"
        if self.secondary is not None and torch._C._current_graph_task_id() != -1:  # inside a backward pass
            assert self._kept is not None, "a backward pass comes after its forward pass"
            dist.all_gather_into_tensor(output_tensor, self._kept, group=self.secondary)
            return
        if self.form is None:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        else:
            own = self.form.pack(input_tensor[None])
            gathered = own.new_empty(group.size(), own.shape[1])
            dist.all_gather_into_tensor(gathered.view(-1), own.view(-1), group=group)
            for row, packed in zip(output_tensor.view(group.size(), -1), gathered.split(1), strict=True):
                row.copy_(self.form.unpack(packed)[0])  # this rank's own too: all compute with the same weights
        if self.secondary is not None:
            part = output_tensor.view(self.secondary.size(), -1)[self.secondary.rank()]
            self._kept = part.clone() if self._kept is None else self._kept.copy_(part)


def set_collectives(
    unit: FSDPModule,
    parameters: Sequence[Tensor],
    shard_size: int,
    *,
    grad_reduce: str | None,
    hops: Hops | None,
    copies: dist.ProcessGroup | None,
    param_gather: str | None,
    secondary: dist.ProcessGroup | None,
) -> None:
    """Gives a unit its collectives. ``parameters`` are its own, whole, in the order in which ``fully_shard`` took them;
    ``copies`` the ranks that hold copies of its shards."""

    def in_a_shard(tensors: Sequence[Tensor]) -> list[int]:
        return [-(-len(tensor) // shard_size) * (tensor.numel() // len(tensor)) for tensor in tensors]

    trained = in_a_shard([tensor for tensor in parameters if tensor.requires_grad])
    if grad_reduce is not None and trained:
        unit.set_custom_reduce_scatter(GradientExchange(grad_reduce, trained, hops))  # type: ignore[arg-type]
        if copies is not None:
            unit.set_all_reduce_hook(SumOverCopies(grad_reduce, trained, copies))
    if param_gather is not None or secondary is not None:
        unit.set_custom_all_gather(WeightGather(param_gather, in_a_shard(parameters), secondary))  # type: ignore[arg-type]
