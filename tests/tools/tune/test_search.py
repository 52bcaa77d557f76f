"""Search with a forecast that trials correct, against an exhaustive search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_llama.cli import parse_overrides
from megatron_llama.config import ConfigError
from megatron_llama.config.settings_table import get
from megatron_llama.tools.cluster_settings import ClusterConfig
from megatron_llama.tools.common import NO_FILES
from megatron_llama.tools.tune.candidates import TUNED, Candidate, Tuner
from megatron_llama.tools.tune.search import TrialHistory, search
from megatron_llama.tools.tune.target import find_target
from megatron_llama.tools.tune.trial import DONE, MEMORY, TRIALS_FILE, Journal, TrialOutcome
from megatron_llama.topology import Grid
from tests.paths import CONF
from tests.tools.tune.searches import SimulatedMachine, exhaustive_best, search_on, space_of, tuned

FACTORS = {
    "as forecast": {},
    "tensor parallelism is slow": {"tp=2": 3.0},
    "one process is slow": {"dp=1": 1.5, "pp=2": 0.4},
    "small micro batches are slow": {
        "micro_batch_size=1": 2.0,
        "micro_batch_size=2": 1.4,
        "recompute=elementwise": 0.8,
    },
    "sharding is slow": {"zero=3": 1.6, "zero=2": 1.3, "zero=1": 1.1, "tp=2": 0.8},
}


@pytest.mark.parametrize(
    ("factors", "memory"),
    [*((factors, 1.35) for factors in FACTORS.values()), (FACTORS["one process is slow"], 1.0)],
    ids=[*FACTORS, "memory as forecast"],
)
def test_search_is_within_5_percent_of_the_best(factors: dict[str, float], memory: float, tmp_path: Path) -> None:
    tuner = tuned(memory=1100 << 20)
    machine = SimulatedMachine(tuner.target, factors, memory)
    result = search_on(machine, tuner, 11, tmp_path)
    assert result.best is not None and result.history.done
    assert machine.fits(result.best) and result.history.timed_count <= 11 < result.space.total / 3
    assert machine.seconds(result.best) <= 1.05 * exhaustive_best(machine, tuner)


def test_failed_trials_correct_the_memory_forecast(tmp_path: Path) -> None:
    tuner = tuned(memory=900 << 20)
    machine = SimulatedMachine(tuner.target, {}, 1.5)
    result = search_on(machine, tuner, 10, tmp_path)

    def needs(each: Candidate) -> float:
        return each.grown_peak(1.5)

    failed = [each for each in machine.tried if not machine.fits(each)]
    assert failed, "the forecast is too low here"
    for number, each in enumerate(machine.tried):
        before = [other for other in machine.tried[:number] if not machine.fits(other) and other.ranks == each.ranks]
        assert all(needs(each) < needs(other) for other in before), "needs less than failed candidates"
    assert result.history.memory_scale == pytest.approx(1.5, rel=0.05)
    assert all(result.history.can_fit(each) for each in result.ranking if each.key not in result.history.tried)


def test_unknown_memory_limit_does_not_change_the_scale(tmp_path: Path) -> None:
    """Use a process limit (ulimit -v) far below the machine's memory."""
    tuner = tuned(memory=64 << 30)
    limited = SimulatedMachine(tuned(memory=900 << 20).target, {})
    result = search_on(limited, tuner, 10, tmp_path)
    assert result.history.smallest_failure(1) and result.history.memory_scale == pytest.approx(1.0, abs=0.05)
    assert result.best is not None and limited.fits(result.best)


def test_interrupted_search_resumes(tmp_path: Path) -> None:
    tuner = tuned(memory=1100 << 20)
    whole = search_on(SimulatedMachine(tuner.target, {"tp=2": 0.5}), tuner, 6, tmp_path / "whole")
    machine = SimulatedMachine(tuner.target, {"tp=2": 0.5})

    def interrupted(each: Candidate, best: float | None) -> TrialOutcome:
        if len(machine.tried) == 3:
            raise KeyboardInterrupt
        return machine.attempt(each, best)

    with pytest.raises(KeyboardInterrupt):
        search(tuner, space_of(tuner), 6, Journal(tmp_path, {"words": 1}), interrupted)
    assert len(json.loads((tmp_path / TRIALS_FILE).read_text())["trials"]) == 3
    resumed = search(tuner, space_of(tuner), 6, Journal(tmp_path, {"words": 1}), machine.attempt)
    assert len(machine.tried) == sum(out.times for _, out in resumed.history.tried.values())
    assert resumed.best == whole.best
    assert list(resumed.history.tried) == list(whole.history.tried)


