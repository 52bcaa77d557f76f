"""NCCL of the runtime exchanges the right numbers between processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import collectives
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow
PROGRAM = collectives.__name__


def test_results(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(PROGRAM, tmp_path, ranks=2).check()
    assert run.output.count("done") == 2
    for log in run.logs:
        ends = [call for call in log.named("NCCL") if call.fields["name"] == "finalized"]
        assert ends and ends[-1].fields["all_ranks"] == "1"


def test_different_collectives_are_reported(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(PROGRAM, tmp_path, ranks=2, **{collectives.MISMATCH: "1"})
    assert run.status
    assert "rank 0 calls all_reduce of 4 numbers of type 7, sum; rank 1 calls broadcast of 4" in run.output
