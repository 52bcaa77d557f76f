"""Writes and reads metrics.jsonl, and cuts it back to the step that a run resumes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_llama.system.errors import MachineError
from megatron_llama.system.files import read_whole, write_atomically

METRICS_FILE = "metrics.jsonl"
MOST_BYTES = 16 << 30
OWN = ("step", "consumed_tokens", "reduced_train_loss", "lr", "tokens_per_second", "step_time_s", "mfu")
"""What every line of a run's own file has, and its summary and picture need."""


class MetricsFile:
    """A metrics.jsonl that a run which resumes after ``start_step`` continues."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Lines that can't be read don't stop a run: the file as it was is kept beside it, and stderr says so."""
        if told := truncate_after(path, start_step):
            sys.stderr.write(told + "\n")
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
        OSError: it can't be read.
        ValueError: a line before the last is not JSON, or has no step.
    """
    lines, broken = _read(path, steps)
    if broken:
        raise ValueError(f"{path}, {_first(broken)}")
    return [record for record, _ in lines]


def read_run_records(path: Path) -> list[dict[str, Any]]:
    """The records that a run wrote, for its summary and picture; whatever else came into the file is left out."""
    return [record for record, _ in _read(path, OWN[:1])[0] if all(_is_own(record, name) for name in OWN)]


def truncate_after(path: Path, step: int) -> str | None:
    """Removes all records after ``step`` and a half-written last line, so that a resumed run logs each step once.

    Where other lines can't be read, the file is first kept under another name. Returns what to tell about that.
    Raises OSError.
    """
    if not path.exists():
        return None
    lines, broken = _read(path)
    told = None
    if broken:
        number = 1
        while (kept := path.with_name(f"{path.stem}.broken.{number}{path.suffix}")).exists():
            number += 1
        write_atomically(kept, read_whole(path, MOST_BYTES))
        many = f"{len(broken):,} lines are left out, the first of them " if len(broken) > 1 else ""
        told = f"{path}: {many}{_first(broken)}. The file as it was is kept: {kept}"
    write_atomically(path, b"".join(line for record, line in lines if record["step"] <= step))
    return told


def _first(broken: Sequence[tuple[int, str]]) -> str:
    number, reason = broken[0]
    return f"line {number:,}: not a line of metrics ({reason})"


def _is_own(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name, "")
    return value is None or type(value) in (int, float)


Lines = list[tuple[dict[str, Any], bytes]]


def _read(path: Path, steps: Sequence[str] = ("step",)) -> tuple[Lines, list[tuple[int, str]]]:
    """((record, line) of each good line, (number, reason) of each other). A broken last line is neither: that is what a
    kill leaves."""
    lines = read_whole(path, MOST_BYTES).splitlines(keepends=True)
    good: Lines = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            record = json.loads(line)
            if not isinstance(record, dict) or not any(type(record.get(name)) in (int, float) for name in steps):
                raise ValueError(f"no number under {' or '.join(steps)}")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                broken.append((number, str(error).partition("\n")[0][:200]))
            continue
        good.append((record, line))
    return good, broken
