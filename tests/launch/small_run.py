"""A run of train.py that takes seconds, for launcher tests."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.paths import ROOT
from tests.processes import steps

TRAIN = str(ROOT / "train.py")
SMALL = [
    "data=mock",
    "device=cpu",
    "data.seq_length=32",
    "model.num_hidden_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "device.peak_tflops=0.01",  # not measured
    "trainer.tp=2",
    "logging.tensorboard=false",
]


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int, limit: float = 150.0) -> None:
    """Wait until the run has logged ``step``."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise AssertionError(f"the run has ended with {run.returncode}: {run.communicate()}")
        if step in steps(folder):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {limit} s, only {steps(folder)}")
