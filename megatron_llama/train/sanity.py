"""Cheap checks against errors that training would not show: a weight without gradient, copies that drift apart."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard

Rectangle = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(Hugging Face name, offset, size)"""


class TrainingFault(RuntimeError):
    """Training can't go on; the weights are those of the last good step."""


class FiniteCheck:
    """Allows some steps whose loss or gradient is non-finite (NaN or Inf), which update nothing, or stops the run."""

    def __init__(self, skips: int) -> None:
        self.skips = skips
        """Steps that may still be skipped."""

    def check(self, step: int, loss: float, norm: float, shards: Sequence[Shard]) -> bool:
        """Whether the step is finite; counts it if not. The gradients must still be there. A collective; all ranks must
        pass the same numbers.

        Raises TrainingFault on all ranks, naming ranks and layers, when no more steps may be skipped.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        fault = f"step {step}: the loss is {loss:.4g} and the gradient norm {norm:.4g}; {_describe_nonfinite(shards)}"
        if self.skips == 0:
            raise TrainingFault(f"{fault}; the weights were not updated")
        self.skips -= 1
        if dist.get_rank() == 0:
            sys.stderr.write(f"skipped {fault}; {self.skips} more may be skipped\n")
        return False


def _describe_nonfinite(shards: Sequence[Shard]) -> str:
    """The first non-finite weight of each rank, or else the first non-finite gradient. A collective."""
    names = [f"the weight {s.name}" for s in shards if not s.values.isfinite().all()]
    names = names or [f"the gradient of {s.name}" for s in shards if s.grad is not None and not s.grad.isfinite().all()]
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, names)
    found = [
        f"rank {rank}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} not finite"
        for rank, names in enumerate(by_rank)
        if names
    ]
    return ", ".join(found) or "every weight and gradient is finite by itself"


def check_every_gradient(shards: Sequence[Shard]) -> None:
    """Raises TrainingFault if a trained weight got no gradient in the first backward pass."""
    missing = [s.name for s in shards if s.is_trained and s.grad is None]
    if missing:
        raise TrainingFault(f"no gradient reached {', '.join(missing)}")


@torch.no_grad()
def check_copies(shards: Sequence[Shard]) -> None:
    """Raises TrainingFault unless ranks that hold the same rectangle of a tensor hold the same bits. A collective."""
    digests: dict[Rectangle, str] = {}
    for shard in shards:
        values = shard.values
        for piece in shard.rectangles:
            part = values[piece.local_slices].cpu().reshape(-1).view(torch.uint8)  # bytes: numpy has no bf16
            key = (piece.name, piece.offset, piece.size)
            digests[key] = hashlib.blake2b(part.numpy().tobytes(), digest_size=16).hexdigest()
    by_rank: list[dict[Rectangle, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, digests)
    first: dict[Rectangle, tuple[int, str]] = {}
    for rank, rectangles in enumerate(by_rank):
        for (name, offset, size), digest in rectangles.items():
            other, expected = first.setdefault((name, offset, size), (rank, digest))
            if digest != expected:
                raise TrainingFault(f"{name} at {offset}, {size}: ranks {other} and {rank} hold different copies of it")
