"""The best that matrix products reach here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def product_rate(
    size: int,
    dtype: torch.dtype,
    seconds: float,
    device: str | torch.device = "cpu",
    wait: Callable[[], object] = lambda: None,
) -> float:
    """FLOP/s of the best of the products of two matrices of ``size`` rows and columns that ``seconds`` have room for.
    ``wait`` returns when the device has finished."""
    import torch

    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
