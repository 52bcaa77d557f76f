"""Whole runs as a user starts them, in a process forked from this one: it has imported everything already."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import megatron_llama.train.run_rank  # noqa: F401  imported before the fork
from megatron_llama.checkpoint.folder import find_checkpoint
from megatron_llama.checkpoint.manifest import read_manifest
from megatron_llama.cli import main
from megatron_llama.plan import Plan
from tests.checkpoint.runner import SMALL
from tests.processes import Launcher

QUIET = ("device.peak_tflops=0.01", "logging.tensorboard=false")


class Job(Launcher):
    """A forked ``python train.py`` with these arguments. ``prepare`` is called first; ``work`` replaces run_rank."""

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        work: Callable[[Plan], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

        def program() -> int:
            torch.set_num_threads(1)
            if prepare is not None:
                prepare()
            return main([*SMALL, *QUIET, f"run.dir={run_dir}", *overrides], work)

        super().__init__(program, run_dir.parent, run_dir.name + ".out")

    def kill(self) -> None:
        """kill -9, and wait until its ranks have gone too: they hold the folder's lock until then."""
        super().kill()
        lock = self.run_dir / ".lock"
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)

    def until(self, condition: Callable[[], bool], timeout: float = 150) -> None:
        """Return when ``condition`` is true. Ends the job, and fails, when that takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"never came to it:\n{self.output}")
            assert os.waitpid(self.pid, os.WNOHANG)[0] == 0, f"ended before:\n{self.output}"
            time.sleep(0.02)

    @property
    def output(self) -> str:
        """stdout and stderr of the job."""
        return self.out.read_text(errors="replace") if self.out.exists() else ""


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of each whole line of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["reduced_train_loss"]) for record in records]


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint."""
    stored = read_manifest(find_checkpoint(run_dir)).stored
    return {name: stored.rows(name) for name in stored.tensors}


def leftovers(run_dir: Path) -> list[str]:
    """Files and folders of a run that only exist while something is written."""
    return [str(path) for path in run_dir.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
