"""Sums of tensors that are narrower than the sum."""

from __future__ import annotations

import torch

PIECE = 2**18
"""Numbers that are widened at a time, in memory that stays in the cache."""


def add_widened(total: torch.Tensor, part: torch.Tensor) -> None:
    """``total += part``. A narrower part torch would first widen as a whole on a CPU, into new memory."""
    narrower = part.element_size() < total.element_size() and total.is_contiguous()
    if total.device.type != "cpu" or not narrower:
        total += part
        return
    wide = total.new_empty(min(PIECE, total.numel()))
    for sum_, narrow in zip(total.view(-1).split(PIECE), part.reshape(-1).split(PIECE), strict=True):
        sum_ += wide[: narrow.numel()].copy_(narrow)
