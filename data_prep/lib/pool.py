"""Worker processes, for blocks of text and shards of an analysis. Results are in order, with bounded memory.

Workers are forked and share the memory of this process. A thread reads the input, so unpacking overlaps with encoding.
Workers exit with this process, also after SIGKILL.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from megatron_llama.system.errors import MachineError
from megatron_llama.system.signals import exit_with_parent

# Includes finished items that wait for an earlier one, which bounds memory.
WINDOW_PER_WORKER = 4
POLL_SECONDS = 0.5
"""Maximum delay before a signal is handled."""
T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(Generic[Item, Result]):
    """Pool of forked workers, which call ``work`` for each item. Enter it before any thread starts."""

    def __init__(self, workers: int, work: Callable[[Item], Result]) -> None:
        self.window = WINDOW_PER_WORKER * workers
        context = multiprocessing.get_context("fork")
        self.executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(work, os.getpid()))
        # The first call forks all workers, while no other thread runs.
        before = set(multiprocessing.active_children())
        # The executor stops workers with SIGTERM. A worker that has not reached _start_worker would run the parent's
        # handler and could then deadlock on a lock of a killed worker, so SIGTERM is blocked until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self.executor.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.processes = [child for child in multiprocessing.active_children() if child not in before]
        self.ended: list[int] = []
        """Exit statuses of the workers that exited first."""

    def __enter__(self) -> Pool[Item, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._kill_if_one_exited(kind is not None)
        self.executor.shutdown(cancel_futures=True)

    def _kill_if_one_exited(self, force: bool = False) -> None:
        """Kill all workers if one has exited, and unblock the executor.

        If a worker is killed during a transfer, the executor's threads wait forever: other processes keep the pipe
        open or wait for its lock. The pipes are closed before workers die: the executor then closes one itself.
        """
        self.ended = self.ended or [process.exitcode for process in self.processes if process.exitcode is not None]
        if not self.ended and not force:
            return
        self.executor._call_queue._reader.close()  # type: ignore[attr-defined]
        self.executor._result_queue._writer.close()  # type: ignore[attr-defined]
        for process in self.processes:
            process.kill()

    def run(self, items: Iterator[Item], check_stop: Callable[[], None]) -> Iterator[tuple[Item, Result]]:
        """Yield all items with their results, in order. ``check_stop`` is polled and may raise.

        Raises:
            UserError, MachineError: From a worker or the input, or a worker was killed.
            Stopped: From ``check_stop``.
        """
        submitted: queue.SimpleQueue[tuple[Item, Future[Result]] | BaseException | None] = queue.SimpleQueue()
        capacity = threading.Semaphore(self.window)
        stopped = threading.Event()

        def feed() -> None:
            end: BaseException | None = None
            try:
                for item in items:
                    capacity.acquire()
                    if stopped.is_set():
                        return
                    submitted.put((item, self.executor.submit(_run, item)))
            except BaseException as error:  # noqa: BLE001  raised in the main thread
                end = error
            submitted.put(end)

        feeder = threading.Thread(target=feed, name="feeder", daemon=True)
        feeder.start()
        try:
            while True:
                entry = self._wait_for(lambda: submitted.get(timeout=POLL_SECONDS), check_stop)
                if entry is None:
                    return
                # Input errors are raised in order, after the results before them.
                if isinstance(entry, BaseException):
                    raise entry
                item, future = entry
                yield item, self._wait_for(lambda: future.result(timeout=POLL_SECONDS), check_stop)  # noqa: B023
                capacity.release()
        except BrokenProcessPool:
            # The executor stops the others with SIGTERM, so another status is the cause.
            for process in self.processes:
                process.join(timeout=5.0)
            check_stop()  # a signal to the process group reaches the workers too
            statuses = self.ended or [process.exitcode for process in self.processes if process.exitcode]
            status = next((status for status in statuses if status != -signal.SIGTERM), -signal.SIGTERM)
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            hint = " (often the kernel's out-of-memory killer)" if status == -signal.SIGKILL else ""
            message = f"a worker ended {how}{hint}. Progress is saved: rerun the same command to resume"
            raise MachineError(message) from None
        finally:
            stopped.set()
            capacity.release()
            feeder.join()

    def _wait_for(self, get: Callable[[], T], check_stop: Callable[[], None]) -> T:
        while True:
            check_stop()
            with contextlib.suppress(queue.Empty, TimeoutError):
                return get()
            self._kill_if_one_exited()


_work: Callable[[Any], Any]
"""Function of this worker, inherited by fork."""


def _start_worker(work: Callable[[Any], Any], parent: int) -> None:
    """Let a forked worker end with its parent, and only by its parent's signals."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C for the process group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    exit_with_parent(parent)


def _run(item: Any) -> Any:
    try:
        return _work(item)
    except MemoryError:
        raise MachineError(
            "a worker is out of memory. Progress is saved: rerun with a smaller --workers to resume"
        ) from None
