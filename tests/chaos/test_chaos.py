"""The fault campaign: its library, its file damage, and its detection of each kind of failure."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.chaos.attempts import Life
from tests.chaos.campaign import Broken, Campaign, Undisturbed
from tests.chaos.faults import Fault
from tests.chaos.interposer import build
from tests.paths import ROOT
from tests.processes import run_command

LOSSES = [(1, 4.0), (2, 3.5), (3, 3.25)]
OBEDIENT = """
import errno, sys, time
from pathlib import Path
from tests.chaos.interposer import Interposer
interposer, folder = Interposer.loaded(), Path(sys.argv[1])
before = time.time()
interposer.clock_jumps(3600)
assert 3599 < time.time() - before < 3700
interposer.disk_fails(folder / "run", errno.ENOSPC, 2)
(folder / "run").mkdir()
results = []
for name in ("run/a", "other", "run/b"):
    try:
        (folder / name).write_text("text")
        results.append(name)
    except OSError as error:
        results.append(error.errno)
interposer.heal()
(folder / "run/c").write_text("text")
assert abs(time.time() - before) < 60
assert results == ["run/a", "other", errno.ENOSPC], results  # open and write count separately
assert interposer.failed_writes == 1, interposer.failed_writes
"""


def test_library_breaks_disks_and_clocks(tmp_path: Path) -> None:
    variables = build(tmp_path)
    if isinstance(variables, str):
        pytest.skip(variables)
    words = (sys.executable, "-c", OBEDIENT, str(tmp_path))
    done = run_command(*words, cwd=ROOT, timeout=100, PYTHONPATH=str(ROOT), **variables)
    assert done.returncode == 0, done.stderr


@dataclass
class RecordedAttempt:
    status: int = 0
    output: str = ""
    left: list[int] = field(default_factory=list)

    def gone(self, _: float) -> bool:
        return not self.left

    def processes(self) -> list[int]:
        return self.left


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """Return a campaign with one undisturbed run of three steps and one tensor."""
    made = object.__new__(Campaign)
    made.undisturbed = {"single": Undisturbed(LOSSES, {"weight": torch.ones(2)})}
    return made


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Return a run that has trained and saved step 2."""
    recorded_life = Life(tmp_path / "run", "single", tmp_path / "tokens")
    write_metrics(recorded_life, LOSSES[:2])
    (recorded_life.folder / "checkpoints/step_00000002").mkdir(parents=True)
    return recorded_life


def write_metrics(life: Life, losses: list[tuple[int, float]]) -> None:
    life.folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "reduced_train_loss": loss}) + "\n" for step, loss in losses]
    (life.folder / "metrics.jsonl").write_text("".join(lines))


FAULT = Fault("kill", frozenset({0, 1, 75}), messages=("rank 0 was killed",), saved=True)


@pytest.mark.parametrize(
    ("recorded", "losses", "saved", "rule"),
    [
        (RecordedAttempt(3), LOSSES[:2], 0, "status 3"),
        (RecordedAttempt(0, left=[7]), LOSSES[:2], 0, "still run"),
        (RecordedAttempt(0, "Traceback (most recent call last)"), LOSSES[:2], 0, "1 tracebacks"),
        (RecordedAttempt(1, "Segmentation fault"), LOSSES[:2], 0, "without the messages"),
        (RecordedAttempt(0), [(1, 4.0), (2, 3.5000000000000004)], 0, "not the undisturbed run's"),
        (RecordedAttempt(0, "step 1/24  loss"), LOSSES[:2], 2, "resumed at step 1, and step 2 was saved"),
        (RecordedAttempt(75), LOSSES, 0, "of 3 steps 2 are saved"),
        (RecordedAttempt(75, "step 1/24  loss\nstep 2/24  loss\n"), LOSSES[:2], 0, ""),
        (RecordedAttempt(1, "step 1/24  loss\nrank 0 was killed"), LOSSES[:2], 0, ""),
    ],
)
def test_each_failure_is_detected(
    campaign: Campaign, life: Life, recorded: RecordedAttempt, losses: list[tuple[int, float]], saved: int, rule: str
) -> None:
    write_metrics(life, losses)
    with pytest.raises(Broken, match=rule) if rule else nullcontext():
        campaign._judge(life, recorded, FAULT, range(saved, saved + 1))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.slow
def test_short_campaign(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", str(tmp_path / "chaos"), "--faults", "18", "--seed", "3"]
    done = run_command(*command, "--layouts", "single,tp2", timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("status") >= 18 and "BROKEN" not in done.stdout
