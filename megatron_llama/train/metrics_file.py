"""Reads, writes and truncates metrics.jsonl, to the step that a run resumes from; writes lines of starts.jsonl."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import MachineError
from megatron_llama.system.files import atomic_open, is_at, open_regular, read_whole, write_atomically

METRICS_FILE, STARTS_FILE = "metrics.jsonl", "starts.jsonl"
START, LOADED = "start", "loaded"
"""Events of starts.jsonl."""
MAX_STARTS_BYTES = 16 << 20
MAX_BYTES = 16 << 30
TAIL_BYTES = 1 << 16
MAX_UNWRITTEN_BYTES = 64 << 20
"""Metrics that wait in memory for space on a full disk."""
REQUIRED_METRICS = ("step", "consumed_tokens", "reduced_train_loss", "lr", "tokens_per_second", "step_time_s", "mfu")
SHOWN_METRICS = (
    *(*REQUIRED_METRICS, "val_loss", "kl", "rewards/margins", "peak_memory_bytes", "data_time_s"),
    *("padded_tokens_per_second", "spike_skipped_steps", "spike_rewinds", "spike_skipped_samples", "failed_saves"),
)
"""Metrics that the summary and loss.png show; they need REQUIRED_METRICS."""


class MetricsFile:
    """The metrics.jsonl of a run that starts or resumes after ``start_step``."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Remove the records after ``start_step`` and invalid lines, so that a resumed run logs each step once.

        A copy of a file with invalid lines is saved, and reported on stderr. Raises OSError.
        """
        self.throughput_peak = 0.0
        self.repeated: dict[int, float | None] = {}
        """Loss of each removed step of a run that resumes. A run from the start is a new run of a service."""
        if path.exists():
            self._truncate(path, start_step)
        self._path, self._folder = path, os.stat(path.parent)
        self._file = open(path, "ab", buffering=0)
        self._unwritten = b""

    def _truncate(self, path: Path, step: int) -> None:
        broken: Broken = []
        with atomic_open(path) as file:
            for record, line in stream_records(path, broken):
                if step and record["step"] <= step:
                    file.write(line)
                    if isinstance(peak := record.get("throughput_peak"), (int, float)):
                        self.throughput_peak = max(self.throughput_peak, peak)
                elif step and _is_complete(record):
                    self.repeated[record["step"]] = record["reduced_train_loss"]
            if broken:
                number = 1
                while (copy := path.with_name(f"{path.stem}.broken.{number}{path.suffix}")).exists():
                    number += 1
                with open_regular(path) as source, atomic_open(copy) as target:
                    shutil.copyfileobj(source, target)
                count = f"removed {len(broken):,} invalid lines, first " if len(broken) > 1 else "removed invalid "
                sys.stderr.write(f"{path}: {count}{_first(broken)}; copy: {copy}\n")

    def close(self) -> None:
        """Close the file; ``append`` has reported write errors."""
        with suppress(OSError):
            self._write()
        if lines := self._unwritten.count(b"\n"):
            sys.stderr.write(f"WARNING: {self._path}: lines not written, because the disk is full: {lines:,}\n")
        with suppress(OSError):
            self._file.close()

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Append a step's metrics, on a full disk at a later step. Raises MachineError."""
        was_full = bool(self._unwritten)
        self._unwritten += json.dumps(metrics).encode() + b"\n"
        try:
            self._reopen_if_replaced()
            self._write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(self._unwritten) > MAX_UNWRITTEN_BYTES:
                self._unwritten = b""
                remedy = "the same command resumes from the newest checkpoint; if the disk is full, free space before"
                raise MachineError(f"cannot write {self._path}: {error.strerror}.\n{remedy}") from error
            if not was_full:
                sys.stderr.write(f"WARNING: {self._path}: the disk is full; steps are written when it has space.\n")

    def _write(self) -> None:
        """Write what is unwritten. After a kill only the last line may be incomplete. Raises OSError."""
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _reopen_if_replaced(self) -> None:
        """Replace the file if it was deleted. Raises OSError, and MachineError if its folder was."""
        if is_at(self._path, os.fstat(self._file.fileno()), follow=False):
            return
        if not is_at(self._path.parent, self._folder):  # run.dir may be a link
            raise MachineError(f"{self._path.parent} was deleted, renamed or replaced during the run.")
        sys.stderr.write(f"WARNING: {self._path} was deleted or replaced during the run; its earlier steps are lost.\n")
        self._path.unlink(missing_ok=True)  # a link or a pipe
        self._file.close()
        self._file = open(self._path, "ab", buffering=0)


