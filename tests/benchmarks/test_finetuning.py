"""benchmarks/verify/finetuning.py on a tiny random model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verify import finetuning
from tests.paths import ROOT
from tests.tools.inference.models import make_folder

ANSWERS = ("entailment", "not_entailment")


def share(right: int, of: int) -> dict[str, Any]:
    return {"right": right, "of": of, "share": right / of, "low": 0.25, "high": 0.75}


def test_table() -> None:
    chosen = {"entailment": {"there": 3, "chosen": 1}, "not_entailment": {"there": 5, "chosen": 7}}
    majority = {"label": "not_entailment", "share": 0.625}
    qnli = {"accuracy": share(4, 8), "majority": majority, "labels": chosen}
    gsm8k = {"well_formed": share(3, 4), "exact_match": share(1, 4)}
    names = ("qnli_before", "qnli_full", "qnli_lora")
    reports = dict.fromkeys(names, qnli) | dict.fromkeys(("gsm8k_before", "gsm8k_full"), gsm8k)
    lines = finetuning.table(reports).splitlines()
    assert "| always `not_entailment` | 62.5% | |" in lines
    assert "| lora | 50.0% (4 of 8; 25.0% to 75.0%) | entailment 1, not_entailment 7 |" in lines
    assert "| full | 75.0% (3 of 4; 25.0% to 75.0%) | 25.0% (1 of 4; 25.0% to 75.0%) |" in lines


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="trainer.compile=true on the CPU needs a C++ compiler, g++")
def test_fine_tuning_end_to_end_and_resume(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", max_position_embeddings=512, hidden_size=64, intermediate_size=128)
    data = tmp_path / "data"
    data.mkdir()
    rows = [f"{n}\tWho was number {n}?\tA cat sat on mat {n}.\t{ANSWERS[n % 2]}" for n in range(160)]
    (data / "qnli_dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *rows]) + "\n")
    sums = [json.dumps({"question": f"{n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"}) for n in range(200)]
    for part in ("train", "test"):
        (data / f"gsm8k_{part}.jsonl").write_text("\n".join(sums) + "\n")
    output = tmp_path / "out"
    # The figure needs a validation, which runs every 50 steps.
    sizes = ("--split", "120,40", "--epochs", "4", "--gsm8k-steps", "50", "--questions", "4")
    script = [sys.executable, "-m", "benchmarks.verify.finetuning", "--model", str(model), "--data", str(data)]

    def run() -> subprocess.CompletedProcess[str]:
        command = [*script, "--output", str(output), *sizes]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT)

    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (output / "finetuning.md").read_text() in done.stdout
    assert (output / "finetuning.png").read_bytes().startswith(b"\x89PNG")
    before, lora = (json.loads((output / f"qnli_{name}.json").read_text()) for name in ("before", "lora"))
    assert before["accuracy"]["of"] == lora["accuracy"]["of"] == 40
    written = {path: path.stat().st_mtime_ns for path in output.rglob("*.json*")}
    (output / "finetuning.md").unlink()
    repeated = run()
    assert repeated.returncode == 0, repeated.stderr[-3000:]
    assert (output / "finetuning.md").exists()
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.json*")} == written
