"""Runs that tests of the harness share, and the counts of a step of each: ``python -m tests.cuda.rows [ROW ...]``
rewrites them, or these rows alone.

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
from tests.cuda.log import counts, differences
from tests.rows import read_layouts

GOLDENS = Path(__file__).with_name("goldens.json")
MEASURED_STEP = 2  # the first step creates communicators and states
BASE = "BASE"
"""In an override: the Hugging Face folder of a base model."""

ROWS, _ = read_layouts(__file__, "counted")
"""Name of a row: ranks, overrides."""

SETTINGS, _ = read_layouts(__file__, "trained")
"""Settings without a row in the layout table."""
COPIES = ("trainer.check_copies_every=1", "trainer.tp=2", "trainer.zero=1")
"""Four ranks that compare their copies after each step."""


def base(runtime: Runtime, folder: Path) -> Path:
    """Train a model; return its Hugging Face folder."""
    runtime.train(folder, "trainer.steps=1", "checkpoint.save_last=true", "checkpoint.export_hf=true").check()
    return next((folder / "run").rglob("config.json")).parent


def start(runtime: Runtime, name: str, folder: Path, **settings: str) -> Run:
    ranks, overrides = ROWS[name]
    if any(BASE in override for override in overrides):
        model = str(base(runtime, folder / "base"))
        overrides = [override.replace(BASE, model) for override in overrides]
    return runtime.train(folder, *overrides, devices=ranks, **settings)


def measured(run: Run) -> list[dict[str, Any]]:
    """Return the counts of one step of each rank."""
    return [counts(log.steps[MEASURED_STEP]) for log in run.logs if MEASURED_STEP in log.steps]


def changes(name: str, actual: list[dict[str, Any]]) -> list[str]:
    """Return a line for each count of a row that differs from the recorded one."""
    expected = goldens()["rows"][name]
    ranks = range(max(len(expected), len(actual)))
    by_rank = [
        {f"rank {rank}": dict(enumerate(counted)).get(rank, {}) for rank in ranks} for counted in (expected, actual)
    ]
    return differences(*by_rank)


def goldens() -> dict[str, Any]:
    """Return the recorded counts, or an empty dictionary if none are recorded."""
    return json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


def main() -> int:
    if reason := missing():
        print(reason)
        return 1
    with tempfile.TemporaryDirectory() as folder, open_runtime(Path(folder) / "libraries") as runtime:
        rows = goldens().get("rows", {}) if sys.argv[1:] else {}
        for number, name in enumerate(sys.argv[1:] or ROWS):
            rows[name] = measured(start(runtime, name, Path(folder) / str(number)).check())
            print(name, sum(rows[name][0]["launches"].values()), flush=True)
            GOLDENS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
