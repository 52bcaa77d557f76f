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

from megatron_llama.parallel import ParallelModel


@contextmanager
def missing_event() -> Iterator[None]:
    """Streams do not wait for events."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("wait_event", "wait_stream"):
            patch.setattr(torch.cuda.Stream, name, lambda *_: None)
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


def hang() -> AbstractContextManager[None]:
    """Rank 1 waits for ever."""

    def wait(model: ParallelModel, microbatches: Any) -> None:
        while dist.get_rank() == 1:
            signal.pause()

    return _before_the_forward_pass(wait)


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "missing event": missing_event,
    "host read": host_read,
    "tensor on the CPU": tensor_on_the_cpu,
    "other order": other_order,
    "hang": hang,
}
