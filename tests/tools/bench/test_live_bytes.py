"""scripts/live_bytes.py on a small model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.slow
def test_components_of_a_small_step(tmp_path: Path) -> None:
    settings = "model=llama_2m data=mock device=cpu data.seq_length=64 trainer.steps=3 trainer.precision=fp32".split()
    command = [sys.executable, str(ROOT / "scripts/live_bytes.py"), str(ROOT / "train.py"), *settings]
    done = subprocess.run([*command, f"run.dir={tmp_path}"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {name: int(size) for name, size in re.findall(r"live at the peak: (.+?) +([\d,]+) MiB", done.stdout)}
    assert found["weights"] == round(4 * 1_771_200 / 2**20)
    assert found["optimizer states"] == round(8 * 1_771_200 / 2**20)
    assert found["weights"] + found["optimizer states"] < found["together"]
    assert found["together"] == pytest.approx(sum(found.values()) - found["together"], abs=2)
