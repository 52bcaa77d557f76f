"""Transformer Engine's attention is used where it is installed, with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import transformer_engine
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow


def test_results(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.start([["-m", transformer_engine.__name__]], tmp_path, 1, {}).check()
    assert run.output.endswith("done\n")
