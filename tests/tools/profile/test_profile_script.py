"""scripts/profile.py from the command line to the printed tree, through the training loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.tools.profile import cli
from megatron_llama.train.metrics_file import read_metrics
from megatron_llama.train.waits import WAIT_METRICS
from tests.oracle import SHAPE
from tests.paths import ROOT, SCRIPTS
from tests.processes import Launcher

SMALL = [word for word in SHAPE if not word.startswith(("data=", "trainer.steps"))]


def test_the_script_runs_and_prints_a_profile(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("a run's own\n")
    words = [*SMALL, "optim.warmup_steps=100", "trainer.profile=[2,3]", f"run.dir={tmp_path / 'run'}"]
    started = Launcher(lambda: cli.main(words), tmp_path)
    assert started.wait() == 0, started.errors
    assert "profile of step 2; step 3 is traced" in started.out.read_text()
    assert started.out.read_text().endswith((tmp_path / "run/profiling/profile/profile.txt").read_text())
    records = read_metrics(tmp_path / "run/profiling/metrics.jsonl")
    assert [record["step"] for record in records if set(WAIT_METRICS) <= record.keys()] == [2, 3], "profiled steps only"
    assert records[1]["waited_data_s"] <= records[1]["step_time_s"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "a run's own\n"
    assert not (tmp_path / "run/profiling/checkpoints").exists()
    modules = json.loads((tmp_path / "run/profiling/profile/profile.json").read_text())["modules"]
    assert {"layers.0.self_attn.qkv_proj", "lm_head"} <= {module["name"] for module in modules}


@pytest.mark.parametrize(
    ("words", "message"),
    [(["model=llama_2"], "no model of that name"), (["trainer.profile=[3,1]"], "trainer.profile = [3,1]")],
)
def test_config_errors_are_reported(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert message in capfd.readouterr().err


def test_the_script_does_not_shadow_the_profile_module() -> None:
    """Scripts of scripts/ that import cProfile, as torch does, get the standard library's profile module."""
    program = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); path = list(sys.path); import cProfile, profile; "
    program += "assert sys.path == path; cProfile.run('1')"  # live_bytes.py runs other commits of the project
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "function calls" in done.stdout
