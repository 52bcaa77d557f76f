"""Turns a hang into a failure that can be debugged: prints the Python stacks of all ranks and ends the job."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from megatron_llama.system.exit_status import EXIT_FAILED

# From writing its own stacks to the end of a rank: time for the others to write theirs, and for rank 0 to print all.
_GATHER_SECONDS = 1.5
# If something holds the GIL, the watchdog's thread can't run either; then faulthandler's C timer ends the process.
_GRACE_SECONDS = 10.0


class Watchdog:
    """A thread that expects a ``beat`` every ``timeout_seconds`` inside the ``with`` block; None disables it."""

    def __init__(self, timeout_seconds: float | None, rank: int, world_size: int, folder: Path) -> None:
        self.timeout, self.rank, self.world_size, self.folder = timeout_seconds, rank, world_size, folder
        self._phase, self._since = "the start", time.monotonic()
        self._file = folder / f"rank_{rank:05d}.txt"
        self._ended = threading.Event()

    def beat(self, phase: str, *, patient: bool = False) -> None:
        """Reports progress: ``phase`` begins now. A ``patient`` phase has no time limit."""
        self._phase, self._since = phase, float("inf") if patient else time.monotonic()
        if patient:
            faulthandler.cancel_dump_traceback_later()
        elif self.timeout is not None:
            faulthandler.dump_traceback_later(self.timeout + _GRACE_SECONDS, exit=True, file=2)

    def __enter__(self) -> Watchdog:
        self._file.unlink(missing_ok=True)  # from an earlier attempt
        self.beat("the first step")
        if self.timeout is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        assert self.timeout is not None
        while not self._ended.wait(min(1.0, self.timeout / 10)):
            if time.monotonic() - self._since > self.timeout:
                self._give_up()

    def _give_up(self) -> None:
        """Prints the stacks of all ranks that can still write them, and ends this process."""
        self.folder.mkdir(exist_ok=True)
        with open(self._file, "w", encoding="utf-8") as file:
            file.write(f"rank {self.rank}: no progress for {self.timeout:g} s, in {self._phase}. Its stacks:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        time.sleep(_GATHER_SECONDS)
        if self.rank == 0:
            for path in sorted(self.folder.glob("rank_*.txt")):
                sys.stderr.write(f"\n{path.read_text(encoding='utf-8')}")
            late = self.world_size - len(list(self.folder.glob("rank_*.txt")))
            if late:
                sys.stderr.write(f"\n{late} of {self.world_size} ranks could not say where they are\n")
            sys.stderr.flush()
        else:
            time.sleep(_GATHER_SECONDS)
        os._exit(EXIT_FAILED)
