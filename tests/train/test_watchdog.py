"""When a rank counts as hanging, and which phases have no time limit."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

import pytest

from megatron_llama.parallel.compiling import may_compile
from megatron_llama.plan import resolve
from megatron_llama.train.watchdog import Watchdog
from tests.config.helpers import make


def test_a_patient_phase_takes_any_time_and_the_next_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    monkeypatch.setattr(Watchdog, "_give_up", lambda self: given_up.append(self._phase))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    with Watchdog(0.2, 0, 1, tmp_path) as watchdog:
        watchdog.beat("compiling", patient=True)
        time.sleep(0.6)
        assert not given_up
        watchdog.beat("hanging")
        deadline = time.monotonic() + 30
        while not given_up and time.monotonic() < deadline:
            time.sleep(0.02)
    assert set(given_up) == {"hanging"}


def test_new_graphs_come_in_the_first_steps_and_the_first_validations() -> None:
    plan = resolve(make(**{"trainer.val_every_steps": 5}), 1)
    assert [step for step in range(3, 40) if may_compile(plan, step, 3)] == [3, 4, 5, 10]
