"""Messages, outputs and exit status of scripts/report.py, and a run in progress."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_llama.tools.report.cli import main
from tests.cpu import children_cpu_seconds
from tests.paths import SCRIPTS
from tests.tools.report.helpers import lines, write_run

SCRIPT = SCRIPTS / "report.py"


def test_help_is_quick(tmp_path: Path) -> None:
    with children_cpu_seconds(2.0):
        done = subprocess.run([sys.executable, str(SCRIPT), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--output FILE" in done.stdout and "Exit status" in done.stdout


def test_all_problems_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other, new, empty = (tmp_path / name for name in ("file", "other", "new", "empty"))
    file.write_text("x")
    for folder in (other, new, empty):
        folder.mkdir()
    (new / "config.yaml").write_text("{}")
    (empty / "metrics.jsonl").write_text('oops\n{"step": 1, "red')
    good = write_run(tmp_path / "good", 3)
    runs = map(str, (tmp_path / "none", file, other, new, empty, good, good))
    assert main([*runs, "--output", str(tmp_path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    for words in (
        "does not exist",
        "is not a folder",
        "is not a run folder: it has no metrics.jsonl",
        "has no step yet",
        "its metrics.jsonl has no step; metrics.jsonl has 1 invalid line",
        "is given twice",
        "is a folder",
    ):
        assert words in message, words
    assert not (good / "report.html").exists()


def test_the_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a/run", "b/run"):
        write_run(Path(folder), 3)
    assert main(["a/run"]) == 0 and (tmp_path / "a/run/report.html").is_file()
    assert main(["a/run", "b/run/"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a/run" in page and "b/run" in page, "equal names have their folders"
    assert main(["a/run", "--output", "new/page.html"]) == 0 and (tmp_path / "new/page.html").is_file()


def test_a_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(next(lines(11))[:50])
    assert main([str(run)]) == 0
    assert "step 10 of 10" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("steps", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_page_of_a_long_run_is_small(tmp_path: Path, steps: int) -> None:
    """The number of buckets is bounded; 2,000 steps fill the most."""
    more: dict[str, Any] = {f"more_{number}": number / 7 for number in range(20)}
    run = write_run(tmp_path / "run", steps, {"trainer.steps": steps}, **more)
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 3e6 and f"step {steps:,} of {steps:,}" in page
    assert "More metrics (27)" in page


def test_only_the_metrics_are_required(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reduced_train_loss": 2.5}) + "\n")
    (run / "config.yaml").write_text("{[")
    (run / "samples.json").write_text("[]")
    (run / "starts.jsonl").mkdir()
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for words in ("no settings: ", "no plan: plan.txt", "no samples: ", "no starts: ", "no data shares of step 1: "):
        assert f'class="note">{words}' in page, words


def test_a_layout_that_cannot_be_planned_has_no_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, {"trainer.pp": 2})
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("num_attention_heads: 4", "num_attention_heads: 5"))
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert 'class="note">no picture of the pipeline: model.' in page, "the setting is named"
