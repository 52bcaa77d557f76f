"""Division of sequences over context-parallel ranks: tokens of each rank, by attention work (``divide``)."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.arch.attention_pattern import CAUSAL, Lengths, Pattern
from megatron_llama.topology import Topology

Chunks = tuple[range, ...]
"""Positions of a rank's tokens in the sequences."""


def local_chunks(
    topology: Topology, length: int, documents: Lengths | None = None, pattern: Pattern = CAUSAL
) -> Chunks:
    """Return the positions of this rank's tokens in sequences of ``length`` tokens, in its order. See ``divide``."""
    return divide(topology.sizes["cp"], length, documents, pattern)[topology.place["cp"]]


def zigzag(cp_rank: int, cp: int, length: int) -> Chunks:
    """Return the positions of a context-parallel rank's tokens: chunks r and 2 cp - 1 - r of 2 cp equal chunks.

    A token of chunk i attends to chunks 0 to i, so two such chunks are the same causal work on each rank.
    """
    if cp == 1:
        return (range(length),)
    size = length // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (cp_rank, 2 * cp - 1 - cp_rank))


def zigzags(cp: int, length: int) -> tuple[Chunks, ...]:
    """Return ``zigzag`` of all ranks."""
    return tuple(zigzag(rank, cp, length) for rank in range(cp))


@lru_cache(64)
def divide(cp: int, length: int, documents: Lengths | None = None, pattern: Pattern = CAUSAL) -> tuple[Chunks, ...]:
    """Return the positions of each context-parallel rank's tokens in sequences of ``length`` tokens.

    All ranks have the same number of tokens. Without documents, or with one in each sequence, the order is zig-zag.
    Otherwise attention work decides: chunks, the most expensive first, go to the rank with the least work that has
    fewer than its number of chunks (Graham 1969, longest processing time first).

    Args:
        documents: for each sequence of the micro batch, the lengths of its documents. Work is summed over sequences.
        pattern: visible keys inside a document.
    """
    # More chunks balance better; the length is a multiple of two for each rank (``Grid.sequence_unit``).
    if cp == 1 or documents is None or all(len(row) == 1 for row in documents):
        return zigzags(cp, length)
    each = max(count for count in (2, 4, 8) if length % (cp * count) == 0)
    work = chunk_work(length, cp * each, documents, pattern)
    loads, chunks = [0] * cp, [list[int]() for _ in range(cp)]
    for chunk in sorted(range(len(work)), key=lambda number: (-work[number], number)):
        rank = min((r for r in range(cp) if len(chunks[r]) < each), key=lambda r: (loads[r], r))
        loads[rank] += work[chunk]
        chunks[rank].append(chunk)
    size = length // (cp * each)
    return tuple(tuple(range(chunk * size, (chunk + 1) * size) for chunk in sorted(one)) for one in chunks)


def chunk_work(length: int, count: int, documents: Lengths, pattern: Pattern) -> list[int]:
    """Return the visible keys of the queries in each of ``count`` equal chunks, summed over sequences."""
    size, work = length // count, [0] * count
    for row in documents:
        start = 0
        for tokens in row:
            for chunk in range(start // size, (start + tokens - 1) // size + 1):
                first, end = max(chunk * size - start, 0), min((chunk + 1) * size - start, tokens)
                work[chunk] += pattern.keys(end) - pattern.keys(first)
            start += tokens
    return work


def position_index(chunks: Chunks, device: torch.device) -> Tensor:
    """Return the positions of chunks, int64 [tokens]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


class Division:
    """Division of whole sequences over the context-parallel ranks, for inference. Sequences are padded."""

    def __init__(self, topology: Topology, group: dist.ProcessGroup) -> None:
        self.topology, self.group = topology, group

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens [s/cp], int64, in sequences padded from ``length`` tokens."""
        unit = 2 * self.topology.sizes["cp"]
        return position_index(local_chunks(self.topology, -(-length // unit) * unit), device)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part [b, s/cp] of a tensor of whole sequences [b, s]. Padding is 0."""
        positions = self.positions(x.shape[1], x.device)
        return x.index_select(1, positions.clamp(max=x.shape[1] - 1)) * (positions < x.shape[1])

    def local_index(self, index: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return (index among this rank's tokens [b], 0 if absent; whether this rank has it [b]) of positions [b]."""
        matches = self.positions(length, index.device) == index[:, None]
        return matches.long().argmax(1), matches.any(1)

    def select(self, logits: Tensor, is_here: Tensor) -> Tensor:
        """Return each row's logits [1, b, vocabulary/t] from the rank where ``is_here`` [b] holds. A collective."""
        logits = torch.where(is_here[None, :, None], logits, 0.0)
        dist.all_reduce(logits, group=self.group)
        return logits
