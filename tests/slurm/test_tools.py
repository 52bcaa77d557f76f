"""Runs of a sweep and trials of the tuner as jobs of a real SLURM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_llama.tools.sweep import launchers
from megatron_llama.tools.sweep.cli import main
from tests.paths import ROOT
from tests.processes import losses
from tests.slurm.cluster import TINY, Lab, Report, plain

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_each_run_of_a_sweep_is_a_job(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in lab.client.items():
        monkeypatch.setenv(name, value)
    for name in ("ROOT", "BATCH_FOLDER"):
        monkeypatch.setattr(launchers, name, lab.checkout)
    folder = tmp_path / "s"
    options = f"--nodes=2 --output={lab.checkout}/slurm-%j.out"
    line = ["-m", f"--slurm={options}", *TINY, "trainer.steps=3", "optim.lr=1e-3,1e-4", f"run.dir={folder}"]
    begin = time.monotonic()
    assert main(line) == 0, capsys.readouterr().out
    seconds = time.monotonic() - begin
    ends = [losses(folder / f"optim.lr_{lr}") for lr in ("0.001", "0.0001")]
    assert [len(end) for end in ends] == [3, 3] and ends[0] != ends[1]
    assert ends[1] == plain(tmp_path / "plain", *TINY, "trainer.steps=3", "optim.lr=1e-4"), "to the bit"
    rows = [row.split(" | ")[1:4] for row in (folder / "sweep.md").read_text().splitlines()[2:]]
    assert rows == [["done", "3", f"{end[-1]:.4f}"] for end in ends]

    def jobs() -> list[str]:
        return [run["job"] for run in json.loads((folder / "sweep.json").read_text())["runs"].values()]

    first = jobs()
    assert len(set(first)) == 2 and all((lab.checkout / "logs" / job).is_dir() for job in first)
    assert main(line) == 0 and jobs() == first, "finished runs are not submitted again"
    report(
        "`python train.py -m '--slurm=--nodes 2' optim.lr=1e-3,1e-4`: a job each, then the table", f"{seconds:.0f} s"
    )


SEARCHED = "trainer.global_batch_size=4 trainer.micro_batch_size=1 trainer.recompute=none trainer.zero=1 trainer.vpp=1"


def test_trials_are_jobs(lab: Lab, tmp_path: Path) -> None:
    name, machine = "slurm_test", "cluster.device=cpu cluster.nodes=4 cluster.devices_per_node=1 device.memory_gib=16"
    written = ROOT / "conf" / "experiment" / f"{name}.yaml"
    words = [f"tune.name={name}", f"tune.dir={tmp_path}", "tune.jobs=true", "tune.trials=2", "tune.steps=2"]
    command = [sys.executable, str(ROOT / "scripts/tune.py"), *TINY[:9], *SEARCHED.split(), *machine.split(), *words]
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
