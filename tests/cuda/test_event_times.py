"""Times between events follow the clock that a test sets: the work times of ranks, from which slow ranks are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import event_times
from tests.cuda.harness import Runtime

pytestmark = pytest.mark.slow


def test_times_of_a_set_clock(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(event_times.__name__, tmp_path, ranks=2).check()
    assert run.output.count("done") == 2


def test_real_times_differ(runtime: Runtime, tmp_path: Path) -> None:
    run = runtime.ranks(event_times.__name__, tmp_path, ranks=2, **{event_times.WRONG: "1"})
    assert run.status and "AssertionError" in run.output
