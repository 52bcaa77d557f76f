"""train.py with device=cuda runs to its end on the runtime, and does the recorded amount of work in a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda import rows
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", rows.ROWS)
def test_three_steps(runtime: Runtime, tmp_path: Path, name: str) -> None:
    run = rows.start(runtime, name, tmp_path).check()
    actual = rows.measured(run)
    assert len(actual) == rows.ROWS[name][0]
    goldens = rows.goldens()
    if goldens.get("torch") != torch.__version__:
        pytest.skip(f"no counts of torch {torch.__version__}: python -m tests.cuda.rows records them")
    assert actual == goldens["rows"][name], "python -m tests.cuda.rows records intended changes"
