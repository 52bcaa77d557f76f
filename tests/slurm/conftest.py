"""The SLURM cluster of cluster.py for the time of these tests; they are skipped, with the reason, where it can't be set
up. $SLURM_REPORT names a file for the results."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SETUP, Lab, Report


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """Takes rows; written out at the end where a file is named for it."""
    rows = ["| what | seen |", "|---|---|"]
    yield lambda label, value: rows.append(f"| {label} | {value} |")
    if os.environ.get("SLURM_REPORT") and rows[2:]:
        Path(os.environ["SLURM_REPORT"]).write_text("\n".join(rows) + "\n")


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
