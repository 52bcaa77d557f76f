"""A run's scalars in TensorBoard: a courtesy, as metrics.jsonl has them all. A full disk ends them, and not the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 10


class TensorBoardFile:
    """The events of a run that resumes after ``start_step``; those that an earlier attempt logged later are hidden."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._writer = folder, None
        # Its thread raises what the disk did, once where nobody catches it and again in the next call here.
        self._uncaught, threading.excepthook = threading.excepthook, self._of_a_thread
        try:
            purge_step = start_step + 1 if folder.exists() else None
            self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECONDS)
        except OSError as error:
            self._lose(error)

    @property
    def writes(self) -> bool:
        """Whether it is still being written."""
        return self._writer is not None

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics, those that have a value."""
        for name, value in metrics.items():
            if value is not None and self._writer is not None:
                try:
                    self._writer.add_scalar(name, value, metrics["step"])
                except OSError as error:
                    self._lose(error)

    def close(self) -> None:
        """Writes what is left."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            self._lose(error)
        threading.excepthook = self._uncaught

    def _lose(self, error: OSError) -> None:
        self._writer = None
        sys.stderr.write(f"TensorBoard: {self._folder} can't be written any more: {error.strerror or error}\n")

    def _of_a_thread(self, uncaught: threading.ExceptHookArgs) -> None:
        if not isinstance(uncaught.exc_value, OSError):
            self._uncaught(uncaught)
