"""The tuner's trials as jobs of a real SLURM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.slurm.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
TINY = (
    "model=llama_2m data=mock device=cpu data.seq_length=32 model.num_hidden_layers=2 model.hidden_size=64 "
    "model.intermediate_size=96 trainer.global_batch_size=4 trainer.micro_batch_size=1 trainer.recompute=none "
    "trainer.zero=1 trainer.vpp=1 trainer.tp=2"
).split()


def test_trials_are_jobs(lab: Lab, tmp_path: Path) -> None:
    name, machine = "slurm_test", "cluster.device=cpu cluster.nodes=4 cluster.devices_per_node=1 device.memory_gib=16"
    written = ROOT / "conf" / "experiment" / f"{name}.yaml"
    words = [f"tune.name={name}", f"tune.dir={tmp_path}", "tune.jobs=true", "tune.trials=2", "tune.steps=2"]
    command = [sys.executable, str(ROOT / "scripts" / "tune.py"), *TINY, *machine.split(), *words]
    try:
        done = subprocess.run(command, env=lab.client, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Measured: a step of" in written.read_text()
    finally:
        written.unlink(missing_ok=True)
    trials = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert [each["outcome"]["status"] for each in trials] == ["done", "done"], trials
    assert len({each["settings"] for each in trials}) == 2
    assert all("trainer.tp=2" in each["settings"] for each in trials)
