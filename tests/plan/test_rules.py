"""Each rule fires on a config that breaks it, lets a similar one pass, and gives advice that works."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tracemalloc
from typing import Any

import pytest

from megatron_llama.config import Config
from megatron_llama.config.problems import Problem, format_problems
from megatron_llama.plan import rules
from megatron_llama.plan.defaults_and_notes import choose_defaults
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.conflicts import ROWS
from megatron_llama.plan.rules.rule import Rule, check_rules
from tests.config.helpers import as_typed, everything_exists, make, problems_of, put
from tests.golden import GoldenFiles
from tests.plan.rule_cases import CASES, Case, parse_settings

ADVISED = re.compile(r"""([a-z_\d]+(?:\.[a-z_\d]+)+|allow_targets)=(\[(?:[^][]|\[[^]]*\])*\]|'".*?"'|[^\s,;]+)""")


def chosen(**changes: Any) -> Config:
    """Return a config as rules receive it, with all defaults chosen."""
    return choose_defaults(make(**changes))[0]


def fired(case: Case, config: Config) -> list[Problem]:
    return [p for rule in RULES if rule.check.__name__ == case.rule for p in rule.check(config, case.world)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}: {case.bad}"[:80])
def test_a_rule_fires_until_its_advice_is_followed(case: Case) -> None:
    bad, change = parse_settings(case.bad), parse_settings(case.change)
    (problem,) = fired(case, chosen(**bad))
    assert problem in problems_of(make(**bad), case.world, exists=everything_exists)
    assert problems_of(make(**{**bad, **change}), case.world, exists=everything_exists) == []
    advised = ADVISED.search(problem.instead)
    if advised is None or advised[1].endswith("_target_"):
        assert re.search("start it on|=cosine|omit data|copy the list", problem.instead)
        return
    config = chosen(**bad)
    put(config, *as_typed(advised[0]))
    assert fired(case, config) == [], f"advised {advised[0]}"


def test_texts_of_refusals_and_each_rule_has_a_case() -> None:
    page, untested = [], {*RULES}
    for case in CASES:
        config = chosen(**parse_settings(case.bad))
        (problem,) = fired(case, config)
        untested -= {r for r in untested if r.check.__name__ == case.rule and [*r.check(config, case.world)]}
        text = format_problems([problem]).partition("\n\n")[2]
        page.append(f"$ {' | '.join(map(str, case))}\n{text}\n")
    assert not untested, [sorted(rule.settings) for rule in untested]
    GoldenFiles.check("plan/rules.txt", "\n".join(page))


def test_each_rule_is_in_the_tuple() -> None:
    modules = [f"{rules.__name__}.{each.name}" for each in pkgutil.iter_modules(rules.__path__)]
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    assert {value for value in values if isinstance(value, Rule)} | {*ROWS} == {*RULES}


def test_all_problems_are_reported_once() -> None:
    bad: dict[str, Any] = {"trainer.tp": 0, "trainer.zero": 7, "optim.lr": -1.0, "optim.betas": [0.9]}
    bad |= {"data.seq_length": 9999, "trainer.pipeline_layers": [1], "init_from": "none", "checkpoint.resume": "atuo"}
    assert sorted(problem.field for problem in problems_of(make(**bad), 8)) == sorted(bad)


def test_rules_that_read_a_skipped_field_are_omitted() -> None:
    broken = check_rules(RULES, chosen(**{"trainer.tp": 3}), 8)
    assert {problem.field for problem in broken} == {"trainer.tp"} and len(broken) > 1
    assert check_rules(RULES, chosen(**{"trainer.tp": 3}), 8, skip_fields={"trainer.tp"}) == []


@pytest.mark.parametrize(("ranks", "advice"), [(3, "write trainer.tp=2 or 4"), (6, "write trainer.tp=2")])
def test_advice_uses_the_number_of_devices_only_if_it_is_fixed(ranks: int, advice: str) -> None:
    """On a CPU ``trainer.tp=3`` means three ranks, and 2 or 4 are as good; on 6 accelerators only 2 is."""
    config = chosen(**{"trainer.tp": 3, "trainer.global_batch_size": 6 if ranks == 6 else 8})
    assert {problem.instead for problem in check_rules(RULES, config, ranks)} == {advice}


def test_advice_on_a_large_width_takes_no_memory() -> None:
    """A list of all multiples of the heads up to the width would take gigabytes."""
    tracemalloc.start()
    try:
        problems = check_rules(RULES, chosen(**{"model.hidden_size": 241_149_877}), 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "write model.hidden_size=241149872 or 241149880, or set model.head_dim" in {p.instead for p in problems}
    assert peak < 2**20
