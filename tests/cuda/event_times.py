"""Times that the project measures by events, with a set clock of events. Raises if a time is wrong.

Two ranks run this module. The clock of each process is ``Clock.now``: it moves only where a rank works or waits.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.devices import get_device
from megatron_llama.plan import resolve
from megatron_llama.train import stragglers
from megatron_llama.train.stragglers import WINDOW_STEPS, StragglerWatch
from tests.config.helpers import make
from tests.cuda.in_process import RUNTIME

WORK, WAIT = (0.75, 0.25), (0.125, 0.625)
"""Seconds of each rank in a step; exact in binary, so that sums of them are exact."""
WRONG = "WRONG_CLOCK"
"""Variable that leaves the clock of events to real time."""


class Clock:
    """Time of the host and, once set, of events."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Advance the time for calls that complete from now on."""
        self.now += seconds
        if not os.environ.get(WRONG):
            ctypes.CDLL(RUNTIME).host_cuda_set_clock(ctypes.c_double(self.now))


def two_events(clock: Clock) -> None:
    """The time between two events is the time that has passed."""
    device = get_device("cuda")
    start = device.record_event()
    clock.pass_by(2.5)
    end = device.record_event()
    assert device.elapsed_seconds(start, end) == 2.5
    assert start.elapsed_time(end) == 2500.0


def steps_with_a_slow_rank(rank: int, clock: Clock) -> None:
    """The time of a wait is the time between the events before and after a collective."""
    device, place = get_device("cuda"), torch.device("cuda", rank)
    stragglers.time = clock  # type: ignore[assignment]
    plan = resolve(make(**{"trainer.dp": 2, "trainer.global_batch_size": 2}), 2)
    model: Any = type("Model", (), {"device": place})
    watch, value = StragglerWatch(plan, device, model), torch.zeros(1, device=place)
    all_reduce = dist.ProcessGroup.allreduce

    def allreduce(*args: Any) -> Any:
        work = all_reduce(*args)
        clock.pass_by(WAIT[rank])  # the event after the collective is not recorded yet
        return work

    dist.ProcessGroup.allreduce = allreduce  # type: ignore[method-assign]
    with watch.watching():
        for _ in range(WINDOW_STEPS):
            with watch.step():
                clock.pass_by(WORK[rank])
                dist.all_reduce(value)
    assert watch._window == [WORK[rank]] * WINDOW_STEPS, watch._window
    metrics: dict[str, float] = {}
    watch.after_step(WINDOW_STEPS, metrics, None)
    assert metrics == {"slowest_rank": 0, "slowest_rank_ratio": WORK[0] / WORK[1]}, metrics


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size)
    clock = Clock()
    clock.pass_by(1.0)
    two_events(clock)
    steps_with_a_slow_rank(rank, clock)
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
