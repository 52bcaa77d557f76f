"""The loop in a program's process: build, train the first step, then train and measure steps on request.

Messages are JSON objects over a socket, so a peer may print freely. Imported in the peers' environments: requires only
torch.
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

from benchmarks.harness.task import Facts, TrainingTask


class Trainer(Protocol):
    """A built model with its optimizer."""

    facts: Facts

    def step(self, number: int) -> float:
        """Train one step on the tokens of step ``number``, with clipping and optimizer; return the loss."""
        ...


class Ranks:
    """Communication between the ranks of a program; this base class has one rank."""

    is_first = True

    def share(self, receive: Callable[[], Any]) -> Any:
        """Call ``receive`` on the first rank; return its result on all ranks."""
        return receive()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        return [value]


def read_task() -> TrainingTask:
    """Read the task from the command line and set torch's threads."""
    task = TrainingTask.from_json(sys.argv[1])
    torch.set_num_threads(task.threads)
    return task


def serve(task: TrainingTask, build: Callable[[], Trainer], ranks: Ranks | None = None) -> None:
    """Report the first step, then serve requests until a request has 0 steps. All ranks call it."""
    ranks = ranks or Ranks()
    connection = Client(task.address) if ranks.is_first else None

    def receive() -> Any:
        assert connection is not None
        return json.loads(connection.recv_bytes())

    trainer = build()
    loss = trainer.step(1)
    _synchronize(task)
    ready = {"facts": asdict(trainer.facts), "loss": loss, "graphs": _new_graphs()}
    step = 1
    while True:
        if connection is not None:
            connection.send_bytes(json.dumps(ready).encode())
        request = ranks.share(receive)
        if not request["steps"]:
            return
        if request["watch"]:
            step += 1
            ready = {"live_bytes": sum(ranks.gather(_live_bytes(task, trainer, step)))}
            continue
        ready = _train(task, trainer, ranks, step + 1, request["steps"])
        step += request["steps"]


def _train(task: TrainingTask, trainer: Trainer, ranks: Ranks, first: int, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps; return their times, the last loss and the memory."""
    _reset_peak_memory(task)
    seconds = []
    before = _processor_seconds()
    for number in range(first, first + steps):
        start = time.perf_counter()
        loss = trainer.step(number)
        _synchronize(task)
        seconds.append(time.perf_counter() - start)
    used = _processor_seconds() - before
    result = {
        "step_seconds": seconds,
        "processor_seconds": sum(ranks.gather(used)) / steps,
        "loss": loss,
        "peak_bytes": sum(ranks.gather(_read_peak_memory(task))),
    }
    if task.device != "cpu":  # the other programs of the benchmark need the memory
        torch.accelerator.empty_cache()
    return result


def _synchronize(task: TrainingTask) -> None:
    if task.device != "cpu":
        torch.accelerator.synchronize()


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _new_graphs() -> int:
    """Return the number of graphs that this process compiled, without cache hits."""
    counters = sys.modules["torch._dynamo.utils"].counters["inductor"] if "torch._dynamo.utils" in sys.modules else {}
    return int(counters.get("fxgraph_cache_miss", 0) + counters.get("fxgraph_cache_bypass", 0))


def _reset_peak_memory(task: TrainingTask) -> None:
    """Reset the peak, which otherwise includes imports and compilation."""
    if task.device != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # some containers deny it
        file.write("5")


def _read_peak_memory(task: TrainingTask) -> int:
    """Return the peak allocated (accelerator) or resident (CPU) bytes since ``_reset_peak_memory``."""
    if task.device != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _live_bytes(task: TrainingTask, trainer: Trainer, step: int) -> int:
    """Return the peak bytes of live tensors during a step."""
    if task.device == "cpu":
        return peak_live_bytes(lambda: trainer.step(step))
    torch.accelerator.reset_peak_memory_stats()
    trainer.step(step)
    return int(torch.accelerator.max_memory_allocated())


def peak_live_bytes(work: Callable[[], object]) -> int:
    """Return the peak bytes of live CPU tensors during ``work``.

    Adds the allocator's events under torch.profiler to the bytes of the existing tensors.
    """
    gc.collect()
    # type() instead of isinstance(), which would import lazy modules.
    storages = {}
    for tensor in gc.get_objects():
        # Compilation leaves fake tensors, which have no memory.
        real = issubclass(type(tensor), torch.Tensor) and not issubclass(type(tensor), FakeTensor)
        if real and tensor.device.type == "cpu":
            with suppress(NotImplementedError, RuntimeError):  # tensor wrappers without storage
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    live = peak = sum(storages.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
