"""train.py with device=cuda runs to its end on the runtime, and does the recorded amount of work in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda import rows
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow
OUT_OF_MEMORY_BYTES = 16 << 20  # llama_2m needs more than 28 MiB


@pytest.mark.parametrize("name", rows.ROWS)
def test_three_steps(runtime: Runtime, tmp_path: Path, name: str) -> None:
    run = rows.start(runtime, name, tmp_path).check()
    actual = rows.measured(run)
    assert len(actual) == rows.ROWS[name][0]
    goldens = rows.goldens()
    if goldens["torch"] != torch.__version__:
        pytest.skip(f"counts are known for torch {goldens['torch']}: python -m tests.cuda.rows records them again")
    assert actual == goldens["rows"][name], "python -m tests.cuda.rows records intended changes"


def test_checkpoint_and_resume(runtime: Runtime, tmp_path: Path) -> None:
    first = runtime.train(tmp_path, "trainer.steps=2", "checkpoint.save_last=true", "trainer.zero=3").check()
    assert list(first.logs[0].steps) == [1, 2]
    resumed = runtime.train(tmp_path, "trainer.steps=3", "trainer.zero=3").check()
    assert list(resumed.logs[0].steps) == [3]


def test_out_of_memory(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.train(tmp_path, "trainer.steps=1", HOST_CUDA_MEMORY_BYTES=str(OUT_OF_MEMORY_BYTES))
    assert run.status not in (0, 2)
    assert "OutOfMemoryError" in run.output or "out of memory" in run.output
    assert run.logs[0].named("OUT_OF_MEMORY")
