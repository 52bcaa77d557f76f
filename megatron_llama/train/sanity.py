"""Checks that cost little and catch what would otherwise train on quietly: a weight without gradient, copies drifting
apart."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard


class TrainingFault(RuntimeError):
    """Training can't go on; the weights are as the last good step left them."""


class FiniteCheck:
    """Stops a run, or leaves steps out, before the optimizer touches the weights with something that is no number."""

    def __init__(self, skips: int) -> None:
        self.skips = skips
        """Steps that may still be left out."""

    def passes(self, step: int, loss: float, norm: float, shards: Sequence[Shard]) -> bool:
        """False for a step that must be left out. All ranks must call it, with the same numbers.

        Raises TrainingFault, on all ranks, when no more steps may be left out; it names ranks and layers.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        fault = f"step {step}: the loss is {loss:.4g} and the gradient norm {norm:.4g}; {_not_finite(shards)}"
        if self.skips == 0:
            raise TrainingFault(f"{fault}; the weights were not updated")
        self.skips -= 1
        if dist.get_rank() == 0:
            sys.stderr.write(f"left out {fault}; {self.skips} more may be left out\n")
        return False


def _not_finite(shards: Sequence[Shard]) -> str:
    """Which ranks hold weights or gradients that are no numbers, and the first of them. All ranks must call it."""
    found = [f"the weight {s.name}" for s in shards if not s.values.isfinite().all()]
    found = found or [f"the gradient of {s.name}" for s in shards if s.grad is not None and not s.grad.isfinite().all()]
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, found)
    said = [
        f"rank {rank}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} not finite"
        for rank, names in enumerate(everyones)
        if names
    ]
    return ", ".join(said) or "every weight and gradient is finite by itself"


def check_every_gradient(shards: Sequence[Shard]) -> None:
    """Every trainable weight must have got a gradient; run after the first backward pass."""
    missing = [s.name for s in shards if s.parameter.requires_grad and s.grad is None]
    if missing:
        raise TrainingFault(f"no gradient reached {', '.join(missing)}")


@torch.no_grad()
def check_copies(shards: Sequence[Shard]) -> None:
    """Ranks that hold the same rectangle of the same tensor must hold the same bits. All ranks must call it."""
    mine = {
        (piece.name, piece.offset, piece.size): hashlib.blake2b(
            _bytes(values[piece.local_slices]), digest_size=16
        ).hexdigest()
        for shard in shards
        for values in (shard.values,)
        for piece in shard.pieces
    }
    everyones: list[dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]] = [
        {} for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(everyones, mine)
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, rectangles in enumerate(everyones):
        for key, digest in rectangles.items():
            other, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                name, offset, size = key
                raise TrainingFault(f"{name} at {offset}, {size}: ranks {other} and {rank} hold different copies of it")


def _bytes(values: torch.Tensor) -> bytes:
    """The bits of a tensor of any dtype; numpy knows no bf16."""
    return values.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
