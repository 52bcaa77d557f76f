"""Visible keys of each query: causal, inside documents, and by a pattern such as a sliding window.

Several documents can share one sequence: packed examples, or documents of pretraining. No document attends to another.
Attention is block-diagonal and causal, and positions restart with each document, so sharing a sequence does not change
a document's loss (Krell et al. 2021, arXiv:2107.02027). Every pipeline stage gets the documents with its micro batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_llama.arch.attention_pattern import Lengths, Pattern


@dataclass(frozen=True)
class Documents:
    """Documents of a micro batch."""

    ids: Tensor
    """Document number of each token [b, s], int64. Padding tokens have a separate number."""
    lengths: Lengths
    """Tokens of each document, on the host: reading them is no sync."""
    cu_seqlens: Tensor
    """Boundaries of the documents among the tokens of all rows [b * s + 1], int32, from 0. The last boundary repeats up
    to the fixed shape."""
    host_cu_seqlens: Tensor
    """``cu_seqlens`` in host memory."""

    @classmethod
    def of(cls, ids: Tensor) -> Documents:
        """Build from document numbers [b, s], int64, in host memory."""
        lengths = tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in ids)
        cu_seqlens = torch.full((ids.numel() + 1,), ids.numel(), dtype=torch.int32, pin_memory=ids.is_pinned())
        ends = [0, *accumulate(chain.from_iterable(lengths))]
        cu_seqlens[: len(ends)] = torch.tensor(ends, dtype=torch.int32)
        return cls(ids, lengths, cu_seqlens, cu_seqlens)

    @classmethod
    def whole(cls, rows: int, length: int, device: torch.device) -> Documents:
        """Build sequences of one document each."""
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        boundaries = partial(torch.arange, 0, (rows + 1) * length, length, dtype=torch.int32)
        # Built twice, because a copy from host memory would be a sync.
        return cls(ids, ((length,),) * rows, boundaries(device=device), boundaries())

    def on(self, move: Callable[[Tensor], Tensor]) -> Documents:
        """Return a copy on the device to which ``move`` takes tensors."""
        return Documents(move(self.ids), self.lengths, move(self.cu_seqlens), self.host_cu_seqlens)

    def positions(self) -> Tensor:
        """Return positions that restart at 0 with each document [b, s], int64."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values


class AttentionInputs(NamedTuple):
    """Visible keys of a micro batch in the form that one kernel takes. Built once, for all layers."""

    pattern: Pattern
    kernel: str
    """``tiles`` (a call per visible rectangle of the scores), ``varlen`` (one call for all documents) or ``mask`` (all
    scores, with a dense mask); see ``Device.attention``."""
    lengths: Lengths | None = None
    """Lengths of the documents; None inside compiled blocks."""
    host_cu_seqlens: Tensor | None = None
    """``Documents.host_cu_seqlens`` inside compiled blocks."""
    cu_seqlens: Tensor | None = None
    """For ``varlen``: ``Documents.cu_seqlens`` on the device."""
    first_visible_key: Tensor | None = None
    """For the CPU's C++ kernel: first visible key per query [b, s], int32. Keys from there to the query are visible."""
    mask: Tensor | None = None
    """For ``mask``: whether a query (row) attends to a key (column) [b or 1, 1, s, s], bool."""


def build_attention_inputs(
    tokens: Tensor, documents: Documents | None, pattern: Pattern, kernel: str, compiled: bool
) -> AttentionInputs | None:
    """Return the inputs of ``kernel`` for tokens [b, s]. None if each token attends to all earlier tokens."""
    rows, length = tokens.shape
    if documents is None and not pattern.is_sparse(length):
        return None
    if kernel == "mask":
        positions = torch.arange(length, device=tokens.device)[None] if documents is None else documents.positions()
        return masked(positions, pattern, documents)
    if documents is None:
        documents = Documents.whole(rows, length, tokens.device)
    cu_seqlens = documents.cu_seqlens if kernel == "varlen" else None
    if compiled:
        return AttentionInputs(pattern, kernel, None, documents.host_cu_seqlens, cu_seqlens)
    return AttentionInputs(pattern, kernel, documents.lengths, None, cu_seqlens)


def masked(positions: Tensor, pattern: Pattern, documents: Documents | None) -> AttentionInputs:
    """Return a dense mask for tokens at ``positions`` [b, s] inside their documents. The tokens may have gaps."""
    mask = dense_mask(positions, pattern, None if documents is None else documents.ids)
    return AttentionInputs(pattern, "mask", mask=mask)


def dense_mask(positions: Tensor, pattern: Pattern, documents: Tensor | None = None) -> Tensor:
    """Return whether the query of a row attends to the key of a column [b, 1, s, s], bool.

    Args:
        positions: inside documents [b, s].
        documents: numbers of the documents [b, s]; None for one document per sequence.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    mask = (index[:, None] >= index) & is_visible(positions[:, :, None], positions[:, None], pattern)
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None])
    return mask[:, None]


def is_visible(queries: Tensor, keys: Tensor, pattern: Pattern) -> Tensor:
    """Return whether queries at given positions attend to earlier keys at others, bool. Positions broadcast.

    Block-sparse attention sees the query's group of blocks, and the last blocks of each earlier group.
    """
    if pattern.window:
        return queries - keys < pattern.window
    if pattern.group:
        is_global = keys % pattern.group >= pattern.group - pattern.block * pattern.global_blocks
        return is_global | (queries // pattern.group == keys // pattern.group)
    return torch.ones_like(queries - keys, dtype=torch.bool)


def first_visible_keys(documents: Documents, window: int) -> Tensor:
    """Return the first visible key of each query [b, s], int32. ``window`` is 0 for none."""
    positions = documents.positions()
    index = torch.arange(positions.shape[1], device=positions.device)
    return (index - (positions.clamp(max=window - 1) if window else positions)).int()
