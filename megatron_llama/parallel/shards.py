"""A rank's shard of each parameter, after tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_llama.arch.hf_tp_mapping import Rectangle, TensorParallel, keep_rows, rectangles, rows_of_shard
from megatron_llama.model.quantized import dequantize, quantize
from megatron_llama.parallel.dp1_weight_casts import ComputeCopies
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


@dataclass
class Shard:
    """This rank's rows of one parameter, as rectangles of Hugging Face tensors."""

    name: str
    """Name of the parameter in its chunk, the same in all layouts."""
    parameter: nn.Parameter
    """The DTensor of ``fully_shard``, or the plain parameter (``Storage.kind``); the master, if the layers have
    compute-dtype copies."""
    rectangles: list[Rectangle]
    """Rectangles of Hugging Face tensors, with local offsets in ``local``. Vocabulary padding is in no rectangle."""
    is_primary_replica: bool
    """Whether norms and checkpoints use this data-parallel replica."""
    quantized: str | None = None
    """int8 or nf4 if ``local`` holds quantized rows; the rectangles then refer to ``values``."""

    @property
    def is_trained(self) -> bool:
        """Whether the shard has gradients and updates: False for frozen weights."""
        return self.parameter.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """The stored rows, a view of the parameter.

        dtype: the precision's ``param_dtype``; for frozen weights the plan's ``frozen_dtype``, or uint8 if quantized.
        """
        return _local(self.parameter.data)

    @property
    def values(self) -> torch.Tensor:
        """The rows as floats: ``local``, or a dequantized copy in fp32."""
        return self.local if self.quantized is None else dequantize(self.local, self.quantized, torch.float32)

    def store(self, values: torch.Tensor) -> None:
        """Quantize ``values`` into the parameter (needs torchao). Does nothing if the shard is not quantized."""
        if self.quantized is not None:
            self.local.copy_(quantize(values, self.quantized))

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient of the rows, a view. None before a backward pass."""
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def upcast_grad(self) -> torch.Tensor:
        """Cast the gradient to the parameter's dtype and return its rows, a view, for sums over ranks in place."""
        assert self.parameter.grad is not None
        if self.parameter.grad.dtype != self.parameter.dtype:
            self.parameter.grad = self.parameter.grad.to(self.parameter.dtype)
        return _local(self.parameter.grad)

    def owned(self, tensor: torch.Tensor, *, every_replica: bool = False) -> Iterator[torch.Tensor]:
        """Yield the parts of ``tensor`` (shaped like ``local``) that this rank counts.

        Each value counts on one rank, with ``every_replica`` on one rank of each data-parallel replica.
        """
        if self.is_primary_replica or every_replica:
            yield from (tensor[part.local_slices] for part in self.rectangles if part.replica == 0)


def shards_of(chunk: nn.Module, plan: Plan, topology: Topology, copies: ComputeCopies | None = None) -> list[Shard]:
    """Return the shards of a chunk after data parallelism, in the order of its parameters.

    ``copies`` are the chunk's compute-dtype copies, if the rank casts its weights itself.
    """
    shards = []
    for name, parameter in chunk.named_parameters():
        if copies is not None:
            parameter = copies.master_of.get(parameter, parameter)
        tp = TensorParallel(topology.place["tp"], topology.sizes["tp"])
        parts = rectangles(name, plan.model, tp, plan.padded_vocab_size, plan.config.finetune)
        start, stop = rows_of_shard(parameter.shape[0], topology.shard_rank, topology.shard_size)
        assert _local(parameter.data).shape[0] == stop - start, f"{name}: fully_shard has unexpected rows"
        quantized = plan.quantized if parameter.dtype == torch.uint8 else None
        shards.append(Shard(name, parameter, keep_rows(parts, start, stop), topology.replica_rank == 0, quantized))
    return shards


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
