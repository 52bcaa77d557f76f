"""Each wait is recorded once, regardless of the group that runs the collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_llama.devices.cpu import DEVICE
from megatron_llama.train.waits import trace_waits
from tests.ranks import run_ranks


def _recorded_waits(rank: int, world: int) -> list[str]:
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


def test_each_wait_is_recorded_once() -> None:
    for world in (2, 3):  # gloo runs the all-reduce of three ranks
        expected = ["world all_reduce", "world all_gather", "world broadcast"]
        assert run_ranks(_recorded_waits, world, world) == [expected] * world
