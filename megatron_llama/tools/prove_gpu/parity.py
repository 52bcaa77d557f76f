"""Losses and gradient norms of layouts, options and methods against recorded ones of one CPU process in fp32.

``plan.toml`` has the runs. ``python -m megatron_llama.tools.prove_gpu.parity`` records the losses in ``oracle.json``.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.devices import HOST
from megatron_llama.system.files import read_json, write_atomically
from megatron_llama.tools.common import package_version
from megatron_llama.tools.prove_gpu.run_checks import TABLE, Outcome, Row
from megatron_llama.tools.prove_gpu.session import CheckFailed, Clock, Session, TrainingRun
from megatron_llama.tools.prove_gpu.training import QUIET, require_losses

ORACLE = Path(__file__).with_name("oracle.json")
PACKAGES = ("torch", "megatron-core", "numpy")
STEPS = 10
RECORDED = ("reduced_train_loss", "gradient_norm")
Oracle = Mapping[str, Mapping[str, Sequence[float]]]
"""Recorded values per step, by model and metric."""


def check(session: Session, row: Row) -> Outcome:
    """Compare a row with the recorded losses of its model."""
    run = session.train(f"parity/{row.folder}", *row_settings(row), ranks=row.ranks)
    require_losses(run, STEPS)
    oracle: Oracle = read_json(ORACLE)["models"]
    return compare(values_of(run), oracle[row.model], row.tolerances)


def row_settings(row: Row) -> list[str]:
    """Return the overrides of a row."""
    defaults = (f"trainer.steps={STEPS}", "trainer.precision=fp32", "trainer.compile=false")
    given = {word.partition("=")[0] for word in row.settings}
    added = [word for word in defaults if word.partition("=")[0] not in given]
    return [*TABLE["parity"]["shape"], *QUIET, *added, *TABLE["models"][row.model], *row.settings]


def values_of(run: TrainingRun) -> dict[str, list[float]]:
    """Return the recorded metrics of a run."""
    return {name: run.column(name) for name in RECORDED}


def compare(
    actual: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], tolerances: Sequence[float]
) -> Outcome:
    """Return the largest relative difference of the losses. Raises CheckFailed at the first value that is too far."""
    values = {"losses": list(actual[RECORDED[0]]), "expected": list(expected[RECORDED[0]])}
    errors = {}
    for name, tolerance in zip(RECORDED, tolerances, strict=True):
        differences = [abs(a - b) / abs(b) for a, b in zip(actual[name], expected[name], strict=True)]
        for step, difference in enumerate(differences, 1):
            if not difference <= tolerance and not tolerance == math.inf:
                text = f"{name} of step {step} is {actual[name][step - 1]:.6g}, not {expected[name][step - 1]:.6g}"
                raise CheckFailed(f"{text}: {difference:.1e} apart, at most {tolerance:.0e}", values)
        errors[name] = max(differences)
    return Outcome(f"losses within {errors[RECORDED[0]]:.1e}", values | {"error": errors[RECORDED[0]]})


def main() -> int:
    """Train all models on the CPU and write ``oracle.json``."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder) / "results", Path(folder) / "runs", Clock(3600.0), HOST)

        def train(row: Row) -> TrainingRun:
            sys.stderr.write(f"{row.name}\n")
            return session.train(row.folder, *row_settings(row))

        values = {model: values_of(train(Row(model, model=model))) for model in TABLE["models"]}
    versions = {name: package_version(name) for name in PACKAGES}
    content: dict[str, Any] = {"versions": versions, "steps": STEPS, "models": values}
    text = re.sub(r"(?<=[,\[])\n +(?=[\d-])|(?<=\d)\n +(?=\])", "", json.dumps(content, indent=1))
    write_atomically(ORACLE, text + "\n")  # a line per list
    return 0


if __name__ == "__main__":
    sys.exit(main())
