"""Check that ranks have bit-identical copies of weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_llama.parallel.shards import Shard
from megatron_llama.system.errors import TrainingFault

T = TypeVar("T")
Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(Hugging Face name, offset, size) of a rectangle."""


@torch.no_grad()
def check_copies(shards: Sequence[Shard]) -> None:
    """Compare the copies of each rectangle that several ranks have. A collective.

    Only rectangles with copies are read.

    Raises:
        TrainingFault: On all ranks, if copies differ. Names the tensor and two ranks.
    """
    parts = {(part.name, part.offset, part.size): (shard, part) for shard in shards for part in shard.rectangles}
    ranks = Counter[Key](key for keys in _gather([*parts]) for key in keys)
    digests: dict[Key, str] = {}
    for key, (shard, part) in parts.items():
        if ranks[key] > 1:
            values = shard.values[part.local_slices].cpu().reshape(-1).view(torch.uint8)  # bytes: numpy has no bf16
            digests[key] = hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()
    first: dict[Key, tuple[int, str]] = {}
    for rank, copies in enumerate(_gather(digests)):
        for (name, offset, size), digest in copies.items():
            other, expected = first.setdefault((name, offset, size), (rank, digest))
            if digest != expected:
                raise TrainingFault(f"{name} at {offset}, {size}: the copies on ranks {other} and {rank} differ")


def _gather(value: T) -> list[T]:
    """Return the value of each rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