def read_metrics(path: Path, steps: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, one per step, without an incomplete last line.

    Args:
        steps: Names of the step; each record has one of them.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line before the last is not JSON, or has no step.
    """
    broken: Broken = []
    records = [record for record, _ in stream_records(path, broken, steps)]
    if broken:
        raise ValueError(f"{path}, {_first(broken)}")
    return records


def stream_run_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records with all of ``REQUIRED_METRICS``."""
    return (record for record, _ in stream_records(path, []) if _is_complete(record))


def read_run_records(path: Path) -> list[dict[str, Any]]:
    """Return the ``SHOWN_METRICS`` of the records with all of ``REQUIRED_METRICS``: a long run has many others."""
    return [{name: record[name] for name in SHOWN_METRICS if name in record} for record in stream_run_records(path)]


def _is_complete(record: Mapping[str, Any]) -> bool:
    return all(type(record.get(name, "")) in (type(None), int, float) for name in REQUIRED_METRICS)


def read_last_step(path: Path) -> int | None:
    """Return the step of the last valid line near the end of a metrics.jsonl; None without one. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, RecursionError, KeyError, TypeError, OverflowError):
            return int(json.loads(line)["step"])
    return None


def _first(broken: Sequence[tuple[int, str]]) -> str:
    number, reason = broken[0]
    return f"line {number:,} ({reason})"


Broken = list[tuple[int, str]]
"""(number, reason) of each invalid line."""


def stream_records(
    path: Path, broken: Broken, steps: Sequence[str] = ("step",)
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield (record, line) of each valid line of a metrics.jsonl; the file is not read at once.

    Args:
        broken: Receives the invalid lines, except an invalid last line, as a kill or a step in progress leaves it.
        steps: As in ``read_metrics``.

    Raises:
        OSError: The file cannot be read, or has more than MAX_BYTES.
    """
    last: Broken = []
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"has {size:,} bytes; the limit is {MAX_BYTES:,}", str(path))
        for number, line in enumerate(file, start=1):
            broken += last
            last = []
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no newline at the end")
                # Integers of more than 64 bits become floats, perhaps infinite.
                record = json.loads(line, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))
                if not isinstance(record, dict) or not any(type(record.get(name)) in (int, float) for name in steps):
                    raise ValueError(f"no number under {' or '.join(steps)}")
            except (ValueError, RecursionError) as error:
                last = [(number, str(error).partition("\n")[0][:200])]
                continue
            yield record, line


def append_start_line(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a line to starts.jsonl by replacing the file (launch/start_log.py). Raises OSError."""
    path = folder / STARTS_FILE
    content = read_whole(path, MAX_STARTS_BYTES) if path.exists() else b""
    newline = b"\n" if content and not content.endswith(b"\n") else b""
    write_atomically(path, content + newline + json.dumps(record).encode() + b"\n", private=True)


def note_loaded_step(folder: Path, step: int) -> None:
    """Append to starts.jsonl the step from which the last start resumed: the newest checkpoint may be damaged.

    Later loads of this start, after a rewind, are not noted. A failure is not reported: ``log_start`` has done it.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        last = read_whole(folder / STARTS_FILE, MAX_STARTS_BYTES).splitlines()[-1]
        if json.loads(last).get("event") == START:
            append_start_line(folder, {"event": LOADED, "time": round(time.time(), 3), "step": step})
