"""Copies of shards in the host's memory, for an optimizer whose states and step are there (``trainer.offload``)."""

from __future__ import annotations

import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in the host's memory, pinned where it comes from a device."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
    return empty.copy_(tensor)
