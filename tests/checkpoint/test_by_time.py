"""checkpoint.every_minutes: checkpoints by rank 0's clock, and which of them are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_llama.checkpoint import checkpointer as module
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.folder import saved_steps
from megatron_llama.plan import format_plan
from tests.checkpoint.runner import make_plan, run

LAST = "trainer.steps=7"


def ten_minutes_per_reading(checkpointer: Checkpointer) -> None:
    """Replace the clock: rank 0's advances by 10 minutes at each reading, the others' stand."""
    now = [0.0]

    def clock() -> float:
        now[0] += 600.0 * (checkpointer.topology.rank == 0)
        return now[0]

    setattr(module, "monotonic", clock)  # noqa: B010  in the process of a rank
    checkpointer._saved_at = 0.0


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], [7, 6]),
        (["checkpoint.keep=3"], [7, 6, 4]),
        (["checkpoint.keep_every=2"], [7, 6, 4, 2]),
        (["checkpoint.every_minutes=15"], [7, 6, 4, 2]),
        (["checkpoint.every_minutes=0"], [7]),
        (["checkpoint.every_steps=5"], [7, 5]),
        (["checkpoint=none"], []),
    ],
    ids=["default", "keep", "keep_every", "given", "off", "by steps", "none"],
)
def test_saved_steps(tmp_path: Path, overrides: list[str], steps: list[int]) -> None:
    run(2, tmp_path, LAST, *overrides, until=7, tamper=ten_minutes_per_reading)
    assert saved_steps(tmp_path / "checkpoints") == steps


def test_the_default_deletes_only_checkpoints_of_the_default(tmp_path: Path) -> None:
    run(1, tmp_path, "checkpoint.every_steps=1", "trainer.steps=3", until=3)
    run(1, tmp_path, "trainer.steps=9", until=9, tamper=ten_minutes_per_reading)
    assert saved_steps(tmp_path / "checkpoints") == [9, 7, 3, 2, 1]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "every 15 minutes, at the end, when stopped by a signal the newest 2 are kept"),
        (["checkpoint.every_minutes=1"], "every 1 minute, at the end, when stopped by a signal all are kept"),
        (
            ["checkpoint.every_steps=5", "checkpoint.keep=1"],
            "every 5 steps, at the end, when stopped by a signal the newest is kept",
        ),
        (["checkpoint.every_minutes=0"], "at the end, when stopped by a signal"),
        (["checkpoint=none"], "when stopped by a signal"),
    ],
)
def test_the_plan_names_folder_and_policy(tmp_path: Path, overrides: list[str], line: str) -> None:
    text = format_plan(make_plan(1, tmp_path, *overrides))
    assert max(map(len, text.replace(str(tmp_path), "runs/x").splitlines())) <= 79
    words = " ".join(text.split())
    words = words.replace("· ", "")  # a line break replaces the dot
    assert f" checkpoints {line} " in words and f" run folder {tmp_path} " in words
