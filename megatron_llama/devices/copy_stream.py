"""Separate streams for copies between a device and host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_llama import devices

_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def copy_stream(device: torch.device, purpose: str) -> torch.Stream | None:
    """Return the stream for copies of a purpose, None on a device without streams."""
    if not devices.of(device).asynchronous:
        return None
    return _streams.setdefault((device, purpose), torch.Stream(device))


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run copies on ``stream``, after the work launched so far on the current stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        yield
