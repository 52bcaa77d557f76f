"""Output and exit status of ``scripts/traffic.py``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import megatron_llama.tools.recorder  # noqa: F401  imported once, before the forks
from megatron_llama.tools.forecast.traffic import Amount, TrafficKey
from megatron_llama.tools.traffic.cli import main
from tests.golden import GoldenFiles
from tests.oracle import SHAPE
from tests.processes import run_forked


def measure(folder: Path, *layout: str) -> tuple[int, str]:
    """Return the exit status and the output of ``--measure`` in a fork."""
    arguments, output = ["--measure", *SHAPE, *layout, "trainer.global_batch_size=4"], folder / "output"
    status = run_forked(partial(_exit_with_main, arguments), output, output, 200)
    return status, output.read_text()


def _exit_with_main(arguments: list[str]) -> None:
    raise SystemExit(main(arguments))


def test_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps send the predicted bytes; a wrong prediction gives status 1."""
    status, output = measure(tmp_path, "trainer.tp=2")
    assert status == 0, output
    GoldenFiles.check("tools/traffic/measured.txt", output[output.index("\nrank ") :])
    wrong = {TrafficKey("dp", "all_reduce", 2): Amount(1, 12)}
    monkeypatch.setattr("megatron_llama.tools.forecast.traffic.totals", lambda operations: wrong)
    status, output = measure(tmp_path, "trainer.dp=2")
    assert status == 1
    GoldenFiles.check("tools/traffic/differs.txt", output[output.index("\nrank ") :])
