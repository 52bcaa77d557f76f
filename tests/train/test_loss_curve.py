"""The picture of the loss is drawn, with or without validation."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from megatron_llama.plan import parameters
from megatron_llama.train.loss_curve import describe, draw_run
from tests.train.steps import log_steps, plan_of

HEAD = struct.Struct(">8s4s4sII")


def test_a_run_gets_a_picture(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    log_steps(plan)
    picture = draw_run(plan)
    assert picture is not None and picture == tmp_path / "loss.png"
    signature, _, _, width, height = HEAD.unpack(picture.read_bytes()[: HEAD.size])
    assert signature == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 600


@pytest.mark.parametrize("last", [1, 2])
def test_very_short_runs(tmp_path: Path, last: int) -> None:
    log_steps(plan_of(tmp_path), last=last)
    assert draw_run(plan_of(tmp_path)) is not None


def test_no_steps_no_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert draw_run(plan_of(tmp_path)) is None


def test_the_subtitle_names_model_layout_and_device(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    line = describe(plan)
    for word in (f"{parameters(plan.model) / 1e6:.1f} M parameters", "tp2", "fp32", "2 × cpu", "mock"):
        assert word in line
