"""Checks that cost little and catch what would otherwise train on quietly: a weight without gradient, copies drifting apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_llama.parallel import Shard


class TrainingFault(RuntimeError):
    """Training can't go on; the weights are as the last good step left them."""


def check_finite(step: int, loss: float, norm: float) -> None:
    """Stop before the optimizer touches the weights when the loss or the gradient norm is no number."""
    if not math.isfinite(loss):
        raise TrainingFault(f"step {step}: the loss is {loss}; the weights were not updated")
    if not math.isfinite(norm):
        raise TrainingFault(f"step {step}: the gradient norm is {norm} (loss {loss:.4f}); the weights were not updated")


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
            shard.local[piece.local_slices].contiguous().cpu().numpy().tobytes(), digest_size=16
        ).hexdigest()
        for shard in shards
        for piece in shard.pieces
    }
    everyones: list[dict[tuple[str, tuple[int, ...], tuple[int, ...]], str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, str]] = {}
    for rank, rectangles in enumerate(everyones):
        for key, digest in rectangles.items():
            other, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                name, offset, size = key
                raise TrainingFault(f"{name} at {offset}, {size}: ranks {other} and {rank} hold different copies of it")
