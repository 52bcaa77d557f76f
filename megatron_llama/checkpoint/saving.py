"""Asynchronous saving: training waits only for the copy to host memory."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama import devices, event_hook
from megatron_llama.checkpoint.folder import (
    CLAIM,
    discard,
    fallback_folder,
    folder_name,
    partial_folder,
    publish,
    written_parts,
)
from megatron_llama.checkpoint.manifest import NAME, State
from megatron_llama.checkpoint.rank_files import save_part
from megatron_llama.checkpoint.tensor_source import CorruptFile, Rectangles
from megatron_llama.config.settings import CheckpointConfig
from megatron_llama.parallel.groups import raise_on_all_ranks
from megatron_llama.system import phase
from megatron_llama.system.errors import MachineError
from megatron_llama.system.files import FolderTaken
from megatron_llama.system.object_store import Location, RemotePath
from megatron_llama.system.signals import run_in_thread

_POLL_SECONDS = 0.01
_POLL_STORE_SECONDS = 0.5
_RESUME = "and run the same command: it resumes from the\nnewest checkpoint"
_FREE_SPACE = f".\nFree disk space or raise the quota, {_RESUME}. checkpoint.keep=1 needs the least"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: f".\nRun `ulimit -f unlimited`, {_RESUME}",
}
_FIRST_DELAY = 1.0
"""Seconds before a failed save is tried again; twice as many before each further try."""
STALLED_SECONDS = 20.0
"""After a failure: time without a written byte after which the checkpoint in progress is given up."""


class SaveFailed(MachineError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class WriterReplaced(SaveFailed):
    """Another start writes to the same folder of an object store."""


class Saver:
    """Saves this rank's part of a checkpoint in three stages: copy to host memory, write a file, publish (rank 0).

    A thread executes the last two. A stage begins once all ranks have finished the one before: they exchange their
    progress in ``advance``, which all call from the main thread. If a rank fails, all write their files again, until
    the checkpoint is given up after ``checkpoint.save_timeout_seconds``.
    """

    def __init__(self, checkpoints: Location, rank: int, device: torch.device, settings: CheckpointConfig) -> None:
        self.checkpoints, self.rank, self.device, self.settings = checkpoints, rank, device, settings
        self.writer = ""
        """Name of this start in an object store (``folder.begin_writing``)."""
        self._usual = checkpoints
        self._staging: dict[str, Rectangles] = {}
        self._state: State | None = None
        self._publishing = False
        self._work: Future[None] | None = None
        """Work of this rank's current stage, in a thread."""
        self._tries = 0
        self._failed: list[SaveFailed] = []
        """Failures of the checkpoints that were given up since the last one that was published."""
        self._given_up = 0
        """Number of checkpoints of this start that were given up."""
        self.lost: State | None = None
        """The newest checkpoint, if it was given up."""

    @property
    def _is_busy(self) -> bool:
        return self._work is not None and not self._work.done()

    @property
    def _error(self) -> BaseException | None:
        return None if self._work is None or self._is_busy else self._work.exception()

    def metrics(self) -> dict[str, float]:
        """Return ``failed_saves``, the checkpoints that were given up, if any."""
        return {"failed_saves": self._given_up} if self._given_up else {}

    def start(self, tensors: dict[str, Rectangles], state: State) -> None:
        """Copy ``tensors`` to host memory and start to write them. A collective."""
        self.wait()
        self._copy(tensors)
        self._state, self.lost = state, None
        self._begin(state)
        if not self.settings.asynchronous:
            self.wait()

    def advance(self, stop: bool = False, due: bool = False) -> tuple[bool, bool]:
        """Start the next stage if all ranks have finished theirs. A collective.

        Returns whether ``stop`` is true on any rank, and ``due``. Raises SaveFailed on all ranks after
        ``checkpoint.max_failed_saves`` checkpoints that could not be written.
        """
        flags = torch.tensor([stop, due, self._is_busy, self._error is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        any_stop, any_due, any_busy, any_error = flags.tolist()
        if self._state is not None and not any_busy:
            (self._fail if any_error else self._next)(self._state)
        return bool(any_stop), bool(any_due)

    def wait(self) -> None:
        """Block until all files are written. A collective."""
        while self._state is not None:
            self.advance()
            if self._state is not None:
                time.sleep(_POLL_SECONDS)

    def finish(self) -> None:
        """Block until all files are written. A collective.

        Raises SaveFailed on all ranks if the newest checkpoint was given up.
        """
        self.wait()
        if self.lost is not None:
            self._stop(self.lost, self._failed[-1])

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
        written, since = -1, time.monotonic()
        while True:
            busy = self._is_busy
            try:
                parts = written_parts(self.checkpoints, state, self.writer)
            except FileNotFoundError:  # renamed a moment ago
                parts = 0, False
            if parts is None and not busy:
                return
            size, complete = parts or (0, False)  # None: not created yet
            if size != written:
                written, since = size, time.monotonic()
            if self._error is not None or time.monotonic() - since > STALLED_SECONDS:
                return
            if complete and not self._publishing and _claim(partial_folder(self.checkpoints, state.step)):
                publish(self.checkpoints, state, self.settings, self.writer)
            time.sleep(_POLL_SECONDS if isinstance(self.checkpoints, Path) else _POLL_STORE_SECONDS)

    def _next(self, state: State) -> None:
        """Enter the stage after writing (publishing) or after publishing (none)."""
        self._work = None
        if self._publishing:
            self._state, self._failed, self._tries = None, [], 0
            return
        self._publishing = True
        if self.rank == 0:
            publishing = partial(publish, self.checkpoints, state, self.settings, self.writer)
            self._work = run_in_thread("checkpoint", publishing)

    def _fail(self, state: State) -> None:
        """Delete the partial files; begin again or give up. Raises SaveFailed on all ranks after too many failures."""
        error = None
        if (cause := self._error) is not None:
            folder, fault = self.checkpoints / folder_name(state.step), _describe(cause)
            remedy = _REMEDIES.get(getattr(cause, "errno", None) or 0, "")
            message = f"cannot write {folder} (rank {self.rank}: {fault}); earlier checkpoints are unchanged{remedy}"
            error = (WriterReplaced if isinstance(cause, FolderTaken) else SaveFailed)(message)
            error.__cause__ = cause
        if self.rank == 0:
            with suppress(OSError):  # of the same disk; the next try deletes them
                discard(self.checkpoints, state.step, self.writer)
        try:
            raise_on_all_ranks(error)
        except SaveFailed as failed:
            reason, seconds = str(failed).partition(";")[0], _FIRST_DELAY * 2**self._tries
            if isinstance(failed, WriterReplaced):
                self._state = None
                raise
            if 2 * seconds - _FIRST_DELAY <= self.settings.save_timeout_seconds:
                self._tries += 1
                self._report(f"{reason}; trying again in {seconds:g} s")
                self._begin(state, seconds)
                return
            self._state, self._work, self._tries, self.lost = None, None, 0, state
            self._failed.append(failed)
            self._given_up += 1
            event_hook.send("failed_save", step=state.step, reason=reason)
            if len(self._failed) >= self.settings.max_failed_saves:
                self._stop(state, failed)
            self._report(f"{reason}; step {state.step} is not saved")

    def _stop(self, state: State, failed: SaveFailed) -> None:
        """Save in the run's folder in ``checkpoint.fallback_dir`` if it is set, and raise SaveFailed. A collective."""
        folder, usual = fallback_folder(self.settings, self._usual), self._usual
        if folder is None or self.checkpoints == folder:
            raise failed
        self._report(f"{failed}\ncheckpoint: saving step {state.step} in {folder} instead")
        self.checkpoints, self._state, self.lost = folder, state, None
        self._begin(state)
        self.finish()
        saved = self.checkpoints / folder_name(state.step)
        is_store = isinstance(usual, RemotePath)
        remedy = f"copy {saved} to {usual}/{saved.name}, {NAME} last" if is_store else f"mv {saved} {usual}"
        raise SaveFailed(f"{failed}\nFirst move step {state.step}: {remedy}") from None

    def _begin(self, state: State, delay: float = 0.0) -> None:
        def write() -> None:
            time.sleep(delay)
            save_part(self._staging, partial_folder(self.checkpoints, state.step), self.rank, self.writer)

        self._publishing = False
        self._work = run_in_thread("checkpoint", write)

    def _report(self, text: str) -> None:
        if self.rank == 0:
            sys.stderr.write(f"checkpoint: {text}\n")

    def _copy(self, tensors: dict[str, Rectangles]) -> None:
        """Copy to host memory that is reused by each save: new memory costs page faults."""
        shapes = {name: [part.shape for _, part in tensor.parts] for name, tensor in tensors.items()}
        if {name: [part.shape for _, part in tensor.parts] for name, tensor in self._staging.items()} != shapes:
            self._staging = {name: _host_like(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            for (_, source), (_, copy) in zip(tensor.parts, self._staging[name].parts, strict=True):
                copy.copy_(source, non_blocking=True)
        devices.of(self.device).synchronize()


def _claim(partial: Location) -> bool:
    """Return whether this process may publish the files of ``partial``: on a disk only the first that claims it.

    In a store all processes write the same manifest.
    """
    if isinstance(partial, RemotePath):
        return True
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
