"""The picture of the loss, with or without validation, and its smoothing."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from megatron_llama.plan import parameters
from megatron_llama.train.loss_curve import SMOOTHING, describe, draw, draw_run, moving_average
from tests.paths import ROOT
from tests.train.steps import log_steps, plan_of

HEAD = struct.Struct(">8s4s4sII")


def test_a_run_gets_a_picture(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    log_steps(plan)
    picture = draw_run(plan)
    assert picture is not None and picture == tmp_path / "loss.png"
    signature, _, _, width, height = HEAD.unpack(picture.read_bytes()[: HEAD.size])
    assert signature == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 600


def test_matplotlib_writes_no_lines_without_a_home(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": "/proc/none", "MPLCONFIGDIR": "", "XDG_CONFIG_HOME": ""}
    command = [sys.executable, "-c", "from megatron_llama.system.output import import_pyplot; import_pyplot()"]
    assert subprocess.run(command, env=environment, capture_output=True, check=True, cwd=ROOT).stderr == b""


@pytest.mark.parametrize("last", [1, 2])
def test_very_short_runs(tmp_path: Path, last: int) -> None:
    log_steps(plan_of(tmp_path), last=last)
    assert draw_run(plan_of(tmp_path)) is not None


CURVES: dict[str, list[float]] = {
    "one step": [8.0],
    "three steps": [8.0, 7.5, 7.1],
    "falling": [3 + 6 * math.exp(-step / 15) for step in range(60)],
    "rising": [3 + step / 20 for step in range(60)],
    "resumed": [9.0] * 40 + [3.0] * 3,
}


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("name", CURVES)
def test_nothing_is_written_where_curves_are(
    name: str, validated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    losses = CURVES[name]
    rows = [
        {"step": step, "consumed_tokens": 64 * step, "reduced_train_loss": loss, "lr": 1e-3}
        for step, loss in enumerate(losses, start=1)
    ]
    if validated:
        rows[-1]["val_loss"] = losses[-1] - 0.5
    long = "405.9 B parameters  |  tp8·pp16·dp128 zero1  |  fp32_ZeroOptMaster on 16384 × neuron  |  redpajama"
    draw(rows, tmp_path / "loss.png", r"405b $\frac$", long)
    figure = pyplot.gcf()
    try:
        above, below = figure.axes
        frame, shown = above.get_window_extent(), [*above.texts, above.get_legend()]
        value = next(text for text in above.texts if text.get_text().startswith(("training\n", "validation\n")))
        last = losses[-1] - 0.5 if validated else np.mean(losses[-max(1, round(SMOOTHING * len(losses))) :])
        assert value.get_text() == f"{'validation' if validated else 'training'}\n{last:.3f}"
        for index, one in enumerate(shown):
            place = one.get_window_extent()
            assert not place.overlaps(frame)
            assert figure.bbox.containsx(place.x0) and figure.bbox.containsx(place.x1), "it is cut off"
            assert figure.bbox.containsy(place.y0) and figure.bbox.containsy(place.y1), "it is cut off"
            assert not any(place.overlaps(other.get_window_extent()) for other in shown[:index])
        assert all(tick == round(tick) for tick in below.get_xticks())
        drawn = [line for axes in figure.axes for line in axes.lines if line.get_label() != "validation loss"]
        assert all(len(line.get_xdata()) > 1 or line.get_marker() == "o" or line.get_alpha() for line in drawn)
    finally:
        monkeypatch.undo()
        pyplot.close(figure)


def test_no_steps_no_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert draw_run(plan_of(tmp_path)) is None


def test_the_subtitle_names_model_layout_and_device(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    line = describe(plan)
    for word in (f"{parameters(plan.model) / 1e6:.1f} M parameters", "tp2", "fp32", "2 × cpu", "mock"):
        assert word in line


def test_straight_lines_and_levels_are_kept() -> None:
    steps = np.arange(1.0, 31.0)
    line = 3.0 - 0.1 * steps
    middles = moving_average(steps, 5)
    assert middles.tolist() == list(range(3, 29))
    assert moving_average(line, 5) == pytest.approx(3.0 - 0.1 * middles), "a mean that only looks back would lag"
    wave = [1.0 + (-1) ** step for step in range(100)]
    assert moving_average(wave, 20) == pytest.approx(1.0)


def test_only_whole_windows_count() -> None:
    assert moving_average([], 1).shape == (0,)
    assert moving_average([2.0, 4.0], 1).tolist() == [2.0, 4.0]
    assert moving_average([2.0, 4.0], 2).tolist() == [3.0]
    assert moving_average(np.ones((3, 10)), 4).shape == (3, 7)


def test_non_finite_values_are_left_out() -> None:
    smooth = moving_average([1.0, math.nan, 3.0, math.inf, math.nan, 5.0], 2)
    assert smooth[[0, 1, 2, 4]].tolist() == [1.0, 3.0, 3.0, 5.0]
    assert math.isnan(smooth[3]), "no finite value in the window"
