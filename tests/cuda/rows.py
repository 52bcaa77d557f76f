"""Runs that tests of the harness share, and the counts of a step of each: ``python -m tests.cuda.rows`` rewrites them.

Counts depend on torch's version, because torch chooses the kernels.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.cuda.build import missing
from tests.cuda.harness import Run, Runtime, open_runtime
from tests.cuda.log import counts

GOLDENS = Path(__file__).with_name("goldens.json")
MEASURED_STEP = 2  # the first step creates communicators and states; the last one may save

ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank, fp32": (1, ("trainer.precision=fp32",)),
    "one rank, bf16": (1, ()),
    "tp 2": (2, ("trainer.tp=2",)),
    "pp 2": (2, ("trainer.pp=2",)),
    "dp 2, zero 3": (2, ("trainer.zero=3",)),
}
"""Name of a row: ranks, overrides."""


def start(runtime: Runtime, name: str, folder: Path, **settings: str) -> Run:
    """Run a row."""
    ranks, overrides = ROWS[name]
    return runtime.train(folder, *overrides, devices=ranks, **settings)


def measured(run: Run) -> list[dict[str, Any]]:
    """Return the counts of one step of each rank."""
    return [counts(log.steps[MEASURED_STEP]) for log in run.logs if MEASURED_STEP in log.steps]


def goldens() -> dict[str, Any]:
    """Return the recorded counts, or an empty dictionary if none are recorded."""
    return json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


def main() -> int:
    if reason := missing():
        print(reason)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        runtime = open_runtime(Path(folder) / "libraries")
        rows = {}
        for number, name in enumerate(ROWS):
            rows[name] = measured(start(runtime, name, Path(folder) / str(number)).check())
    GOLDENS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
