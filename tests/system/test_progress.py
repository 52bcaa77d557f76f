"""Progress bars and times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_llama.system import progress as progress_module
from megatron_llama.system.progress import ProgressBar, duration
from megatron_llama.tools.inference import evaluate_cli, evaluation
from megatron_llama.topology import Grid

Captured = pytest.CaptureFixture[str]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_without_a_terminal_a_line_replaces_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    clock = Clock(monkeypatch)
    with ProgressBar("evaluate", "windows", 1000) as bar:
        for done in range(10, 110, 10):
            clock.now += 10
            bar.show(done)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate: 30 of 1,000 windows, 1 a second, 16:10 left",
        "evaluate: 60 of 1,000 windows, 1 a second, 15:40 left",
        "evaluate: 90 of 1,000 windows, 1 a second, 15:10 left",
    ]


def test_evaluation_omits_its_first_batch_from_the_rate(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    clock = Clock(monkeypatch)
    with evaluate_cli._shown_progress() as progress:
        clock.now += 500  # a slow first batch
        progress(10, 1000)
        for done in (40, 70):
            clock.now += 30
            progress(done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate: 40 of 1,000 done, 1 a second, 16:00 left",
        "evaluate: 70 of 1,000 done, 1 a second, 15:30 left",
    ]


def test_a_small_vocabulary_has_several_batches() -> None:
    plan = SimpleNamespace(grid=Grid({"tp": 1, "cp": 1, "dp": 1, "pp": 1}), padded_vocab_size=384)
    generator: Any = SimpleNamespace(plan=plan, loss=lambda *_: 1.0)
    window = np.zeros(257, np.uint16), np.ones(257, np.uint8)
    calls = list[tuple[int, int]]()
    evaluation.perplexity(generator, [window] * 200, lambda done, of: calls.append((done, of)))
    assert len(calls) > 5 and calls[-1] == (200, 200)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3 * 3600 + 7 * 60, "3:07:00"), (2 * 86400 + 15000, "2d 04:10"), (-3, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
