"""Copies of shards in the host's memory, for an optimizer whose states and step are there (``trainer.offload``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of ``tensors``, which are on ``device``, in the host's memory, pinned unless that is the device.

    The host waits once, until all are there, and with them what has been copied without waiting before.
    """
    on_device = device.type != "cpu"
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    if on_device:
        torch.get_device_module(device).synchronize()
    return copies
