"""The search: the forecast corrected by trials that may run out of memory, against an exhaustive trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_llama.config import ConfigError
from megatron_llama.tools.tune.candidates import Candidate
from megatron_llama.tools.tune.search import TrialHistory, search
from megatron_llama.tools.tune.trial import DONE, FILE, MEMORY, Journal, TrialOutcome
from tests.tools.tune.searches import Machine, best_of_all, found_on, space_of, tuned

FACTORS = {
    "as forecast": {},
    "tensor parallelism is dear": {"tp=2": 3.0},
    "one process is slow": {"dp=1": 1.5, "pp=2": 0.4},
    "small micro batches are dear": {
        "micro_batch_size=1": 2.0,
        "micro_batch_size=2": 1.4,
        "recompute=elementwise": 0.8,
    },
    "sharding is dear": {"zero=3": 1.6, "zero=2": 1.3, "zero=1": 1.1, "tp=2": 0.8},
}


@pytest.mark.parametrize(
    ("factors", "memory"),
    [*((factors, 1.35) for factors in FACTORS.values()), (FACTORS["one process is slow"], 1.0)],
    ids=[*FACTORS, "memory as forecast"],
)
def test_within_5_percent_of_an_exhaustive_trial(factors: dict[str, float], memory: float, tmp_path: Path) -> None:
    of = tuned(memory=1100 << 20)
    machine = Machine(of.target, factors, memory)
    found = found_on(machine, of, 11, tmp_path)
    assert found.best is not None and found.knowledge.best is not None
    assert machine.fits(found.best) and found.knowledge.timed <= 11 < found.space.looked_at / 3
    assert machine.seconds(found.best) <= 1.05 * best_of_all(machine, of)


def test_the_forecast_alone_would_not_do(tmp_path: Path) -> None:
    of = tuned(memory=1100 << 20)
    machine = Machine(of.target, FACTORS["one process is slow"], 1.35)
    first = space_of(of).candidates[0]
    assert not machine.fits(first) or machine.seconds(first) > 1.05 * best_of_all(machine, of)


def test_running_out_of_memory_is_learned_from(tmp_path: Path) -> None:
    of = tuned(memory=900 << 20)
    machine = Machine(of.target, {}, 1.5)
    found = found_on(machine, of, 10, tmp_path)

    def needs(each: Candidate) -> float:
        return each.grown_peak(1.5)

    failed = [each for each in machine.tried if not machine.fits(each)]
    assert failed, "the forecast is too low here"
    for number, each in enumerate(machine.tried):
        before = [other for other in machine.tried[:number] if not machine.fits(other) and other.ranks == each.ranks]
        assert all(needs(each) < needs(other) for other in before), "what needs as much as a failure is not tried"
    assert found.knowledge.memory_scale == pytest.approx(1.5, rel=0.05)
    assert all(found.knowledge.may_fit(each) for each in found.order if each.key not in found.knowledge.tried)


def test_a_limit_that_is_not_known_teaches_no_scale(tmp_path: Path) -> None:
    """Under ulimit -v the machine seems to have more than a process gets."""
    of = tuned(memory=64 << 30)
    limited = Machine(tuned(memory=900 << 20).target, {})
    found = found_on(limited, of, 10, tmp_path)
    assert found.knowledge.smallest_failure(1) and found.knowledge.memory_scale == pytest.approx(1.0, abs=0.05)
    assert found.best is not None and limited.fits(found.best)


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    of = tuned(memory=1100 << 20)
    whole = found_on(Machine(of.target, {"tp=2": 0.5}), of, 6, tmp_path / "whole")
    machine = Machine(of.target, {"tp=2": 0.5})

    def interrupted(each: Candidate, best: float | None) -> TrialOutcome:
        if len(machine.tried) == 3:
            raise KeyboardInterrupt
        return machine.attempt(each, best)

    with pytest.raises(KeyboardInterrupt):
        search(of, space_of(of), 6, Journal(tmp_path, {"words": 1}), interrupted)
    assert len(json.loads((tmp_path / FILE).read_text())["trials"]) == 3
    again = search(of, space_of(of), 6, Journal(tmp_path, {"words": 1}), machine.attempt)
    assert len(machine.tried) == sum(out.times for _, out in again.knowledge.tried.values())
    assert again.best == whole.best
    assert list(again.knowledge.tried) == list(whole.knowledge.tried)


def test_trials_of_another_search_are_refused(tmp_path: Path) -> None:
    of = tuned("trainer.recompute=none", "trainer.zero=1")
    found_on(Machine(of.target, {}), of, 1, tmp_path)
    with pytest.raises(ConfigError, match="another search, which differs in words"):
        Journal(tmp_path, {"words": []})
    (tmp_path / FILE).write_text("[")
    with pytest.raises(ConfigError, match="can't be read"):
        Journal(tmp_path, {"words": []})


def test_what_is_given_stays() -> None:
    space = tuned("trainer.tp=2", "trainer.recompute=full", cores=4).enumerate()
    assert space.candidates
    assert {each.settings["trainer.tp"] for each in space.candidates} == {2}
    assert {each.settings["trainer.recompute"] for each in space.candidates} == {"full"}
    assert {each.settings["trainer.dp"] for each in space.candidates} == {1, 2}


def test_a_trial_that_fails_is_no_measurement(tmp_path: Path) -> None:
    of = tuned("trainer.recompute=none", "trainer.zero=1")
    statuses = iter([MEMORY, "failed", DONE, DONE, DONE, DONE, DONE, MEMORY])

    def attempt(each: Candidate, best: float | None) -> TrialOutcome:
        status = next(statuses)
        return TrialOutcome(status, 1.0 if status == DONE else None, None, "said")

    found = search(of, space_of(of), 2, Journal(tmp_path, {}), attempt)
    assert found.best is not None and found.knowledge.tried[found.best.key][1].status == DONE
    ends = [out.status for _, out in found.knowledge.tried.values()]
    assert sorted(ends) == sorted([MEMORY, "failed", DONE, MEMORY]), "the last one ran out of memory when tried again"


def test_what_is_close_is_tried_again_in_turn(tmp_path: Path) -> None:
    """Each first trial is disturbed, the fastest settings' most: tried once, the second would be chosen."""
    of = tuned("trainer.zero=1", "trainer.recompute=none", cores=1)
    machine, seen = Machine(of.target, {}), list[str]()
    fastest = min(space_of(of).candidates, key=machine.seconds)

    def attempt(each: Candidate, best: float | None) -> TrialOutcome:
        seen.append(each.key)
        out, disturbed = machine.attempt(each, best), seen.count(each.key) == 1
        return replace(out, seconds=(out.seconds or 0) * (1 + disturbed * (0.06 if each is fastest else 0.02)))

    found = search(of, space_of(of), 4, Journal(tmp_path, {}), attempt)
    again = seen[len(set(seen)) :]
    assert found.best is fastest and len(again) == 2 * len(set(again)) and again[: len(again) // 2] * 2 == again
    saved = {each["settings"]: each["outcome"] for each in json.loads((tmp_path / FILE).read_text())["trials"]}
    assert saved[fastest.key]["times"] == 3 and saved[fastest.key]["seconds"] == pytest.approx(fastest.seconds)


def test_trials_correct_the_forecast_of_those_with_the_same_values() -> None:
    of = tuned(memory=1100 << 20)
    machine, known = Machine(of.target, {"tp=2": 3.0}), TrialHistory(of.target)
    some = [each for each in space_of(of).candidates if each.settings["trainer.recompute"] == "none"]
    others = [each for each in space_of(of).candidates if each.settings["trainer.recompute"] == "full"]
    for each in some[:12]:
        known.add(each, TrialOutcome(DONE, machine.seconds(each)))
    assert {each.settings["trainer.tp"] for each in some[:12]} == {1, 2}
    ratios = [seconds / each.seconds for seconds, each in zip(known.seconds(others), others, strict=True)]
    dear = [ratio for ratio, each in zip(ratios, others, strict=True) if each.settings["trainer.tp"] == 2]
    cheap = [ratio for ratio, each in zip(ratios, others, strict=True) if each.settings["trainer.tp"] == 1]
    assert min(dear) > 1.7 * max(cheap), "none of these was tried"
