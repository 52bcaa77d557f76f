"""A run on a machine whose clock is before 1970 and jumps back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

CLOCK = """
import time

now = [-1e7]

def jump_back():
    now[0] -= 100.0
    return now[0]

time.time = jump_back
time.time_ns = lambda: int(1e9 * jump_back())
"""


def test_a_clock_before_1970_that_jumps_back(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    words = ["model=llama_2m", "data=mock", "device=cpu", "data.seq_length=16", "trainer.global_batch_size=2"]
    words += ["trainer.steps=4", "trainer.val_every_steps=2", "checkpoint.every_steps=2", f"run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *words], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for name in ("throughput", "tokens_per_second", "step_time_s", "mfu"):
        assert all(record[name] > 0 for record in records), name
    assert "-" not in "".join(line.rpartition("tokens/s")[2] for line in done.stdout.splitlines() if "step " in line)
