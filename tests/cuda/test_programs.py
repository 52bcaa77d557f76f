"""Saving, resuming, inference, prove_gpu, signals and hangs with device=cuda on the runtime."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_llama.system.exit_status import EXIT_FAILED, EXIT_RESTART, EXIT_USER
from megatron_llama.tools.prove_gpu.cli import parts
from tests.cuda.harness import LIMIT_SECONDS, Runtime
from tests.cuda.in_process import FAULT
from tests.paths import ROOT, SCRIPTS
from tests.tools.inference.models import make_folder

pytestmark = pytest.mark.slow
FREE_BYTES = 16 << 20  # llama_2m needs 47 MiB


def test_checkpoint_and_resume(runtime: Runtime, tmp_path: Path) -> None:
    settings = ("trainer.zero=3", "checkpoint.save_last=true")
    copies = "checkpoint.memory_every_steps=1"
    first = runtime.train(tmp_path, "trainer.steps=2", *settings, copies, devices=2).check()
    assert [list(log.steps) for log in first.logs] == [[1, 2]] * 2
    other_layout = ("trainer.tp=2", "trainer.val_every_steps=1", "trainer.val_steps=1")
    assert [list(log.steps) for log in runtime.train(tmp_path, *other_layout, devices=2).check().logs] == [[3]] * 2
    assert "val_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_out_of_memory(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.train(tmp_path, "trainer.steps=1", HOST_CUDA_FREE_BYTES=str(FREE_BYTES))
    assert run.status not in (0, EXIT_USER), run.output[-2000:]
    assert "out of memory" in run.output
    assert run.logs[0].named("OUT_OF_MEMORY")


def test_a_rank_without_memory_is_reported_at_once(runtime: Runtime, tmp_path: Path) -> None:
    """NCCL waits for the other ranks at the end of a group, but a failed rank does not."""
    settings = ("trainer.zero=1", f"trainer.hang_timeout_seconds={LIMIT_SECONDS}")
    run = runtime.train(tmp_path, *settings, devices=2, **{FAULT: "out_of_memory"})
    assert run.status == EXIT_FAILED
    assert "OutOfMemoryError: CUDA out of memory" in run.output.splitlines()[-1], run.output[-2000:]
    assert "Rank 1 of 2 failed" in run.output and "no progress" not in run.output


def test_a_signal_saves(runtime: Runtime, tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"

    def stop_after_a_step(pid: int) -> None:
        exited = os.pidfd_open(pid)
        while not (metrics.exists() and metrics.read_text()):
            assert not select.select([exited], [], [], 0.1)[0], "the run has ended before its first step"
        os.kill(pid, signal.SIGTERM)

    run = runtime.train(tmp_path, "trainer.steps=100000", "trainer.pp=2", devices=2, act=stop_after_a_step)
    assert run.status == EXIT_RESTART, run.output[-2000:]
    saved = len(run.logs[0].steps)
    resumed = runtime.train(tmp_path, f"trainer.steps={saved + 1}", "trainer.pp=2", devices=2).check()
    assert list(resumed.logs[0].steps) == [saved + 1]


def test_the_watchdog_ends_a_hang(runtime: Runtime, tmp_path: Path) -> None:
    settings = ("trainer.tp=2", "trainer.hang_timeout_seconds=4")
    run = runtime.train(tmp_path, *settings, devices=2, **{FAULT: "hang"})
    assert run.status == EXIT_FAILED
    assert "no progress" in run.output.splitlines()[-1]
    assert "Stacks of rank 1" in run.output and "in hang" in run.output, run.output[-4000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    return make_folder(tmp_path_factory.mktemp("model") / "hf", max_position_embeddings=256)


def test_generation(runtime: Runtime, model: Path, tmp_path: Path) -> None:
    words = (str(ROOT / "scripts" / "generate.py"), str(model), "--device", "cuda", "--tp", "2", "--greedy")
    run = runtime.command(tmp_path, *words, "--prompt", "a cat", "--max-new-tokens", "3", devices=2).check()
    assert len(run.logs) == 2 and run.logs[0].named("GEMM")


def test_evaluation(runtime: Runtime, model: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, report = str(tmp_path / "text_document"), tmp_path / "report.json"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_item(torch.arange(100))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    words = (str(ROOT / "scripts" / "evaluate.py"), str(model), "--device", "cuda", "--dataset", prefix)
    run = runtime.command(tmp_path, *words, "--seq-length", "48", "--output", str(report)).check()
    assert json.loads(report.read_text())["tokens"] == 99
    assert run.logs[0].named("GEMM")


@pytest.mark.long
def test_prove_gpu_runs_to_its_end(runtime: Runtime, tmp_path: Path) -> None:
    """All parts, the table, the page and the status. Parts that compare numbers fail: kernels compute nothing."""
    folder = tmp_path / "results"
    words = [str(SCRIPTS / "prove_gpu.py"), "--small", "--minutes", "6", "--output", str(folder)]
    run = runtime.start(words, tmp_path, 2, {})
    assert run.status == 1, run.output[-4000:]  # a part failed, and the command did not
    record = json.loads((folder / "results.json").read_text())
    names = [part.name for part in parts()]
    assert [part["name"] for part in record["parts"]] == names
    table = [line for line in run.output.splitlines() if line.split(" ")[0] in names]
    assert len(table) == len(names) and max(map(len, table)) <= 79
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["device"] == "cuda" and facts["count"] == 2 and len(facts["cards"]) == 2
    (page,) = folder.glob("gpu-*.md")
    text = page.read_text()
    assert all(f"\n## {name.capitalize()}\n" in text for name in names)
    assert str(Path.home()) + "/" not in text and str(SCRIPTS.parent) not in text
    unexpected = re.findall(r"^.*(?:Traceback|AttributeError|NameError|KeyError|TypeError).*$", text, re.MULTILINE)
    assert not unexpected, "faults of the command, not of the runtime"
    assert list(folder.glob("smoke/metrics.jsonl"))
