"""Packed sequences: several examples in one sequence, of which none attends to another.

Attention is block-diagonal and causal, and positions restart with each example, so packing does not change an example's
loss (Krell et al. 2021, arXiv:2107.02027). Every pipeline stage gets this with its micro batch, so none of it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Documents:
    """The examples of a packed micro batch."""

    ids: torch.Tensor
    """Number of the example of each token [b, s], int64. Padding tokens have a number of their own."""

    def to(self, device: torch.device) -> Documents:
        """The same on ``device``."""
        return Documents(self.ids.to(device, non_blocking=True))

    def positions(self) -> torch.Tensor:
        """Positions that restart at 0 with each example [b, s], int64."""
        index = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        starts = torch.ones_like(self.ids, dtype=torch.bool)
        starts[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    def mask(self) -> torch.Tensor:
        """Whether the query of a row may attend to the key of a column [b, 1, s, s], bool."""
        length = self.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.ids.device).tril()
        return ((self.ids[:, :, None] == self.ids[:, None, :]) & causal)[:, None]
