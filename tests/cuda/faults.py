"""Mistakes that tests inject into each step of a run, to check that the harness finds them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_llama.checkpoint.memory_copies import MemoryCopies
from megatron_llama.parallel import ParallelModel


@contextmanager
def missing_event() -> Iterator[None]:
    """Streams do not wait for events."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("wait_event", "wait_stream"):
            patch.setattr(torch.cuda.Stream, name, lambda *_: None)
        yield


@contextmanager
def early_reuse() -> Iterator[None]:
    """Memory that a second stream still uses is free for the first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        yield


@contextmanager
def early_update() -> Iterator[None]:
    """An update does not wait for the copy in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryCopies, "hold_updates", lambda *_: None)
        yield


@contextmanager
def _before_the_forward_pass(change: Callable[[ParallelModel, Any], None]) -> Iterator[None]:
    count = ParallelModel.count

    def changed(self: ParallelModel, microbatches: Any) -> Any:
        change(self, microbatches)
        return count(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "count", changed)
        yield


def host_read() -> AbstractContextManager[None]:
    """The host reads a label."""
    return _before_the_forward_pass(lambda model, microbatches: microbatches[0].labels.max().item())


def tensor_on_the_cpu() -> AbstractContextManager[None]:
    """The tokens of the first micro batch are on the CPU."""

    def move(model: ParallelModel, microbatches: Any) -> None:
        microbatches[0] = replace(microbatches[0], tokens=microbatches[0].tokens.cpu())

    return _before_the_forward_pass(move)


def other_order() -> AbstractContextManager[None]:
    """Rank 1 calls two collectives in the other order."""

    def call(model: ParallelModel, microbatches: Any) -> None:
        value = torch.zeros(4, device=model.device)
        calls: list[Callable[[], Any]] = [lambda: dist.all_reduce(value), lambda: dist.broadcast(value, 0)]
        for collective in calls if dist.get_rank() == 0 else reversed(calls):
            collective()

    return _before_the_forward_pass(call)


def other_size() -> AbstractContextManager[None]:
    """Rank 1 sums more numbers than rank 0."""

    def call(model: ParallelModel, microbatches: Any) -> None:
        dist.all_reduce(torch.zeros(4 + dist.get_rank(), device=model.device))

    return _before_the_forward_pass(call)


def out_of_memory() -> AbstractContextManager[None]:
    """Rank 1 allocates more memory than the device has."""

    def allocate(model: ParallelModel, microbatches: Any) -> None:
        if dist.get_rank() == 1:
            torch.empty(1 << 42, dtype=torch.uint8, device=model.device)

    return _before_the_forward_pass(allocate)


def hang() -> AbstractContextManager[None]:
    """Rank 1 waits for ever."""

    def wait(model: ParallelModel, microbatches: Any) -> None:
        while dist.get_rank() == 1:
            signal.pause()

    return _before_the_forward_pass(wait)


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "missing event": missing_event,
    "early reuse": early_reuse,
    "early update": early_update,
    "host read": host_read,
    "tensor on the CPU": tensor_on_the_cpu,
    "other order": other_order,
    "other size": other_size,
    "out of memory": out_of_memory,
    "hang": hang,
}
