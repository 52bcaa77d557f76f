"""The comparison of precisions: its arithmetic on given losses, and its errors. train.py does the training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import precision_curves  # noqa: E402

RUNS = {
    "fp32": [[4.0 - step / 100 for step in range(100)], [4.1 - step / 100 for step in range(100)]],
    "bf16_pure": [[4.0 - step / 200 for step in range(100)], [4.1 - step / 200 + 0.02 for step in range(100)]],
}


def test_gaps_are_to_the_first_precision_of_the_same_seed() -> None:
    assert [gap.tolist() for gap in precision_curves.gaps(RUNS, "fp32")] == [[0.0] * 91] * 2
    first, second = precision_curves.gaps(RUNS, "bf16_pure")
    # Over the last 10 of 100 steps, 90 to 99, the mean is that of step 94.5.
    assert first[-1] == pytest.approx(94.5 / 200) and second[-1] == pytest.approx(94.5 / 200 + 0.02)
    text = precision_curves.table(RUNS, "recipe")
    assert "| bf16_pure | 3.5875 | +0.4825 | +0.4725, +0.4925 |" in text


def test_it_draws(tmp_path: Path) -> None:
    precision_curves.draw(RUNS, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_is_reported(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "precision_curves.py"), "--steps", "1", "--output", str(tmp_path)]
    done = subprocess.run([*script, "--precisions", "fp23"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "must be one of fp32, bf16" in done.stderr
    assert "fp23-1234: train.py ended with status 2" in done.stderr
