"""Worker processes that encode blocks; results come back in the blocks' order, and memory stays bounded.

The workers are forked, so they share the loaded tokenizer and the slots. A thread of this process cuts the input, which
overlaps unpacking with encoding. A worker gets a second block while it works on the first. When this process dies, by
whatever signal, its ends of the pipes close and the workers end themselves.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from data_prep.lib.blocks import Block, Slots
from data_prep.lib.encode_text import Result
from megatron_llama.system.errors import MachineError, UserError

BLOCKS_PER_WORKER = 2
# Finished blocks that wait for an earlier one count too: this bounds memory when one block takes long.
WINDOW_PER_WORKER = 4


def slots_for(workers: int) -> int:
    """How many slots keep that many workers busy."""
    return BLOCKS_PER_WORKER * workers + 2


class Worker(Protocol):
    """What encodes blocks."""

    slots: Slots

    def run(self, block: Block) -> Result: ...


class Pool:
    """Forked workers. Use as a context manager, before any thread is started."""

    def __init__(self, workers: int, encoder: Worker) -> None:
        self.slots: Slots = encoder.slots
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        context = multiprocessing.get_context("fork")
        for number in range(workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            process = context.Process(
                target=_work, args=(theirs, list(self.pipes), encoder), name=f"encoder-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def run(self, blocks: Iterator[Block], check_stop: Callable[[], None]) -> Iterator[tuple[Block, Result]]:
        """Encodes all blocks and yields their results in order. `check_stop` is called often and may raise.

        Raises:
            UserError, MachineError: what a worker or the input raised; or a worker was killed.
        """
        cutter = _Cutter(blocks, BLOCKS_PER_WORKER * len(self.pipes), self.slots)
        busy: list[dict[int, Block]] = [{} for _ in self.pipes]
        done: dict[int, tuple[Block, Result]] = {}
        state = _State()
        try:
            while not (state.exhausted and state.next == state.given):
                check_stop()
                self._give(cutter, busy, state)
                watched: list[Any] = [*self.pipes, *(process.sentinel for process in self.processes)]
                if not state.exhausted:
                    watched.append(cutter.wake)
                # the timeout is only for check_stop: everything else wakes us up
                for ready in multiprocessing.connection.wait(watched, timeout=1.0):
                    if isinstance(ready, Connection):
                        self._take(self.pipes.index(ready), busy, done)
                    elif ready == cutter.wake:
                        os.read(cutter.wake, 4096)
                    elif not any(pipe.poll() for pipe in self.pipes):
                        raise self._dead()
                while state.next in done:
                    yield done.pop(state.next)
                    state.next += 1
            if state.error:  # only now: what came before it is done and kept, and the first error is the first in order
                raise state.error
        finally:
            cutter.stop()

    def _give(self, cutter: _Cutter, busy: list[dict[int, Block]], state: _State) -> None:
        """Hands out blocks while workers want them and the window allows it."""
        while not state.exhausted and state.given - state.next < WINDOW_PER_WORKER * len(self.pipes):
            worker = min(range(len(busy)), key=lambda index: len(busy[index]))
            block = cutter.peek()
            if block is None:
                return
            # Bytes through the pipe may have to wait for the reader; a busy worker could wait for us at the same time.
            has_bytes = any(segment.inline is not None for segment in block.segments)
            if len(busy[worker]) >= (1 if has_bytes else BLOCKS_PER_WORKER):
                return
            cutter.drop()
            if isinstance(block, _End):
                state.exhausted = True
                state.error = block.error
                return
            busy[worker][block.number] = block
            state.given += 1
            try:
                self.pipes[worker].send(block)
            except (BrokenPipeError, ConnectionResetError):
                raise self._dead() from None

    def _take(self, worker: int, busy: list[dict[int, Block]], done: dict[int, tuple[Block, Result]]) -> None:
        try:
            result = self.pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        if isinstance(result, BaseException):
            raise result
        block = busy[worker].pop(result.number)
        for segment in block.segments:
            if segment.slot is not None:
                self.slots.free.put(segment.slot)
        done[result.number] = (block, result)

    def _dead(self) -> MachineError:
        gone = multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=5.0)
        for process in self.processes:
            if process.sentinel in gone:
                process.join(timeout=5.0)  # a process closes its files some time before its status can be read
            if process.exitcode is not None:
                how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"status {process.exitcode}"
                hint = " (the kernel's way when memory runs out)" if process.exitcode == -signal.SIGKILL else ""
                return MachineError(
                    f"worker {process.name} ended by {how}{hint}. What was done is kept: the same command goes on"
                )
        return MachineError("a worker closed its pipe. What was done is kept: the same command goes on")


class _State:
    """Where the hand-out stands."""

    def __init__(self) -> None:
        self.given = 0
        self.next = 0
        self.exhausted = False
        self.error: BaseException | None = None


class _End:
    """The input's end, or why it ended."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.segments: list[Any] = []


class _Cutter(threading.Thread):
    """Cuts the input ahead of the workers."""

    def __init__(self, blocks: Iterator[Block], ahead: int, slots: Slots) -> None:
        super().__init__(name="cutter", daemon=True)
        self.blocks = blocks
        self.slots = slots
        self.queue: queue.Queue[Block | _End] = queue.Queue(maxsize=ahead)
        self.head: Block | _End | None = None
        self.wake, self._wake_writer = os.pipe()
        self.stopped = False
        self.start()

    def run(self) -> None:
        end = _End()
        try:
            for block in self.blocks:
                self._put(block)
                if self.stopped:
                    return
        except InterruptedError:
            return
        except BaseException as error:  # noqa: BLE001 - carried to the main thread and raised there
            end = _End(error)
        self._put(end)

    def _put(self, item: Block | _End) -> None:
        while not self.stopped:
            try:
                self.queue.put(item, timeout=1.0)
            except queue.Full:
                continue
            os.write(self._wake_writer, b"x")
            return

    def peek(self) -> Block | _End | None:
        """The next block, or None while there is none yet."""
        if self.head is None:
            try:
                self.head = self.queue.get_nowait()
            except queue.Empty:
                return None
        return self.head

    def drop(self) -> None:
        """Takes the block that `peek` showed."""
        self.head = None

    def stop(self) -> None:
        """Ends the thread, wherever it waits."""
        self.stopped = True
        self.slots.free.put(None)
        self.join()
        os.close(self.wake)
        os.close(self._wake_writer)


def _work(pipe: Connection, others: list[Connection], encoder: Worker) -> None:
    """A worker's life: blocks in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # else no worker would ever see that the parent has gone
    try:
        while True:
            block = pipe.recv()
            try:
                pipe.send(encoder.run(block))
            except (UserError, MachineError) as error:
                pipe.send(error)
            except MemoryError:
                pipe.send(MachineError("a worker has no memory left. The same command, with fewer workers, goes on"))
    except (EOFError, OSError):
        pass
