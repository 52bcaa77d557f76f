"""Logging on a full disk: metrics.jsonl fails the run, TensorBoard does not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_llama.system.errors import MachineError
from megatron_llama.train import sinks
from megatron_llama.train.metrics_file import MetricsFile
from megatron_llama.train.sinks import TensorBoardFile
from tests.train.full_disk import on_a_full_disk


def test_metrics_that_can_not_be_written_are_the_end_and_closing_adds_nothing(tmp_path: Path) -> None:
    def work() -> None:
        file = MetricsFile(tmp_path / "metrics.jsonl", 0)
        with pytest.raises(MachineError, match=r"metrics\.jsonl: File too large\.\nthe same command resumes"):
            for step in range(100):
                file.append({"step": step})
        file.close()

    assert on_a_full_disk(work, tmp_path / "errors", 200) == ""
    assert (tmp_path / "metrics.jsonl").stat().st_size == 200


def test_tensorboard_stops_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FLUSH_SECONDS", 0.01)

    def work() -> None:
        board = TensorBoardFile(tmp_path / "tensorboard", 0)
        deadline = time.monotonic() + 60
        while board.writes and time.monotonic() < deadline:
            board.append({"step": 1, "loss": 2.0})
        board.append({"step": 2, "loss": 2.0})
        board.close()

    output = on_a_full_disk(work, tmp_path / "errors", 1000)
    assert output == f"{tmp_path}/tensorboard: stopped writing: File too large\n"
