"""The SLURM cluster of cluster.py for these tests, which are skipped, with the reason, where it can't be set up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import SETUP, Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("setting up virtual nodes needs root")
    if not SETUP.exists():
        pytest.skip(f"there is no {SETUP} (SLURM_LAB_SETUP can name another)")
    made = Lab(tmp_path_factory.mktemp("checkout"))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("told to end"))  # a limit of time must not leave it
    try:
        made.set_up()
        yield made
    finally:
        made.stop()
        signal.signal(signal.SIGTERM, before)
