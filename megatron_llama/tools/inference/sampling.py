"""Choosing the next id."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Greedy, or how ids are drawn."""

    greedy: bool = False
    """Always the likeliest id; the other fields have no effect then."""
    temperature: float = 0.7
    """Logits are divided by this."""
    top_p: float = 1.0
    """Draw among the fewest likeliest ids whose probabilities add up to this much (nucleus sampling, Holtzman et al.
    2020, arXiv:1904.09751)."""
    seed: int = 1234

    def generators(self, rows: int) -> list[torch.Generator]:
        """One for each row, so that what a row draws does not depend on the rows beside it."""
        return [torch.Generator().manual_seed(self.seed + row) for row in range(rows)]


def choose(logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]) -> torch.Tensor:
    """The next id of each row [b], from logits [b, vocabulary], fp32, on the CPU."""
    if sampling.greedy:
        return logits.argmax(-1)
    # In fp64, by where one uniform number falls among the cumulative probabilities: the last bits of the logits, which
    # differ between layouts, then almost never change the draw.
    probabilities, ids = torch.softmax(logits.double() / sampling.temperature, -1).sort(dim=-1, descending=True)
    probabilities = nucleus(probabilities, sampling.top_p)
    sums = probabilities.cumsum(-1)
    drawn = torch.stack([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])
    positions = torch.searchsorted(sums, drawn * sums[:, -1:], right=True)
    kept = (probabilities > 0).sum(-1, keepdim=True)
    return ids.gather(-1, positions.minimum(kept - 1))[:, 0]


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities [..., vocabulary] in descending order, with zeros after the fewest that add up to ``top_p``."""
    before = probabilities.cumsum(-1) - probabilities
    before[..., 0] = -1  # the likeliest stays, whatever top_p
    return torch.where(before < top_p, probabilities, 0.0)
