"""A starter in a process of its own: its ranks' ends, its last words and its exit status are looked at from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  once, before any fork

from tests.processes import MakeStarter, Starter


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[MakeStarter]:
    """Makes starters, and ends those that a failed test leaves."""
    made: list[Starter] = []

    def make(function: Callable[[], int]) -> Starter:
        made.append(Starter(function, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.kill()
