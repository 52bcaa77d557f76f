"""Several documents in one sequence, of which none attends to another: packed examples, or pretraining's documents.

Attention is block-diagonal and causal, and positions restart with each document, so sharing a sequence does not change
a document's loss (Krell et al. 2021, arXiv:2107.02027). Every pipeline stage gets this with its micro batch, so none of
it is sent.

There are two ways to compute it. ``attend_by_document`` runs each document's own causal attention, and nothing off the
diagonal; its shapes change with every batch. ``Documents.mask`` has one shape, for compilers that want that, and the
whole square is computed. devices/base.py says which devices take the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Lengths = tuple[tuple[int, ...], ...]
"""For each sequence of a batch the tokens of each of its documents, padding at the end being one."""


@dataclass(frozen=True)
class Documents:
    """The documents of a micro batch."""

    ids: torch.Tensor
    """Number of the document of each token [b, s], int64. Padding tokens have a number of their own."""
    lengths: Lengths
    """The same as lengths, which the host knows without waiting for the device."""

    @classmethod
    def of(cls, ids: torch.Tensor) -> Documents:
        """From numbers [b, s] in the host's memory."""
        return cls(ids, tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in ids))

    def to(self, device: torch.device) -> Documents:
        """The same on ``device``."""
        return Documents(self.ids.to(device, non_blocking=True), self.lengths)

    def positions(self) -> torch.Tensor:
        """Positions that restart at 0 with each document [b, s], int64."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    def mask(self) -> torch.Tensor:
        """Whether the query of a row may attend to the key of a column [b, 1, s, s], bool."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & causal)[:, None]


def attend_by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Causal attention inside each document: [b, heads, s, d] with k and v [b, kv heads, s, d] to [b, heads, s, d]."""
    grouped = q.shape[1] != k.shape[1]
    rows = []
    for row, sizes in enumerate(lengths):
        parts = (x[row : row + 1].split(list(sizes), dim=2) for x in (q, k, v))
        outputs = [
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            for queries, keys, values in zip(*parts, strict=True)
        ]
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)
