"""Modules that run in processes on the runtime, and raise if a result is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import collectives, event_times, fused_attention
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow


def test_results_of_collectives(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(collectives.__name__, tmp_path, ranks=2).check()
    assert run.output.count("done") == 2
    for log in run.logs:
        ends = [call for call in log.named("NCCL") if call.fields["name"] == "finalized"]
        assert ends and ends[-1].fields["all_ranks"] == "1"


def test_different_collectives_are_reported(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(collectives.__name__, tmp_path, ranks=2, **{collectives.MISMATCH: "1"})
    assert run.status
    assert "rank 0 calls all_reduce of 4 numbers of type 7, sum; rank 1 calls broadcast of 4" in run.output


def test_times_of_a_set_clock(runtime: Runtime, tmp_path: Path) -> None:
    """Times between events follow the clock: the work times of ranks, from which slow ranks are named."""
    run = runtime.ranks(event_times.__name__, tmp_path, ranks=2).check()
    assert run.output.count("done") == 2


def test_real_times_differ(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(event_times.__name__, tmp_path, ranks=2, **{event_times.WRONG: "1"})
    assert run.status and "AssertionError" in run.output


@pytest.mark.parametrize("package", fused_attention.PACKAGES)
def test_fused_attention_is_used_where_it_is_installed(runtime: Runtime, tmp_path: Path, package: str) -> None:
    run = runtime.start([["-m", fused_attention.__name__, package]], tmp_path, 1, {}).check()
    assert run.output.endswith("done\n")
