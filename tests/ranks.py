"""Run a function in forked ranks: the parent has imported torch and megatron-core once, so two ranks start in a third
of a second.

The parent must never run CUDA, a threaded backward or Inductor's workers (forking would deadlock the children), so
tests run single-process oracles through here too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.warm  # noqa: F401  before the first fork
from megatron_llama.devices.cpu import DEVICE
from megatron_llama.devices.cpu.shared_memory import register
from megatron_llama.system.object_store import end_threads

_OF_TORCH = ("pt_", "gloo")
"""Starts of the names of native threads: stores, process groups, autograd. Pools of math libraries have the name of the
process, and survive a fork."""
_OF_RUNNER = "pytest_timeout"
_END_SECONDS = 10.0


def foreign_threads() -> list[str]:
    """Return the names of the threads of this process that could disturb a fork."""
    current = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not current]
    of_python = {thread.native_id for thread in (*others, current)}
    names = [thread.name for thread in others if not _is_of_runner(thread)]
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            name = (task / "comm").read_text().strip()
            if int(task.name) not in of_python and name.startswith(_OF_TORCH):
                names.append(name)
    return sorted(names)


def _is_of_runner(thread: threading.Thread) -> bool:
    """Return whether the thread belongs to pytest-timeout."""
    target = getattr(thread, "function", None) or getattr(thread, "_target", None)
    names = (thread.name, type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(name.startswith(_OF_RUNNER) for name in names)


def check_threads(seconds: float = _END_SECONDS) -> None:
    """Raise AssertionError if foreign threads are alive; they have ``seconds`` to end. Called before a test forks."""
    end_threads()
    if not foreign_threads():
        return
    gc.collect()  # tracebacks of expected errors keep stores alive
    deadline = time.monotonic() + seconds
    while names := foreign_threads():
        assert time.monotonic() < deadline, f"a test forks while other threads are alive: {', '.join(names)}"
        time.sleep(0.02)


class RankFailed(AssertionError):
    """A rank raised, died or timed out; the message has all tracebacks."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` gloo ranks; return the results by rank."""
    check_threads()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        readers, workers = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            worker = context.Process(target=_rank, args=(function, rank, world_size, folder, writer, args), daemon=True)
            worker.start()
            writer.close()
            readers.append(reader)
            workers.append(worker)
        try:
            return _collect(readers, timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _rank(function: Callable[..., Any], rank: int, world: int, folder: str, writer: Connection, args: tuple) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        register(DEVICE.backend)
        dist.init_process_group(DEVICE.backend, store=store, rank=rank, world_size=world)
        result, error = function(rank, *args), None
    except BaseException:
        result, error = None, traceback.format_exc()
    writer.send_bytes(pickle.dumps((result, error)))  # by value: shared-memory tensors would die with the rank
    writer.close()
    os._exit(0)  # skip destructors of process groups whose peers may be gone


def _collect(readers: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(results) + len(errors) < len(readers):
        pending = [r for i, r in enumerate(readers) if i not in results and i not in errors]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [i for i, r in enumerate(readers) if r in pending]
            errors.update({i: f"no answer within {timeout} s" for i in late})
        for reader in ready:
            index = readers.index(reader)  # type: ignore[arg-type]
            try:
                result, error = pickle.loads(readers[index].recv_bytes())
            except EOFError:
                result, error = None, "ended without a result"
            if error is None:
                results[index] = result
            else:
                errors[index] = error
                deadline = min(deadline, time.monotonic() + 5)  # the others may wait for this one for ever
    if errors:
        raise RankFailed("\n".join(f"rank {i}:\n{errors[i]}" for i in sorted(errors)))
    return [results[i] for i in range(len(readers))]
