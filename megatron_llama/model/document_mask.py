"""Several documents in one sequence, of which none attends to another: packed examples, or pretraining's documents.

Attention is block-diagonal and causal, and positions restart with each document, so sharing a sequence does not change
a document's loss (Krell et al. 2021, arXiv:2107.02027). Every pipeline stage gets this with its micro batch, so none of
it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

Lengths = tuple[tuple[int, ...], ...]
"""For each sequence of a batch the tokens of each of its documents, padding at the end being one."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro batch."""

    ids: torch.Tensor
    """Number of the document of each token [b, s], int64. Padding tokens have a number of their own."""
    lengths: Lengths
    """The same as lengths, which the host knows without waiting for the device."""
    borders: torch.Tensor
    """Where documents begin and end among the tokens of all rows [b * s + 1], int32: 0 first, and the last one
    repeated, so that the shape is always the same."""
    host_borders: torch.Tensor
    """The same in the host's memory."""

    @classmethod
    def of(cls, ids: torch.Tensor) -> Documents:
        """From numbers [b, s] in the host's memory."""
        lengths = tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in ids)
        borders = torch.full((ids.numel() + 1,), ids.numel(), dtype=torch.int32, pin_memory=ids.is_pinned())
        ends = [0, *accumulate(chain.from_iterable(lengths))]
        borders[: len(ends)] = torch.tensor(ends, dtype=torch.int32)
        return cls(ids, lengths, borders, borders)

    @classmethod
    def whole(cls, rows: int, length: int, device: torch.device) -> Documents:
        """Sequences of one document each."""
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        borders = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
        return cls(ids, ((length,),) * rows, borders.to(device), borders)

    def on(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Documents:
        """The same on a device to which ``move`` takes tensors."""
        return Documents(move(self.ids), self.lengths, move(self.borders), self.host_borders)

    def positions(self) -> torch.Tensor:
        """Positions that restart at 0 with each document [b, s], int64."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values
