"""This rank's shard of each parameter, after tensor, pipeline and data parallelism have split it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_llama.arch.names import Rectangle, TensorParallel, keep_rows, rectangles
from megatron_llama.model.quantized import dequantize, quantize
from megatron_llama.parallel.fsdp import ComputeCopies
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


@dataclass
class Shard:
    """This rank's rows of one parameter, as rectangles of Hugging Face tensors."""

    name: str
    """The parameter's name in its chunk, the same for all layouts."""
    parameter: nn.Parameter
    """The DTensor over the data-parallel ranks that ``fully_shard`` made of it, or what it was (parallel/fsdp.py): the
    master, if the layers have a working copy."""
    rectangles: list[Rectangle]
    """The rectangles, with local offsets in ``local``. Rows that pad the vocabulary are in none."""
    counts: bool
    """Whether norms count this data-parallel replica, and checkpoints contain it."""
    quantized: str | None = None
    """int8 or nf4 if ``local`` holds quantized rows; the pieces then describe ``values``."""

    @property
    def is_trained(self) -> bool:
        """Whether it gets gradients and updates; frozen weights don't."""
        return self.parameter.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """The rows as they are stored, a view: writing to it writes the parameter.

        In the precision's ``param_dtype``; frozen ones in the plan's ``frozen_dtype``, or as quantized bytes.
        """
        return _local(self.parameter.data)

    @property
    def values(self) -> torch.Tensor:
        """The rows as floats: ``local`` itself, or a dequantized copy in fp32."""
        return self.local if self.quantized is None else dequantize(self.local, self.quantized, torch.float32)

    def store(self, values: torch.Tensor) -> None:
        """Quantizes ``values`` into the parameter. Does nothing if not quantized, as ``values`` is then the parameter.

        Needs torchao for quantized shards.
        """
        if self.quantized is not None:
            self.local.copy_(quantize(values, self.quantized))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the rows, a view; None before a backward pass."""
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def upcast_grad(self) -> torch.Tensor:
        """Converts the gradient, which must exist, to the parameter's dtype, and returns its rows, a view: sums over
        ranks are written into it."""
        assert self.parameter.grad is not None
        if self.parameter.grad.dtype != self.parameter.dtype:
            self.parameter.grad = self.parameter.grad.to(self.parameter.dtype)
        return _local(self.parameter.grad)

    def owned(self, tensor: torch.Tensor, *, every_replica: bool = False) -> Iterator[torch.Tensor]:
        """The parts of ``tensor``, shaped like ``local``, that this rank counts: each value counts on one rank only, or
        with ``every_replica`` on one rank of each data-parallel replica."""
        if self.counts or every_replica:
            yield from (tensor[piece.local_slices] for piece in self.rectangles if piece.replica == 0)


def shards_of(chunk: nn.Module, plan: Plan, topology: Topology, copies: ComputeCopies | None = None) -> list[Shard]:
    """The shards of a chunk after data parallelism, in the order of its parameters.

    ``copies`` are the chunk's weights in the compute dtype, if the rank casts them itself.
    """
    shards = []
    for name, parameter in chunk.named_parameters():
        if copies is not None:
            parameter = copies.master_of.get(parameter, parameter)
        tp = TensorParallel(topology.place["tp"], topology.sizes["tp"])
        parts = rectangles(name, plan.model, tp, plan.padded_vocab_size, plan.config.finetune)
        start, stop = _rows(parameter.shape[0], topology.shard_rank, topology.shard_size)
        assert _local(parameter.data).shape[0] == stop - start, f"{name}: fully_shard kept other rows than expected"
        quantized = plan.quantized if parameter.dtype == torch.uint8 else None
        shards.append(Shard(name, parameter, keep_rows(parts, start, stop), topology.replica_rank == 0, quantized))
    return shards


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last) of the rows of ``rank``, split as by torch.chunk, which ``fully_shard`` uses."""
    per_rank = -(-rows // size)
    return min(rows, rank * per_rank), min(rows, (rank + 1) * per_rank)
