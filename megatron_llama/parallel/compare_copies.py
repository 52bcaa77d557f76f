"""Check that ranks have bit-identical copies of weights and optimizer states.

The digest of a tensor is a 64-bit hash of all bits, computed on the tensor's device:

    sums     of columns and of rows, modulo 2**64, of the bits as integers (of 64 bits if a row's bytes permit it)
    digest   the sum of the mixed sums; SplitMix64's finalizer mixes each with its position
             (Steele et al. 2014, Fast Splittable Pseudorandom Number Generators)

One changed bit changes one sum of a column. The finalizer is invertible, so the digest changes. Other differences,
such as swapped elements, are missed with a probability of about 2**-64.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.parallel.groups import gather_objects
from megatron_llama.parallel.shards import Shard
from megatron_llama.system.errors import TrainingFault
from megatron_llama.topology import Topology

Part = tuple[str, Shard, torch.Tensor]
"""(kind, shard, tensor). The kind is empty for weights, otherwise the name of a state. The tensor has the shard's rows,
or is a scalar that belongs to the shard."""
REMEDY = (
    "each saved checkpoint has equal copies. Start the same command again: it resumes from the newest one. If a copy "
    "on the same host differs again, test its memory and devices, or exclude the host"
)
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MOST_NAMED = 3


class Key(NamedTuple):
    """Name of a part of a tensor. Ranks with equal keys hold copies."""

    kind: str
    """Empty for weights, otherwise the name of the optimizer state."""
    name: str
    """Hugging Face name."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __str__(self) -> str:
        kind = f"{self.kind} of " if self.kind else ""
        return f"{kind}{self.name} (offset {[*self.offset]}, size {[*self.size]})"


@dataclass
class _Group:
    """Ranks that hold the same copies."""

    columns: dict[int, int]
    """Ranks, and for each the column of its digest."""
    keys: list[Key]
    """Keys of the copies, if this rank is in the group."""


