"""A run's metrics.jsonl as a file: reading it, and cutting it back to the step that a run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path, steps: Sequence[str] = ("step",)) -> list[dict[str, Any]]:
    """The steps in a metrics.jsonl; a last line that is only half written is left out.

    ``steps`` are the names, one of which every line has: other programs call a step otherwise.
    """
    return [record for record, _ in _records(path, steps)]


def cut_back(path: Path, step: int) -> None:
    """Leaves in a metrics.jsonl what was logged up to ``step``, so that each step will stand in it once.

    All later lines go, and a line that a kill left half written. The file is replaced as a whole, or not at all.
    """
    if not path.exists():
        return
    kept = b"".join(line for record, line in _records(path) if record["step"] <= step)
    if kept == path.read_bytes():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _records(path: Path, steps: Sequence[str] = ("step",)) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each whole line of a metrics.jsonl, read and as it stands; a bad one is an error, unless it is the last."""
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
