"""A run of four ranks that takes seconds, and its losses without Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.processes import environment, losses

TINY = (
    "model=llama_2m data=mock device=cpu data.seq_length=32 model.num_hidden_layers=2 model.hidden_size=64 "
    "model.intermediate_size=96 logging.tensorboard=false trainer.tp=2 trainer.dp=2 trainer.global_batch_size=4 "
    "optim=constant optim.warmup_steps=0"
).split()


def plain(folder: Path, *arguments: str) -> list[float]:
    """The losses of an uninterrupted run on this machine, by hand, without Slurm: a thread a rank, as on its nodes."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments, f"run.dir={folder}"]
    variables = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return losses(folder)