class Copies:
    """Compares the tensors of which several ranks hold copies."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device
        self._hashes_on = device if devices.of(device).sums_int64 else torch.device(devices.HOST)
        self._groups: dict[bool, list[_Group]] = {}

    @torch.no_grad()
    def compare(self, parts: Iterable[Part], moment: str, *, with_states: bool) -> None:
        """Compare the copies. A collective, for which the host waits.

        The ranks exchange one digest (8 bytes) per group of ranks that this rank has copies in common with. The first
        call with each value of ``with_states`` also exchanges keys. With one rank nothing is compared.

        Args:
            parts: the weights, and ``with_states`` the optimizer states.
            moment: for messages, such as "step 300".

        Raises:
            TrainingFault: On all ranks, if copies differ. Names tensors, ranks and the remedy.
        """
        if self._topology.world_size == 1:
            return
        tensors = dict(self._slices(parts))
        if with_states not in self._groups:
            self._groups[with_states] = _find_groups(tensors)
        groups = self._groups[with_states]
        width = max((column + 1 for group in groups for column in group.columns.values()), default=0)
        if not width:
            return
        digests = [self._digest([tensors[key] for key in group.keys]) for group in groups if group.keys]
        digests += [torch.zeros((), dtype=torch.int64, device=self._hashes_on)] * (width - len(digests))
        gathered = torch.empty(self._topology.world_size * width, dtype=torch.int64, device=self._device)
        dist.all_gather_into_tensor(gathered, torch.stack(digests).to(self._device))
        values = gathered.tolist()
        differing = [
            group for group in groups if len({values[rank * width + at] for rank, at in group.columns.items()}) > 1
        ]
        if differing:
            keys = [key for group in differing for key in group.keys]
            raise TrainingFault(self._describe({key: tensors[key] for key in keys}, moment))

    def _slices(self, parts: Iterable[Part]) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield the rows of each rectangle, and the rows that pad the vocabulary. A scalar belongs to the last one."""
        place = self._topology.place["tp"], self._topology.shard_rank
        for kind, shard, tensor in parts:
            keys = [Key(kind, part.name, part.offset, part.size) for part in shard.rectangles]
            if not tensor.dim():
                yield from ((key, tensor[None]) for key in keys[-1:])
                continue
            end = 0
            for key, part in zip(keys, shard.rectangles, strict=True):
                start, end = part.local_offset[0], part.local_offset[0] + part.size[0]
                yield key, tensor[start:end]
            if len(tensor) > end:
                yield Key(kind, f"the vocabulary padding in {shard.name}", place, (len(tensor) - end,)), tensor[end:]

    def _digest(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the digest of tensors, an int64 scalar.

        Tensors on the host cause no sync. On a device without sums of int64, each tensor is copied to the host.
        """
        if self._hashes_on != self._device:
            tensors = [tensor.to(self._hashes_on) for tensor in tensors]
        return _mix(torch.cat([_sums(tensor).to(self._hashes_on, non_blocking=True) for tensor in tensors]))

    def _describe(self, tensors: Mapping[Key, torch.Tensor], moment: str) -> str:
        """Describe the copies that differ. A collective. ``tensors``: this rank's parts of groups that differ."""
        local = [self._digest([tensor]) for tensor in tensors.values()]
        digests = dict(zip(tensors, torch.stack(local).tolist() if local else [], strict=True))
        gathered = gather_objects((socket.gethostname(), digests))
        holders: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, (_, of_rank) in enumerate(gathered):
            for key, digest in of_rank.items():
                holders[key][digest].append(rank)
        differing = {key: [*by_digest.values()] for key, by_digest in holders.items() if len(by_digest) > 1}
        texts = []
        for key, sets in [*differing.items()][:_MOST_NAMED]:
            ranks = [_name_ranks(each) for each in sorted(sets, key=len)]
            texts.append(f"the copies of {key} on {', '.join(ranks[:-1])} and {ranks[-1]} differ")
        more = f"; {len(differing) - len(texts):,} more tensors differ" if len(differing) > len(texts) else ""
        odd = Counter(rank for sets in differing.values() for each in sorted(sets, key=len)[:-1] for rank in each)
        hosts = ", ".join(f"rank {rank} is on {gathered[rank][0]}" for rank, _ in odd.most_common(_MOST_NAMED))
        return f"{moment}: {'; '.join(texts)}{more}; {hosts}; {REMEDY}"


def _name_ranks(ranks: Sequence[int]) -> str:
    listed = [str(rank) for rank in ranks[:8]] + ["..."] * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(listed)}"


def _find_groups(tensors: Iterable[Key]) -> list[_Group]:
    """Return the groups of ranks that hold the same copies, in the same order on all ranks. A collective."""
    keys = {blake2b(repr(tuple(key)).encode(), digest_size=8).digest(): key for key in sorted(tensors)}
    holders: dict[bytes, list[int]] = defaultdict(list)
    for rank, hashes in enumerate(gather_objects([*keys])):
        for each in hashes:
            holders[each].append(rank)
    used, groups = Counter[int](), []
    for ranks in sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1}):
        local = [key for each, key in keys.items() if tuple(holders[each]) == ranks]
        groups.append(_Group({rank: used[rank] for rank in ranks}, local))
        used.update(ranks)
    return groups


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of columns and of rows of a tensor as integers, int64 [columns + rows]; a vector as it is."""
    if tensor.dim() == 1:
        return tensor.view(_INTEGERS[tensor.element_size()]).long()
    row = tensor.shape[1] * tensor.element_size()
    bits = tensor.view(next(kind for size, kind in _INTEGERS.items() if row % size == 0))
    return torch.cat((bits.sum(0), bits.sum(1)))


def _mix(sums: torch.Tensor) -> torch.Tensor:
    """Return the sum of SplitMix64's finalizer of each sum and its position."""
    mixed = torch.arange(1, len(sums) + 1, device=sums.device).mul_(_GOLDEN).add_(sums)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed = (mixed ^ _shift(mixed, shift)).mul_(factor)
    return (mixed ^ _shift(mixed, 31)).sum()


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right; torch's own shift of int64 repeats the sign."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
