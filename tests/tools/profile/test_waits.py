"""Each wait is told once, whichever group does a collective in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_llama.devices.cpu import DEVICE
from megatron_llama.train.waits import trace_waits
from tests.ranks import run_ranks


def _entered(rank: int, world: int) -> list[str]:
    names: list[str] = []
    inside = False

    @contextmanager
    def waiting(name: str) -> Iterator[None]:
        nonlocal inside
        assert not inside, f"{name} begins while the rank waits"
        inside = True
        names.append(name)
        yield
        inside = False

    group = dist.group.WORLD
    assert group is not None and dist.get_backend() == DEVICE.backend
    with trace_waits(waiting, compiled=False):
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.empty(world), torch.ones(1))
        dist.broadcast(torch.ones(3), 0)
    return list(dict.fromkeys(names))


def test_a_wait_is_told_once() -> None:
    for world in (2, 3):  # sums of three ranks are gloo's
        told = ["world all_reduce", "world all_gather", "world broadcast"]
        assert run_ranks(_entered, world, world) == [told] * world
