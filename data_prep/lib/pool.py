"""Worker processes that encode blocks; results come back in the blocks' order, and memory stays bounded.

The workers are forked, so they share the loaded tokenizer and the slots. A thread of this process cuts the input, which
overlaps unpacking with encoding. The workers end with this process, also when it is killed with -9.
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
from typing import Any, TypeVar

from data_prep.lib.blocks import BlockEncoder, TextBlock
from data_prep.lib.job import BlockResult
from megatron_llama.system.errors import MachineError
from megatron_llama.system.signals import exit_with_parent

# Finished blocks that wait for an earlier one count too: this bounds memory when one block takes long.
WINDOW_PER_WORKER = 4
POLL_SECONDS = 0.5
"""A signal is acted on within this time."""
T = TypeVar("T")


class Pool:
    """Forked workers. Use as a context manager, before any thread is started."""

    def __init__(self, workers: int, encoder: BlockEncoder[Any]) -> None:
        self.slots = encoder.slots
        self.window = WINDOW_PER_WORKER * workers
        self.executor = ProcessPoolExecutor(
            workers, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(encoder, os.getpid())
        )
        # The first call forks all workers: here, where no other thread runs, and from a thread that outlives them.
        before = set(multiprocessing.active_children())
        # The executor ends workers by SIGTERM. One that has not come to _start_worker yet would take it for this
        # process's own, live on, and wait for ever for a lock that a killed worker held; so it is held back till then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self.executor.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self.processes = [child for child in multiprocessing.active_children() if child not in before]
        self.ended: list[int] = []
        """Exit statuses of the workers that were the first to end."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_if_one_has(kind is not None)
        self.executor.shutdown(cancel_futures=True)

    def _end_if_one_has(self, at_once: bool = False) -> None:
        """Ends all workers where one has ended, and frees the executor. A worker that was killed while it sent a result
        leaves the executor's thread waiting for the rest: this process and the other workers hold that pipe open, and
        the others may wait for the dead one's lock."""
        self.ended = self.ended or [process.exitcode for process in self.processes if process.exitcode is not None]
        if not self.ended and not at_once:
            return
        for process in self.processes:
            process.kill()
        self.executor._result_queue._writer.close()  # type: ignore[attr-defined]

    def run(
        self, blocks: Iterator[TextBlock], check_stop: Callable[[], None]
    ) -> Iterator[tuple[TextBlock, BlockResult]]:
        """Encodes all blocks and yields their results in order. ``check_stop`` is called often and may raise.

        Raises:
            UserError, MachineError: what a worker or the input raised; or a worker was killed.
            Stopped: by ``check_stop``.
        """
        given: queue.SimpleQueue[tuple[TextBlock, Future[BlockResult]] | BaseException | None] = queue.SimpleQueue()
        room = threading.Semaphore(self.window)
        stopped = threading.Event()

        def feed() -> None:
            end: BaseException | None = None
            try:
                for block in blocks:
                    room.acquire()
                    if stopped.is_set():
                        return
                    future = self.executor.submit(_encode, block)
                    slots = [segment.slot for segment in block.segments if segment.slot is not None]
                    future.add_done_callback(lambda _, slots=slots: [*map(self.slots.free.put, slots)])  # type: ignore[misc]
                    given.put((block, future))
            except BaseException as error:  # noqa: BLE001  raised in the main thread
                end = error
            given.put(end)

        feeder = threading.Thread(target=feed, name="feeder", daemon=True)
        feeder.start()
        try:
            while True:
                item = self._wait_for(lambda: given.get(timeout=POLL_SECONDS), check_stop)
                if item is None:
                    return
                # An error of the input comes in its order: what is before it is done and kept.
                if isinstance(item, BaseException):
                    raise item
                block, future = item
                result: BlockResult = self._wait_for(lambda: future.result(timeout=POLL_SECONDS), check_stop)  # noqa: B023
                yield block, result
                room.release()
        except BrokenProcessPool:
            # The executor ends the others by SIGTERM: what ended the first worker is any other status.
            for process in self.processes:
                process.join(timeout=5.0)
            check_stop()  # a signal to the whole group ends workers, and asks this process to stop
            statuses = self.ended or [process.exitcode for process in self.processes if process.exitcode]
            status = next((status for status in statuses if status != -signal.SIGTERM), -signal.SIGTERM)
            how = f"signal {-status}" if status < 0 else f"status {status}"
            hint = " (the kernel's way when memory runs out)" if status == -signal.SIGKILL else ""
            message = f"a worker ended by {how}{hint}. What was done is kept: the same command goes on"
            raise MachineError(message) from None
        finally:
            stopped.set()
            room.release()
            self.slots.free.put(None)
            feeder.join()

    def _wait_for(self, get: Callable[[], T], check_stop: Callable[[], None]) -> T:
        while True:
            check_stop()
            with contextlib.suppress(queue.Empty, TimeoutError):
                return get()
            self._end_if_one_has()


_encoder: BlockEncoder[Any]
"""The worker's own, inherited by the fork."""


def _start_worker(encoder: BlockEncoder[Any], parent: int) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    exit_with_parent(parent)


def _encode(block: TextBlock) -> BlockResult:
    try:
        return _encoder.run(block)
    except MemoryError:
        raise MachineError("a worker has no memory left. The same command, with fewer workers, goes on") from None
