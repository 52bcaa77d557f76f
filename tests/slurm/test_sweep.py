"""A sweep as jobs of a real SLURM."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_llama.tools.sweep import launchers
from megatron_llama.tools.sweep.cli import main
from tests.processes import losses
from tests.slurm.cluster import Lab, Report
from tests.slurm.tiny_run import TINY, plain

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


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
    report.add(
        "`python train.py -m '--slurm=--nodes 2' optim.lr=1e-3,1e-4`: a job each, then the table", f"{seconds:.0f} s"
    )
