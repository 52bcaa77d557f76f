"""Check that ranks have bit-identical copies of weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_llama.parallel.shards import Shard
from megatron_llama.system.errors import TrainingFault

T = TypeVar("T")
Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(Hugging Face name, offset, size) of a rectangle."""
_BYTES_AT_ONCE = 1 << 26


@torch.no_grad()
def check_copies(shards: Sequence[Shard]) -> None:
    """Compare the copies of each rectangle that several ranks have. A collective.

    Only rectangles with copies are read, in a few transfers to the host. With one rank there are no copies.

    Raises:
        TrainingFault: On all ranks, if copies differ. Names the tensor and two ranks.
    """
    if dist.get_world_size() == 1:
        return
    parts = {(part.name, part.offset, part.size): (shard, part) for shard in shards for part in shard.rectangles}
    ranks = Counter[Key](key for keys in _gather([*parts]) for key in keys)
    copied = ((key, shard.values[part.local_slices]) for key, (shard, part) in parts.items() if ranks[key] > 1)
    digests = dict(_digests(copied))
    first: dict[Key, tuple[int, str]] = {}
    for rank, copies in enumerate(_gather(digests)):
        for (name, offset, size), digest in copies.items():
            other, expected = first.setdefault((name, offset, size), (rank, digest))
            if digest != expected:
                raise TrainingFault(f"{name} at {offset}, {size}: the copies on ranks {other} and {rank} differ")


def _digests(tensors: Iterable[tuple[Key, torch.Tensor]]) -> Iterator[tuple[Key, str]]:
    """Yield (key, digest) of tensors. They are read in groups of _BYTES_AT_ONCE, because each transfer is a sync."""
    group: list[tuple[Key, torch.Tensor]] = []
    size = 0
    for key, values in tensors:
        group.append((key, values.reshape(-1).view(torch.uint8)))  # bytes: numpy has no bf16
        size += group[-1][1].numel()
        if size >= _BYTES_AT_ONCE:
            yield from _digests_of_group(group)
            group, size = [], 0
    if group:
        yield from _digests_of_group(group)


def _digests_of_group(group: Sequence[tuple[Key, torch.Tensor]]) -> Iterator[tuple[Key, str]]:
    parts = [values for _, values in group]
    read = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()
    for (key, _), values in zip(group, read.split([part.numel() for part in parts]), strict=True):
        yield key, hashlib.blake2b(values.numpy(), digest_size=16).hexdigest()


def _gather(value: T) -> list[T]:
    """Return the value of each rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
