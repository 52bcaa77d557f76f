"""The comparison of precisions: statistics of given losses, overrides and errors, without training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.verify import precision
from tests.paths import ROOT

RUNS = {
    "fp32": [[4.0 - step / 100 for step in range(100)], [4.1 - step / 100 for step in range(100)]],
    "bf16_pure": [[4.0 - step / 200 for step in range(100)], [4.1 - step / 200 + 0.02 for step in range(100)]],
}


def test_gaps_compare_with_the_first_precision_of_the_same_seed() -> None:
    assert [gap.tolist() for gap in precision.gaps(RUNS, "fp32")] == [[0.0] * 91] * 2
    first, second = precision.gaps(RUNS, "bf16_pure")
    # The mean over the last 10 of 100 steps, 90 to 99, is the loss of step 94.5.
    assert first[-1] == pytest.approx(94.5 / 200) and second[-1] == pytest.approx(94.5 / 200 + 0.02)
    [head, _, _, row] = precision.table(RUNS, {name: [[], []] for name in RUNS})
    assert row == "| bf16_pure | 3.5875 (3.5275 to 3.6475) | +0.4825 (+0.4725 to +0.4925) |"
    assert "validation" not in head
    validated = {"fp32": [[4.0, 3.0], [4.0, 3.1]], "bf16_pure": [[4.0, 3.5], [4.0, 3.4]]}
    row = precision.table(RUNS, validated)[-1]
    assert row.endswith("(+0.4725 to +0.4925) | 3.4500 (3.4000 to 3.5000) | +0.4000 (+0.3000 to +0.5000) |")


def test_precision_with_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, ...]] = []

    def program(*words: str) -> None:
        started.append(words)
        folder = Path(words[-1].removeprefix("run.dir="))
        folder.mkdir()
        steps = [{"step": 1, "reduced_train_loss": 2.0, "val_loss": None}, {"step": 2, "reduced_train_loss": 1.5}]
        steps[1]["val_loss"] = 1.5 + len(started) / 10
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))

    monkeypatch.setattr(precision, "run_program", program)
    words = ["optim.lr=1e-3", "--seeds", "1", "2", "--output", str(tmp_path)]
    assert precision.main([*words, "--precisions", "fp32", "bf16 optim.state_bits=8 optim.lr=2e-3"]) == 0
    # Seeds run one after another, so that other load on the machine affects all precisions.
    eight = "bf16_optim_state_bits_8_optim_lr_2e_3"
    assert [Path(run[-1]).name for run in started] == ["fp32-1", f"{eight}-1", "fp32-2", f"{eight}-2"]
    words_of_run = started[1]
    assert words_of_run.index("optim.lr=1e-3") < words_of_run.index("optim.lr=2e-3")
    assert "optim.state_bits=8" in words_of_run
    assert "trainer.precision=bf16" in words_of_run and "trainer.seed=1" in words_of_run
    assert "optim.state_bits=8" not in started[0]
    page = (tmp_path / "precision.md").read_text()
    assert "seeds 1, 2" in page and "| 1.8000 (1.7000 to 1.9000) | +0.1000 (+0.1000 to +0.1000) |" in page


def test_figure_is_written(tmp_path: Path) -> None:
    precision.draw(RUNS, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_failed_run_is_reported(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "benchmarks.verify.precision", "--steps", "1", "--output", str(tmp_path)]
    done = subprocess.run([*script, "--precisions", "fp23"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "must be one of fp32, bf16" in done.stderr
    assert "fp23-1234: train.py ended with status 2" in done.stderr