def test_trials_of_another_search_are_rejected(tmp_path: Path) -> None:
    tuner = tuned("trainer.recompute=none", "trainer.zero=1")
    search_on(SimulatedMachine(tuner.target, {}), tuner, 1, tmp_path)
    with pytest.raises(ConfigError, match="another search, which differs in the command line"):
        Journal(tmp_path, {"words": []})
    (tmp_path / TRIALS_FILE).write_text("[")
    with pytest.raises(ConfigError, match="cannot read"):
        Journal(tmp_path, {"words": []})


def test_settings_of_the_command_line_stay_fixed() -> None:
    space = tuned("trainer.tp=2", "trainer.recompute=full", cores=4).enumerate()
    assert space.candidates
    assert {each.settings["trainer.tp"] for each in space.candidates} == {2}
    assert {each.settings["trainer.recompute"] for each in space.candidates} == {"full"}
    assert {each.settings["trainer.dp"] for each in space.candidates} == {1, 2}


def test_failed_trials_are_not_timed(tmp_path: Path) -> None:
    tuner = tuned("trainer.recompute=none", "trainer.zero=1")
    statuses = iter([MEMORY, "failed", DONE, DONE, DONE, DONE, DONE, MEMORY])

    def attempt(each: Candidate, best: float | None) -> TrialOutcome:
        status = next(statuses)
        return TrialOutcome(status, 1.0 if status == DONE else None, None, "said")

    result = search(tuner, space_of(tuner), 2, Journal(tmp_path, {}), attempt)
    assert result.best is not None and result.history.tried[result.best.key][1].status == DONE
    ends = [out.status for _, out in result.history.tried.values()]
    assert sorted(ends) == sorted([MEMORY, "failed", DONE, MEMORY]), "the repeated trial ran out of memory"


def test_close_finalists_are_repeated_alternately(tmp_path: Path) -> None:
    """Slow down each first trial, most for the fastest settings; without repeats the second would be chosen."""
    tuner = tuned("trainer.zero=1", "trainer.recompute=none", cores=1)
    machine, attempted = SimulatedMachine(tuner.target, {}), list[str]()
    fastest = min(space_of(tuner).candidates, key=machine.seconds)

    def attempt(each: Candidate, best: float | None) -> TrialOutcome:
        attempted.append(each.key)
        out, disturbed = machine.attempt(each, best), attempted.count(each.key) == 1
        return replace(out, seconds=(out.seconds or 0) * (1 + disturbed * (0.06 if each is fastest else 0.02)))

    result = search(tuner, space_of(tuner), 4, Journal(tmp_path, {}), attempt)
    repeats = attempted[len(set(attempted)) :]
    assert result.best is fastest and len(repeats) == 2 * len(set(repeats))
    assert repeats[: len(repeats) // 2] * 2 == repeats
    trials = json.loads((tmp_path / TRIALS_FILE).read_text())["trials"]
    recorded = {each["settings"]: each["outcome"] for each in trials}
    assert recorded[fastest.key]["times"] == 3 and recorded[fastest.key]["seconds"] == pytest.approx(fastest.seconds)


def test_trials_correct_the_forecast_of_other_candidates() -> None:
    tuner = tuned(memory=1100 << 20)
    machine, history = SimulatedMachine(tuner.target, {"tp=2": 3.0}), TrialHistory(tuner.target)
    some = [each for each in space_of(tuner).candidates if each.settings["trainer.recompute"] == "none"]
    others = [each for each in space_of(tuner).candidates if each.settings["trainer.recompute"] == "full"]
    for each in some[:12]:
        history.add(each, TrialOutcome(DONE, machine.seconds(each)))
    assert {each.settings["trainer.tp"] for each in some[:12]} == {1, 2}
    ratios = [seconds / each.seconds for seconds, each in zip(history.predict_seconds(others), others, strict=True)]
    slow = [ratio for ratio, each in zip(ratios, others, strict=True) if each.settings["trainer.tp"] == 2]
    fast = [ratio for ratio, each in zip(ratios, others, strict=True) if each.settings["trainer.tp"] == 1]
    assert min(slow) > 1.7 * max(fast), "no trial of these candidates"


CHIPS = {"llama2_7b_qnli_trainium": "trn1", "llama2_70b_lora_gaudi": "gaudi2"}


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_shipped_recipes_are_candidates(recipe: str) -> None:
    """The search includes each recipe, so its best candidate is at least as fast in the same forecast."""
    config = parse_overrides([f"experiment={recipe}", "data=mock", "dry_run=true", *NO_FILES])
    ranks = Grid.of(config.trainer).world_size
    cluster = ClusterConfig(device=CHIPS.get(recipe, "h100"), nodes=max(1, ranks // 8))
    target, problems = find_target(config, cluster, ())
    assert target is not None and not problems
    tuner = Tuner(config, {}, target)
    settings = {name: value for name in TUNED if (value := get(config, name)) is not None}
    size = settings.pop("trainer.micro_batch_size")
    layouts = [layout for layout in tuner.layouts(ranks) if settings.items() <= layout.items()]
    assert any(size in tuner._micro_batches(layout) for layout in layouts)
