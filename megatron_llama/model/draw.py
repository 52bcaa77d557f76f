"""Random choice of ids, the same in every layout and on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def draw(probabilities: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw an id per row by an exponential race: each id arrives at a random time, and the first one wins.

    The noise of an id depends on the row's generator, the number of earlier draws and the id. Rounding of the
    probabilities changes the winner only if the first two times are equal within this rounding. With a cumulative sum,
    rounding of all earlier ids would move the limits of each id.

    Args:
        probabilities: [b, vocabulary], fp64, on the CPU. Their sum need not be 1.
        generators: one per row, on the CPU.

    Returns:
        ids, [b].
    """
    # Not exponential_, whose numbers depend on whether torch is built with MKL.
    uniform = [torch.rand(probabilities.shape[-1], dtype=torch.float64, generator=each) for each in generators]
    times = -torch.stack(uniform).clamp_min_(torch.finfo(torch.float64).tiny).log_()
    return (probabilities / times).argmax(-1)
