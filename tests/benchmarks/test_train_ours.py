"""The benchmark's program of this project."""

from __future__ import annotations

import pickle
import runpy
import sys
from typing import Any

import pytest

from benchmarks.harness.task import Layout, TrainingTask
from benchmarks.peers import train_ours
from megatron_llama import cli


def test_spawned_ranks_can_import_their_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TrainingTask("llama_2m", {}, 1, 8, 1, 1, "fp32", "eager", Layout(), "cuda", 1, {}, 0)
    entries: list[Any] = []
    monkeypatch.setattr(cli, "main", lambda overrides, entry: entries.append(entry) or 0)
    monkeypatch.setattr(sys, "argv", ["train_ours.py", task.to_json()])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(train_ours.__file__), run_name="__main__")
    assert ended.value.code == 0
    # A rank of CUDA is a new process, in which __main__ is another module.
    assert entries[0].func is train_ours.train_rank
    assert pickle.loads(pickle.dumps(entries[0])).args[0] == task
