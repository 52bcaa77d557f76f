"""A short round of every fuzz target, the same cases each time, and a test of each limit.

`python -m tests.fuzz` runs more cases.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from megatron_llama.config import ConfigError, Problem
from megatron_llama.system.errors import UserError
from tests.fuzz import runner
from tests.fuzz.runner import Target, fuzz
from tests.fuzz.targets import TARGETS

PLANNED = {"NeMo config", "config.json", "adapter_config.json", "idx", "dataset manifest", "recipe", "command line"}
"""Their cases take a quarter of a second: a config is composed for each."""


@pytest.mark.slow  # the same few cases each time; CI has a minute of others too
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_an_answer_or_one_message(target: Target, tmp_path: Path) -> None:
    outcome = fuzz(target, tmp_path, number=1, cases=3 if target.name in PLANNED else 8)
    assert outcome.finding is None, f"{outcome.finding}\nits files are in {tmp_path}/kept"
    assert outcome.cases >= 3


def _target(read: Callable[[Path], object]) -> Target:
    return Target("made up", st.binary(min_size=1, max_size=40).map(lambda text: {"a": text}), read)


def _refuse(case: Path) -> None:
    if case.joinpath("a").read_bytes()[0] % 2:
        raise UserError("no")
    raise ConfigError([Problem("a", 1, "no", "yes")])


def _loop(case: Path) -> None:
    while True:
        pass


def _use_most_of_the_time(case: Path) -> None:
    """Each case has the whole time, after any time of earlier cases."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left > runner.SILENCE_SECONDS / 2
    signal.setitimer(signal.ITIMER_REAL, runner.SILENCE_SECONDS / 4)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (_refuse, None),
        (_use_most_of_the_time, None),
        (lambda case: {}["b"], "KeyError: 'b'"),
        (lambda case: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (lambda case: os.abort(), "SIGABRT"),
        (lambda case: bytearray(2 << 30), "MemoryError"),
        (_loop, "OutOfTime: more than"),
        (lambda case: time.sleep(1000), "no answer"),
    ],
    ids=["answers", "slow round", "exception", "crash", "abort", "memory", "time", "hang"],
)
def test_what_is_a_finding(
    read: Callable[[Path], object], words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CASE_SECONDS", 0.2)
    if words == "no answer":
        monkeypatch.setattr(runner, "SILENCE_SECONDS", 1.5)
    outcome = fuzz(_target(read), tmp_path, 1, 3)
    if words is None:
        assert outcome.finding is None and outcome.cases == 3
    else:
        assert outcome.finding is not None and words in outcome.finding
        assert (tmp_path / "kept" / "a").exists(), "the input is kept"
