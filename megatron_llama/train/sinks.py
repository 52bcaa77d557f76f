"""Where a run's metrics go besides metrics.jsonl: TensorBoard, a CSV file, Weights & Biases.

These are courtesies: metrics.jsonl has everything, and what a disk or an account does to one of them is told once on
stderr and does not stop the run.
"""

from __future__ import annotations

import csv
import hashlib
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Protocol, cast

from megatron_llama.plan import Plan

CSV_FILE = "metrics.csv"
Metrics = Mapping[str, Any]


class MetricsSink(Protocol):
    """Takes the metrics of each step. None of its methods raises what a disk or a network did."""

    def append(self, metrics: Metrics) -> None:
        """Adds the metrics of a step; ``step`` is one of them. A value may be None."""

    def close(self) -> None:
        """Writes what is left."""


def open_sinks(plan: Plan, start_step: int, columns: Sequence[str], records: Sequence[Metrics]) -> list[MetricsSink]:
    """The sinks that the plan's ``logging`` asks for, of a run that goes on after ``start_step``.

    ``columns`` are the names of all metrics, ``records`` the metrics of the steps until ``start_step``.
    """
    logging, sinks = plan.config.logging, list[MetricsSink]()
    if logging.tensorboard:
        sinks.append(TensorBoardFile(plan.run_dir / "tensorboard", start_step))
    if logging.csv:
        sinks.append(CsvFile(plan.run_dir / CSV_FILE, columns, records))
    if logging.wandb != "off":
        sinks.append(WandbRun(plan, start_step))
    return sinks


class CsvFile:
    """metrics.csv: a row for each step with the same columns, empty where a step does not have a metric."""

    def __init__(self, path: Path, columns: Sequence[str], records: Sequence[Metrics]) -> None:
        """Writes the file anew, ``records`` first: the steps that a resumed run keeps."""
        self._path, self._columns = path, columns
        self._file: IO[str] | None = None
        try:
            self._file = path.open("w", encoding="utf-8", newline="")
        except OSError as error:
            _tell(str(path), error)
        self.append({name: name for name in columns})
        for record in records:
            self.append(record)

    def append(self, metrics: Metrics) -> None:
        if self._file is not None:
            try:
                csv.writer(self._file, lineterminator="\n").writerow(metrics.get(name) for name in self._columns)
                self._file.flush()
            except OSError as error:
                self.close()
                _tell(str(self._path), error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what could not be written has been told
                file.close()


class WandbRun:
    """A run of Weights & Biases (the package wandb), in its offline mode or with an account.

    Each start of a run is one run there, in a group of the run's folder: what was logged after the checkpoint that a
    start goes on from can't be taken back there, and would be mixed up with what follows.
    """

    def __init__(self, plan: Plan, start_step: int) -> None:
        self._run: Any = None
        name = plan.run_dir.name
        key = hashlib.sha256(str(plan.run_dir.resolve()).encode()).hexdigest()[:12]
        try:
            import wandb

            self._run = wandb.init(
                project=plan.config.logging.wandb_project,
                group=f"{name}-{key}",
                name=f"{name} from step {start_step}" if start_step else name,
                dir=str(plan.run_dir),
                mode=cast(Any, plan.config.logging.wandb),
                config=asdict(plan.config),
                settings=wandb.Settings(console="off", silent=True),
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # a missing account, a network, the package's own: the run goes on
            _tell("Weights & Biases", error)

    def append(self, metrics: Metrics) -> None:
        if self._run is not None:
            try:
                self._run.log({name: value for name, value in metrics.items() if value is not None})
            except Exception as error:
                self._run = None
                _tell("Weights & Biases", error)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:
                _tell("Weights & Biases", error)


def _tell(what: str, error: Exception) -> None:
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    sys.stderr.write(f"{what} can't be written any more: {reason}\n")


# A run's scalars in TensorBoard. A full disk ends them and not the run: metrics.jsonl has them all.

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
