"""A contestant's process: builds, trains a first step, then trains as many steps as it is told, and measures itself.

The messages go over a socket, one JSON object each, so that whatever a peer prints does no harm. Imported in the peers'
environments: it needs nothing but torch.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Client
from typing import Any, Protocol

import torch
from torch._subclasses import FakeTensor

from benchmarks.harness.task import Facts, Task


class Trainer(Protocol):
    """A built model with its optimizer."""

    facts: Facts

    def step(self, number: int) -> float:
        """Trains on the tokens of step ``number``, an optimizer step and the gradients' clipping included; the loss."""
        ...


class Ranks:
    """How the ranks of one contestant agree; this one is alone."""

    is_first = True

    def share(self, receive: Callable[[], Any]) -> Any:
        """What ``receive`` returns on the first rank, on all of them."""
        return receive()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all of them."""
        return [value]


def read_task() -> Task:
    """The task on the command line, with the threads set up as it says."""
    task = Task.from_json(sys.argv[1])
    torch.set_num_threads(task.threads)
    return task


def serve(
    task: Task, build: Callable[[], Trainer], ranks: Ranks | None = None, marks: dict[str, float] | None = None
) -> None:
    """Reports the first step, then obeys until it is told to end. All ranks call it.

    ``marks`` are moments of the start, in seconds since the epoch, that the report passes on.
    """
    ranks = ranks or Ranks()
    marks = {"imports": time.time(), **(marks or {})}
    connection = Client(task.address) if ranks.is_first else None

    def receive() -> Any:
        assert connection is not None
        return json.loads(connection.recv_bytes())

    trainer = build()
    marks["built"] = time.time()
    loss = trainer.step(1)
    _synchronize(task)
    marks["first_step"] = time.time()
    ready = {"facts": asdict(trainer.facts), "loss": loss, "graphs": _new_graphs(), "marks": marks}
    step = 1
    while True:
        if connection is not None:
            connection.send_bytes(json.dumps(ready).encode())
        order = ranks.share(receive)
        if not order["steps"]:
            return
        if order["watch"]:
            step += 1
            ready = {"live_bytes": sum(ranks.gather(_live_bytes(task, trainer, step)))}
            continue
        ready = _train(task, trainer, ranks, step + 1, order["steps"])
        step += order["steps"]


def _train(task: Task, trainer: Trainer, ranks: Ranks, first: int, steps: int) -> dict[str, Any]:
    """Trains ``steps`` steps and reports their times, the last loss and the memory."""
    _forget_peak_memory(task)
    seconds = []
    before = _processor_seconds()
    for number in range(first, first + steps):
        start = time.perf_counter()
        loss = trainer.step(number)
        _synchronize(task)
        seconds.append(time.perf_counter() - start)
    used = _processor_seconds() - before
    return {
        "step_seconds": seconds,
        "processor_seconds": sum(ranks.gather(used)) / steps,
        "loss": loss,
        "peak_bytes": sum(ranks.gather(_peak_memory(task))),
    }


def _synchronize(task: Task) -> None:
    if task.device != "cpu":
        torch.accelerator.synchronize()


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _new_graphs() -> int:
    """Graphs that this process compiled, and did not find in the cache."""
    counters = sys.modules["torch._dynamo.utils"].counters["inductor"] if "torch._dynamo.utils" in sys.modules else {}
    return int(counters.get("fxgraph_cache_miss", 0) + counters.get("fxgraph_cache_bypass", 0))


def _forget_peak_memory(task: Task) -> None:
    """The peak begins anew; otherwise it would be that of importing and compiling."""
    if task.device != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # not allowed everywhere
        file.write("5")


def _peak_memory(task: Task) -> int:
    """Most bytes that the device held, or this process kept resident, since ``_forget_peak_memory``."""
    if task.device != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _live_bytes(task: Task, trainer: Trainer, step: int) -> int:
    """Most bytes of tensors alive at a time during a step."""
    if task.device == "cpu":
        return most_alive(lambda: trainer.step(step))
    torch.accelerator.reset_peak_memory_stats()
    trainer.step(step)
    return int(torch.accelerator.max_memory_allocated())


def most_alive(work: Callable[[], object]) -> int:
    """Most bytes of a CPU's tensors alive at a time during ``work``: those alive before, and what the allocator then
    reports."""
    gc.collect()
    # type(), as isinstance would wake lazily imported modules among the objects.
    storages = {}
    for tensor in gc.get_objects():
        # Fake tensors are left over where graphs were compiled.
        real = issubclass(type(tensor), torch.Tensor) and not issubclass(type(tensor), FakeTensor)
        if real and tensor.device.type == "cpu":
            with suppress(NotImplementedError, RuntimeError):  # wrappers without memory of their own
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    alive = most = sum(storages.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most
