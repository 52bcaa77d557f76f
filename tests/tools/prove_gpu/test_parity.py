"""The recorded losses are the CPU's, and a wrong value is found."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_llama.config import load_config
from megatron_llama.plan import resolve
from megatron_llama.system.files import read_json
from megatron_llama.tools.prove_gpu import parity
from megatron_llama.tools.prove_gpu.checks import TABLE, Part, Row, Status, read_rows, run_parts
from megatron_llama.tools.prove_gpu.session import CheckFailed, Clock, Process, Session, TrainingRun
from tests import warm  # noqa: F401
from tests.paths import CONF
from tests.processes import run_train_py

RECORDED = read_json(parity.ORACLE)["models"]
FP32 = TABLE["tolerances"]["fp32"]
ROWS = read_rows("parity")


def forked(folder: Path) -> Session:
    """A session whose processes are forks of this one, which has imported torch."""

    def start(words: Sequence[str], limit: float) -> Process:
        target = Path(next(word for word in words if word.startswith("run.dir=")).partition("=")[2])
        target.parent.mkdir(parents=True, exist_ok=True)
        return Process(*run_train_py(target, *words[2:], timeout=limit))

    facts = {"count": 1, "is_accelerator": False}
    return Session(folder / "results", folder / "work", Clock(600), "cpu", facts, start=start)


def test_recorded_losses(tmp_path: Path) -> None:
    """Training the first model again has the recorded losses, on any CPU."""
    session = forked(tmp_path)
    values = parity.record(["plain"], lambda row: session.train(row.name, *parity.row_settings(row)))
    outcome = parity.compare(values["plain"], RECORDED["plain"], (1e-5, 1e-4))
    assert outcome.values["error"] <= 1e-5
    assert values["plain"]["reduced_train_loss"][-1] < values["plain"]["reduced_train_loss"][0]
    assert (tmp_path / "results/plain/metrics.jsonl").exists() and (tmp_path / "results/plain/plan.txt").exists()


def test_all_models_are_recorded_and_differ() -> None:
    assert RECORDED.keys() == TABLE["models"].keys()
    first = {tuple(values["reduced_train_loss"]) for values in RECORDED.values()}
    assert len(first) == len(RECORDED)
    assert all(len(values[name]) == parity.STEPS for values in RECORDED.values() for name in parity.RECORDED)


@pytest.mark.parametrize("metric", parity.RECORDED)
def test_a_wrong_recorded_value_fails(metric: str) -> None:
    wrong = copy.deepcopy(RECORDED["plain"])
    wrong[metric][3] *= 1.01
    with pytest.raises(CheckFailed, match=f"{metric} of step 4 is"):
        parity.compare(RECORDED["plain"], wrong, FP32)
    assert parity.compare(RECORDED["plain"], RECORDED["plain"], FP32).values["error"] == 0


def test_a_wrong_oracle_makes_the_part_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part compares the losses of its runs with the file."""

    def train(self: Session, name: str, *overrides: str, ranks: int = 1, **_: str) -> TrainingRun:
        model = next(row.model for row in ROWS if [*overrides] == parity.row_settings(row))
        steps = zip(*RECORDED[model].values(), strict=True)
        return TrainingRun(tmp_path, "", [dict(zip(parity.RECORDED, step, strict=True)) for step in steps])

    monkeypatch.setattr(Session, "train", train)
    part = Part("parity", "", 1.0, ROWS, parity.check)
    (result,) = run_parts([part], forked(tmp_path))
    assert result.status == Status.PASSED and len(result.results) == sum(row.ranks == 1 for row in ROWS)
    wrong = copy.deepcopy(read_json(parity.ORACLE))
    wrong["models"]["window"]["reduced_train_loss"][-1] *= 1.001
    monkeypatch.setattr(parity, "read_json", lambda path: wrong)
    (result,) = run_parts([part], forked(tmp_path))
    assert [failed.name for failed in result.named(Status.FAILED)] == ["window"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_have_valid_settings(row: Row) -> None:
    """Each row is a plan of its number of ranks on a GPU."""
    config = load_config([*parity.row_settings(row), "device=cuda"], CONF)
    plan = resolve(config, row.ranks)
    assert plan.world_size == row.ranks
