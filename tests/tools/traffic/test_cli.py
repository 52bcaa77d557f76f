"""Output and exit status of ``scripts/traffic.py``."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import megatron_llama.tools.traffic.count  # noqa: F401  imported once, before the forks
from megatron_llama.tools.forecast.traffic import Amount, TrafficKey
from megatron_llama.tools.traffic import cli as traffic
from tests.cpu import children_cpu_seconds
from tests.oracle import SHAPE
from tests.paths import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "traffic.py"), *arguments], capture_output=True, text=True, timeout=200
    )


def run_forked(path: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run in a fork of this process, which has imported the tool; return status and output."""

    def child() -> None:
        with path.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        status = traffic.main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join(200)
    assert worker.exitcode is not None, "not finished within 200 s"
    return worker.exitcode, path.read_text()


def test_help_is_quick() -> None:
    with children_cpu_seconds(2.0):
        assert "--measure" in run("--help").stdout


def test_512_ranks_on_a_laptop() -> None:
    batch = ["trainer.global_batch_size=8", "data.seq_length=256"]
    done = run("model=llama70b", "trainer.tp=8", "trainer.pp=16", "trainer.dp=4", *batch)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^rank (.*)$", done.stdout, re.M) == ["0-31", "32-479", "480-511"]
    # The first of 16 stages sends activations onwards: 2 micro batches of 256 / 8 tokens of 8192 values in bf16.
    assert re.search(r"pp +send +2 +2 +1,048,576 +1,048,576\n", done.stdout)


def test_config_errors_are_reported() -> None:
    done = run("trainer.tp=3", "optim.lrr=1")
    assert done.returncode == 2 and done.stdout == ""
    assert "optim.lrr" in done.stderr and "trainer.tp = 3" in done.stderr


def test_lora_operations_are_listed() -> None:
    done = run("+experiment=llama2_70b_lora_gaudi", "trainer.tp=2", "trainer.dp=4")
    assert done.returncode == 0 and "LoRA of qkv_proj" in done.stdout
    assert "norm and head: weights" in done.stdout and "norm and head: gradients" not in done.stdout


def test_measure_matches_the_prediction(tmp_path: Path) -> None:
    status, output = run_forked(tmp_path / "out", ["--measure", *SHAPE, "trainer.tp=2", "trainer.global_batch_size=4"])
    assert status == 0, output
    assert output.endswith("every byte and every call as predicted\n")
    # 2 micro batches of 2: 2·(6·4 + 2) gathers of 2·16·32 fp32 values, and of 3 per token for the loss.
    row = re.search(r"tp +all_gather +2 +54 +(\S+) +(\S+) +(\S+)\n", output)
    assert row and row.groups() == (f"{52 * 2 * 16 * 32 * 4 + 2 * 2 * 3 * 32 * 4:,}",) * 3
    assert "rank 0-1\n" in output


def test_a_difference_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = TrafficKey("dp", "all_reduce", 2)
    monkeypatch.setattr("megatron_llama.tools.forecast.traffic.totals", lambda operations: {line: Amount(1, 12)})
    status, output = run_forked(tmp_path / "out", ["--measure", *SHAPE, "trainer.dp=2", "trainer.global_batch_size=4"])
    assert status == 1
    assert output.endswith("NOT as predicted\n")
    assert re.search(r"dp +all_reduce +2 +1 +12 +0 +0 +DIFFERS, calls \[0, 0\]\n", output)
