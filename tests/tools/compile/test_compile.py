"""scripts/compile.py fills the cache of a later run, with all its ranks or with one representative per stage."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch._inductor.config
import torch.utils.deterministic

from megatron_llama import cli
from megatron_llama.plan import Plan
from megatron_llama.tools.compile import cli as ahead
from megatron_llama.tools.compile import compile_rank
from megatron_llama.train import run_rank
from tests.compiled import needs_compiler
from tests.oracle import SMALL, make_plan
from tests.processes import Launcher
from tests.processes import losses as losses_of
from tests.ranks import run_ranks

pytestmark = needs_compiler
LAYOUT = (*SMALL, "trainer.tp=2", "trainer.pp=2", "trainer.global_batch_size=4", "trainer.val_every_steps=2")


class Job:
    """Runner of both command lines with a separate cache, in forks of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, name: str, *arguments: str, compiler: str | None = None) -> tuple[int, str, dict[str, Any]]:
        """Return the exit status, the output and compile.json."""
        folder = self.folder / name
        folder.mkdir()
        main = cli.main if name.startswith("train") else ahead.main
        words = [*arguments, f"trainer.compile_cache={self.folder / 'cache'}", f"run.dir={folder / 'run'}"]

        def work() -> int:
            os.chdir(self.folder)
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it at first use
            if compiler is not None:
                torch._inductor.config.cpp.cxx = (compiler,)
            return main(words)

        launcher = Launcher(work, folder)
        status = launcher.wait(300)
        report = folder / "run" / ("" if main is cli.main else "compile") / "compile.json"
        content = json.loads(report.read_text()) if report.exists() else {}
        return status, launcher.out.read_text() + launcher.errors, content


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_one_per_stage_compiles_every_graph_of_a_run(job: Job) -> None:
    status, output, report = job.run("ahead", "--one-per-stage", *LAYOUT, "trainer.dp=2", "logging.tensorboard=true")
    assert status == 0, output
    assert "Total graphs: 4\nTotal successful compilations: 4\nTotal failed compilations: 0\n" in output
    assert (report["world_size"], report["cache_misses"], report["total_graphs"]) == (8, 4, 4)
    assert {(graph["what"], tuple(graph["ranks"])) for graph in report["graphs"]} == {
        *(("block", (0, 4)), ("loss", (4,)), ("gradient of the loss", (4,)))
    }
    assert os.listdir(job.folder / "ahead" / "run") == ["compile"], "files of the run are not changed"
    files = {path.name for path in (job.folder / "ahead" / "run" / "compile").iterdir()} - {".lock"}
    assert files == {"config.yaml", "plan.txt", "compile.json"}, "no TensorBoard, no checkpoints, no metrics"

    trained = (*LAYOUT, "trainer.compile=true", "trainer.compile_strict=true", "trainer.steps=4")
    status, output, report = job.run("train", *trained, "checkpoint.save_last=false")
    assert status == 0, output
    assert "compiled 4 graphs on 4 ranks: cache hits 12, misses 0" in output
    assert (report["cache_hits"], report["cache_misses"]) == (12, 0)
    one = ("trainer.tp=1", "trainer.pp=1", "trainer.steps=4", "checkpoint.save_last=false")
    status, output, _ = job.run("train eagerly", *LAYOUT, *one)
    losses, eager = (losses_of(job.folder / name / "run") for name in ("train", "train eagerly"))
    assert losses == pytest.approx(eager, rel=1e-5) and len(losses) == 4


class _Recorded(Exception):
    pass


def _settings_of_torch(rank: int, plan: Plan) -> list[tuple[bool, bool]]:
    """Return torch's settings with which a run and compile.py build the model."""
    os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    results = list[tuple[bool, bool]]()

    def record(*_: Any) -> None:
        settings = torch.utils.deterministic
        results.append((torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory))
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = True
        raise _Recorded

    for module, enter in (run_rank, run_rank.run_rank), (compile_rank, compile_rank.compile_rank):
        without_groups = patch.object(module, "process_groups", lambda *_: nullcontext())
        with without_groups, patch.object(module, "build_model", record), pytest.raises(_Recorded):
            enter(plan)
    return results


def test_compile_has_the_settings_of_a_run() -> None:
    """With other settings Inductor's cache has other graphs, and a run would compile all of them again."""
    ((run, ahead),) = run_ranks(_settings_of_torch, 1, make_plan(1, "trainer.deterministic=true"))
    assert run == ahead == (True, False)


@pytest.mark.slow
def test_a_failing_compiler_fails_the_job(job: Job) -> None:
    status, output, report = job.run("ahead", *SMALL, compiler="/bin/false")
    assert status == 1
    assert "Total graphs: 3\nTotal successful compilations: 0\nTotal failed compilations: 3\n" in output
    assert "FAILED: " in output
    assert output.rstrip().endswith("NotCompiled: 3 of 3 graphs could not be compiled")
    assert report["graphs"][0]["failure"]
    assert os.listdir(job.folder / "ahead" / "run") == ["compile"], "files of the run are not changed"


def test_a_rank_waits_for_slower_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's limit is 5 minutes. A rank that failed for it would end the ranks that compile."""
    limits = []

    def connect(*arguments: object, timeout: timedelta = timedelta(minutes=5), **options: object) -> None:
        limits.append(timeout)
        raise RuntimeError("no store")

    monkeypatch.setattr(compile_rank.dist, "TCPStore", connect)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(RuntimeError, match="no store"):
        compile_rank._gather_through_store([0], [])
    assert limits[0] >= timedelta(days=1)
