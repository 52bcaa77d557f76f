"""A program of the training benchmark frees its cached memory on the device after a turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.harness import worker


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["empty", "step", "step", "empty"]), ("cpu", ["step"] * 2)])
def test_cached_memory_is_freed_after_a_turn(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty"))
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 1)

    def step(number: int) -> float:
        calls.append("step")
        return 2.0

    task, trainer = SimpleNamespace(device=device), SimpleNamespace(step=step)
    result = worker._train(cast(Any, task), cast(Any, trainer), worker.Ranks(), 2, 2)
    assert calls == expected
    assert result["loss"] == 2.0 and len(result["step_seconds"]) == 2
