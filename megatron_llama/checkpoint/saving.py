"""Asynchronous saving: training waits only for the copy to host memory."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.checkpoint.folder import CLAIM, delete, folder_name, partial_folder, publish
from megatron_llama.checkpoint.manifest import State
from megatron_llama.checkpoint.storage import part_name, save_part
from megatron_llama.checkpoint.stored_tensors import CorruptFile, Rectangles
from megatron_llama.config.settings import CheckpointConfig
from megatron_llama.parallel.groups import raise_on_all_ranks
from megatron_llama.system import phase
from megatron_llama.system.errors import MachineError

_POLL_SECONDS = 0.01
_RESUME = "and run the same command: it resumes from the\nnewest checkpoint"
_FREE_SPACE = f".\nFree disk space or raise the quota, {_RESUME}. checkpoint.keep=1 needs the least"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: f".\nRun `ulimit -f unlimited`, {_RESUME}",
}
STALLED_SECONDS = 20.0
"""After a failure: time without a written byte after which the checkpoint in progress is given up."""


class SaveFailed(MachineError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class Saver:
    """Writes this rank's file of checkpoints in a thread.

    All ranks write their files; after the last one, rank 0 publishes the checkpoint. Ranks exchange their progress in
    ``advance``, which all ranks call from the main thread.
    """

    def __init__(self, checkpoints: Path, rank: int, device: torch.device, settings: CheckpointConfig) -> None:
        self.checkpoints, self.rank, self.device, self.settings = checkpoints, rank, device, settings
        self.blocked_seconds = 0.0
        """Seconds for which the last ``start`` blocked training."""
        self._staging: dict[str, Rectangles] = {}
        self._state: State | None = None
        self._publishing = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, tensors: dict[str, Rectangles], state: State) -> None:
        """Copy ``tensors`` to host memory and start to write them. A collective."""
        self.wait()
        begin = time.perf_counter()
        self._copy(tensors)
        self._state, self._publishing = state, False
        self._run(lambda: save_part(self._staging, partial_folder(self.checkpoints, state.step), self.rank))
        if not self.settings.asynchronous:
            self.wait()
        self.blocked_seconds = time.perf_counter() - begin

    def advance(self, stop: bool = False, due: bool = False) -> tuple[bool, bool]:
        """Start the next stage if all ranks have finished theirs. A collective.

        Returns whether ``stop`` is true on any rank, and ``due``. Raises SaveFailed on all ranks if one could not
        write.
        """
        busy = self._thread is not None and self._thread.is_alive()
        flags = torch.tensor([stop, due, busy, self._error is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        any_stop, any_due, any_busy, any_error = flags.tolist()
        if self._state is not None and not any_busy:
            if any_error:
                self._fail(self._state)
            self._next(self._state)
        return bool(any_stop), bool(any_due)

    def wait(self) -> None:
        """Block until all files are written. A collective."""
        while self._state is not None:
            self.advance()
            if self._thread is not None:
                self._thread.join(_POLL_SECONDS)
            elif self._state is not None:
                time.sleep(_POLL_SECONDS)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish the checkpoint in progress if the context fails, without collectives: other ranks may be lost.

        Waits until all ranks have written their files, and publishes the checkpoint if no rank does. Gives up if no
        file grows for ``STALLED_SECONDS``.
        """
        try:
            yield
        except Exception:
            if (state := self._state) is not None:
                phase.enter(f"{phase.FINISHING} of step {state.step}", phase.PATIENT)
                try:
                    self._finish_alone(state)
                except (OSError, CorruptFile) as error:
                    sys.stderr.write(f"checkpoint: cannot finish step {state.step}: {_describe(error)}\n")
            raise

    def _finish_alone(self, state: State) -> None:
        partial = partial_folder(self.checkpoints, state.step)
        written, since = -1, time.monotonic()
        while (self._thread is not None and self._thread.is_alive()) or partial.is_dir():  # renamed when published
            try:
                size = sum(file.stat().st_size for file in partial.iterdir())
                complete = all((partial / part_name(rank)).is_file() for rank in range(state.world_size))
            except FileNotFoundError:  # not created yet, or renamed a moment ago
                size, complete = 0, False
            if size != written:
                written, since = size, time.monotonic()
            if self._error is not None or time.monotonic() - since > STALLED_SECONDS:
                return
            if complete and not self._publishing and _claim(partial):
                publish(self.checkpoints, state, self.settings)
            time.sleep(_POLL_SECONDS)

    def _next(self, state: State) -> None:
        """Enter the stage after writing (publishing) or after publishing (none)."""
        self._thread = None
        if self._publishing:
            self._state = None
            return
        self._publishing = True
        if self.rank == 0:
            self._run(lambda: publish(self.checkpoints, state, self.settings))

    def _fail(self, state: State) -> None:
        """Delete the partial files; raise SaveFailed on all ranks, with the cause and its rank."""
        error = None
        if self._error is not None:
            folder, cause = self.checkpoints / folder_name(state.step), _describe(self._error)
            remedy = _REMEDIES.get(getattr(self._error, "errno", None) or 0, "")
            message = f"cannot write {folder} (rank {self.rank}: {cause}); earlier checkpoints are unchanged{remedy}"
            error = SaveFailed(message)
            error.__cause__ = self._error
        if self.rank == 0:
            delete(partial_folder(self.checkpoints, state.step))
        self._state = self._thread = None
        raise_on_all_ranks(error)

    def _copy(self, tensors: dict[str, Rectangles]) -> None:
        """Copy to host memory that is reused by each save: new memory costs page faults."""
        shapes = {name: [part.shape for _, part in tensor.parts] for name, tensor in tensors.items()}
        if {name: [part.shape for _, part in tensor.parts] for name, tensor in self._staging.items()} != shapes:
            self._staging = {name: _host_like(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            for (_, source), (_, copy) in zip(tensor.parts, self._staging[name].parts, strict=True):
                copy.copy_(source, non_blocking=True)
        if devices.of(self.device).asynchronous:
            torch.get_device_module(self.device).synchronize()

    def _run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # all errors must reach the other ranks
                self._error = error

        self._error = None
        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()


def _claim(partial: Path) -> bool:
    """Return whether this process is the first that claims to publish the files of ``partial``."""
    try:
        (partial / CLAIM).open("x").close()
    except FileExistsError:
        return False
    return True


def _host_like(tensor: Rectangles) -> Rectangles:
    """Allocate host memory for a copy; pinned for accelerators, which copy several times as fast to it."""
    pinned = devices.of(tensor.parts[0][1].device).asynchronous
    parts = [
        (offset, torch.empty(part.shape, dtype=part.dtype, device=devices.HOST, pin_memory=pinned))
        for offset, part in tensor.parts
    ]
    return Rectangles(tensor.shape, parts)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}, {error.filename}" if error.filename else str(error.strerror)
    return str(error) if isinstance(error, CorruptFile) else f"{type(error).__name__}: {error}"
