"""The trainer runs without ``megatron_llama/tools``: train.py is started in a copy of the tree without that folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

TINY = (
    "model=llama_2m",
    "data=mock",
    "data.seq_length=16",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=2",
)


# The finder of an editable install would find tools/ in this checkout.
START = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the trainer only."""
    tree = tmp_path_factory.mktemp("trainer")
    ignored = shutil.ignore_patterns("tools", "__pycache__")
    for folder in ("megatron_llama", "data_prep", "conf"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    shutil.copy(ROOT / "train.py", tree)
    assert not (tree / "megatron_llama" / "tools").exists()
    return tree


def run_train_py(tree: Path, *overrides: str) -> tuple[int, str]:
    """The exit status and all output of train.py in ``tree``."""
    command = [sys.executable, "-c", START, *TINY, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def test_a_step_is_trained(trainer: Path, tmp_path: Path) -> None:
    status, output = run_train_py(trainer, "trainer.steps=1", f"run.dir={tmp_path}/run", "device=cpu")
    assert status == 0, output
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()


def test_a_run_that_does_not_fit_is_refused_with_its_numbers(trainer: Path) -> None:
    overrides = ("dry_run=true", "device=cuda", "model=llama7b", "device.memory_gib=8", "trainer.dp=1")
    status, output = run_train_py(trainer, *overrides)
    assert status == 2 and "Traceback" not in output, output
    assert "the heaviest rank needs" in output and "write a smaller model" in output
    assert "trainer.zero=" not in output and "trainer.offload=" not in output, "no change was tried"


def test_a_profile_is_refused_in_words(trainer: Path) -> None:
    status, output = run_train_py(trainer, "dry_run=true", "trainer.profile=[1,1]")
    assert status == 2 and "Traceback" not in output, output
    assert "needs megatron_llama/tools/profile, which is not installed here" in output
