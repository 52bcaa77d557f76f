"""What a rank holds of each parameter, after tensor, pipeline and data parallelism have had their cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_llama.model.names import Piece, TensorParallel, keep_rows, pieces
from megatron_llama.model.quantized import dequantize, quantize
from megatron_llama.plan import Plan
from megatron_llama.topology import Topology


@dataclass
class Shard:
    """This rank's rows of one parameter, as rectangles of Hugging Face tensors."""

    name: str
    """The parameter's name in its chunk, the same for all layouts."""
    parameter: nn.Parameter
    """What ``fully_shard`` made of it: a DTensor over the data-parallel ranks."""
    pieces: list[Piece]
    """The rectangles, with local offsets in ``local``. Rows that pad the vocabulary belong to none."""
    counts: bool
    """Whether this data-parallel copy is the one that counts for norms and is written to checkpoints."""
    quantized: str | None = None
    """int8 or nf4, where ``local`` is packed bytes. The pieces are then of ``values``."""

    @property
    def is_trained(self) -> bool:
        """Whether it gets gradients and updates; else it stays as it was loaded."""
        return self.parameter.requires_grad

    @property
    def local(self) -> torch.Tensor:
        """The rows themselves, in the precision's ``stored`` dtype, or the plan's ``frozen_dtype`` where they are not
        trained, or the bytes of each row where they are quantized; a view: writing to it writes the parameter."""
        return _local(self.parameter.data)

    @property
    def values(self) -> torch.Tensor:
        """The rows as numbers: ``local``, or what it unpacks to, fp32 and a copy."""
        return self.local if self.quantized is None else dequantize(self.local, self.quantized, torch.float32)

    def store(self, values: torch.Tensor) -> None:
        """Take what ``values`` gave, filled: packs it where it is a copy. Needs torchao then."""
        if self.quantized is not None:
            self.local.copy_(quantize(values, self.quantized))

    @property
    def grad(self) -> torch.Tensor | None:
        """Their gradient, a view; None before a backward pass."""
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def owned(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts of a tensor shaped like ``local`` that no other rank also counts."""
        if self.counts:
            yield from (tensor[piece.local_slices] for piece in self.pieces if piece.replica == 0)


def shards_of(chunk: nn.Module, plan: Plan, topology: Topology) -> list[Shard]:
    """The shards of a chunk that ``fully_shard`` has been through, in the order of its parameters."""
    shards = []
    for name, parameter in chunk.named_parameters():
        tp = TensorParallel(topology.tp_rank, topology.tp)
        parts = pieces(name, plan.model, tp, plan.padded_vocab_size, plan.config.finetune)
        start, stop = _rows(parameter.shape[0], topology.shard_rank, topology.shard_size)
        assert _local(parameter.data).shape[0] == stop - start, f"{name}: fully_shard cut other rows than expected"
        quantized = plan.quantized if parameter.dtype == torch.uint8 else None
        shards.append(Shard(name, parameter, keep_rows(parts, start, stop), topology.replica_rank == 0, quantized))
    return shards


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of rank ``rank``, cut like torch.chunk, as ``fully_shard`` does."""
    per_rank = -(-rows // size)
    return min(rows, rank * per_rank), min(rows, (rank + 1) * per_rank)
