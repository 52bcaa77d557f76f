"""Several examples in one sequence: which token belongs to which, so that none sees another.

Each token attends to its own example alone, and positions start again with each. Every pipeline stage gets this with
its micro batch, so nothing of it travels between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Documents:
    """The examples of a packed micro batch."""

    ids: torch.Tensor
    """Number of the example that each token belongs to [b, s], int64; tokens that are only padding share a number of
    their own."""

    def positions(self) -> torch.Tensor:
        """Places from each example's first token on [b, s], int64."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return place - torch.where(starts, place, 0).cummax(dim=1).values

    def mask(self) -> torch.Tensor:
        """True where the token of a row may look at that of a column: in its example, not ahead [b, 1, s, s]."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & causal)[:, None]
