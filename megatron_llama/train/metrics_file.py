"""Writes and reads metrics.jsonl, and cuts it back to the step that a run resumes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import MachineError
from megatron_llama.system.files import write_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """A metrics.jsonl that a run which resumes after ``start_step`` continues."""

    def __init__(self, path: Path, start_step: int) -> None:
        cut_back(path, start_step)
        self._file = open(path, "a", encoding="utf-8")

    def close(self) -> None:
        """Frees the file; what a full disk kept ``append`` from writing, it has reported."""
        with suppress(OSError):
            self._file.close()

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Adds a step's metrics. Raises MachineError."""
        # One write per line: a reader, or a run that resumes after a kill, sees whole lines, except perhaps the last.
        try:
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        except OSError as error:
            raise MachineError(f"{self._file.name} could not be written: {error.strerror}") from error


def read_metrics(path: Path, steps: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, one per step, without a last line that is only half written.

    ``steps`` are names for the step, of which every record has one: other programs have other names for it.

    Raises:
        ValueError: a line before the last is not JSON, or has no step.
    """
    return [record for record, _ in _records(path, steps)]


def cut_back(path: Path, step: int) -> None:
    """Removes all records after ``step`` and a half-written last line, so that a resumed run logs each step once."""
    if path.exists():
        write_atomically(path, b"".join(line for record, line in _records(path) if record["step"] <= step))


def _records(path: Path, steps: Sequence[str] = ("step",)) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(record, line) of each whole line. Only the last line may be broken: that is what a kill leaves."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            record = json.loads(line)
            if not isinstance(record, dict) or not any(name in record for name in steps):
                raise ValueError(f"no {' or '.join(steps)} in it")
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not a line of metrics ({error})") from None
        yield record, line
