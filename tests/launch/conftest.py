"""Fixture for launchers in a separate process: tests check their ranks, stderr and exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  once, before any fork

from tests.processes import Launcher, MakeLauncher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[MakeLauncher]:
    """Return a factory of launchers, which waits for an exit status if it gets one; kill them at the end."""
    made: list[Launcher] = []

    def make(function: Callable[[], int], status: int | None = None) -> Launcher:
        made.append(job := Launcher(function, tmp_path))
        assert status is None or job.wait() == status, job.errors
        return job

    yield make
    for one in made:
        one.kill()
