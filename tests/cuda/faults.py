"""Mistakes that tests inject into each step of a run, to check that the harness finds them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_llama.checkpoint.memory_copies import MemoryCopies
from megatron_llama.parallel import ParallelModel

Mistake = Callable[[ParallelModel, Any], None]
"""A change of a model or its micro batches, before the forward pass."""


@contextmanager
def _without(place: type, *names: str) -> Iterator[None]:
    """Let these methods do nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(place, name, lambda *_: None)
        yield


@contextmanager
def _before_the_forward_pass(change: Mistake) -> Iterator[None]:
    count = ParallelModel.count

    def changed(self: ParallelModel, microbatches: Any) -> Any:
        change(self, microbatches)
        return count(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "count", changed)
        yield


def host_read(model: ParallelModel, microbatches: Any) -> None:
    """The host reads a label."""
    microbatches[0].labels.max().item()


def tensor_on_the_cpu(model: ParallelModel, microbatches: Any) -> None:
    """The tokens of the first micro batch are on the CPU."""
    microbatches[0] = replace(microbatches[0], tokens=microbatches[0].tokens.cpu())


def other_order(model: ParallelModel, microbatches: Any) -> None:
    """Rank 1 calls two collectives in the other order."""
    value = torch.zeros(4, device=model.device)
    calls: list[Callable[[], Any]] = [lambda: dist.all_reduce(value), lambda: dist.broadcast(value, 0)]
    for collective in calls if dist.get_rank() == 0 else reversed(calls):
        collective()


def other_size(model: ParallelModel, microbatches: Any) -> None:
    """Rank 1 sums more numbers than rank 0."""
    dist.all_reduce(torch.zeros(4 + dist.get_rank(), device=model.device))


def out_of_memory(model: ParallelModel, microbatches: Any) -> None:
    """Rank 1 allocates more memory than the device has."""
    if dist.get_rank() == 1:
        torch.empty(1 << 42, dtype=torch.uint8, device=model.device)


def hang(model: ParallelModel, microbatches: Any) -> None:
    """Rank 1 waits for ever."""
    while dist.get_rank() == 1:
        signal.pause()


MISTAKES = (host_read, tensor_on_the_cpu, other_order, other_size, out_of_memory, hang)
FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    # Streams do not wait for events.
    "missing_event": partial(_without, torch.cuda.Stream, "wait_event", "wait_stream"),
    # Memory that a second stream still uses is free for the first one.
    "early_reuse": partial(_without, torch.Tensor, "record_stream"),
    # An update does not wait for the copy in memory.
    "early_update": partial(_without, MemoryCopies, "hold_updates"),
    **{mistake.__name__: partial(_before_the_forward_pass, mistake) for mistake in MISTAKES},
}
