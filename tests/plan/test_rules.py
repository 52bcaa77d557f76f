"""Each rule fires on a config that breaks it, lets its neighbour pass, and gives advice that works."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tracemalloc
from typing import Any

import pytest

from megatron_llama.config import Config
from megatron_llama.plan import rules
from megatron_llama.plan.choices import choose_defaults
from megatron_llama.plan.rules import RULES
from megatron_llama.plan.rules.rule import Rule, check_rules
from tests.config.helpers import as_typed, everything_exists, make, problems_of, put
from tests.plan.rule_cases import CASES, Case


def chosen(**changes: Any) -> Config:
    """A config as rules see it: nothing is left open."""
    return choose_defaults(make(**changes))[0]


ADVISED = re.compile(r"""([a-z_]+(?:\.[a-z_]+)+|allow_targets)=(\[[^\]]*\]|'".*?"'|[^\s,;]+)""")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(map(str, case.bad.values()))}")
def test_a_rule_fires_and_its_neighbour_passes(case: Case) -> None:
    fired = [
        problem
        for rule in RULES
        if rule.check.__name__ == case.rule
        for problem in rule.check(chosen(**case.bad), case.world)
    ]
    assert len(fired) == 1
    assert case.advice in fired[0].instead
    assert fired[0] in problems_of(make(**case.bad), case.world, exists=everything_exists)
    assert problems_of(make(**case.good), case.world, exists=everything_exists) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(map(str, case.bad.values()))}")
def test_following_the_advice_ends_the_problem(case: Case) -> None:
    """The first ``section.name=value`` in the advice is written into the config; the rule must then be silent."""
    (problem,) = [
        result
        for rule in RULES
        if rule.check.__name__ == case.rule
        for result in rule.check(chosen(**case.bad), case.world)
    ]
    advised = ADVISED.search(problem.instead)
    if advised is None or advised[1].endswith("_target_"):
        assert re.search("start it on|=cosine|omit data|copy the list", problem.instead)
        return
    config = chosen(**case.bad)
    put(config, *as_typed(advised[0]))
    still = [
        problem for rule in RULES if rule.check.__name__ == case.rule for problem in rule.check(config, case.world)
    ]
    assert still == [], f"advised {advised[0]}"


def test_every_rule_has_a_case() -> None:
    tested_with_a_trial = {"whole_matrices_are_on_one_rank"}  # tests/optim/test_new_optimizer.py
    assert {case.rule for case in CASES} | tested_with_a_trial == {rule.check.__name__ for rule in RULES}


def test_no_rule_is_left_out_of_the_tuple() -> None:
    modules = [
        importlib.import_module(f"{rules.__name__}.{info.name}") for info in pkgutil.iter_modules(rules.__path__)
    ]
    defined = [value for module in modules for value in vars(module).values()]
    assert {rule.check.__name__ for rule in defined if isinstance(rule, Rule)} == {
        rule.check.__name__ for rule in RULES
    }
    assert len(set(RULES)) == len(RULES)


def test_all_problems_come_at_once_and_each_only_once() -> None:
    config = make(
        **{
            "trainer.tp": 0,
            "trainer.zero": 7,
            "optim.lr": -1.0,
            "optim.betas": [0.9],
            "data.seq_length": 9999,
            "trainer.pipeline_layers": [1],
            "init_from": "nowhere",
            "checkpoint.resume": "atuo",
        }
    )
    fields = [problem.field for problem in problems_of(config, 8)]
    assert sorted(fields) == sorted(
        [
            "trainer.tp",
            "trainer.zero",
            "optim.lr",
            "optim.betas",
            "data.seq_length",
            "trainer.pipeline_layers",
            "init_from",
            "checkpoint.resume",
        ]
    )


def test_rules_that_read_a_skipped_field_are_left_out() -> None:
    broken = check_rules(RULES, chosen(**{"trainer.tp": 3}), 8)
    assert {problem.field for problem in broken} == {"trainer.tp"} and len(broken) > 1
    assert check_rules(RULES, chosen(**{"trainer.tp": 3}), 8, skip_fields={"trainer.tp"}) == []


def test_advice_counts_the_devices_only_where_they_are_fixed() -> None:
    """On a CPU ``trainer.tp=3`` means three ranks, and 2 or 4 are as good; on 6 accelerators only 2 is."""
    on_cpu = check_rules(RULES, chosen(**{"trainer.tp": 3}), 3)
    assert {problem.instead for problem in on_cpu} == {"write trainer.tp=2 or 4"}
    on_six = check_rules(RULES, chosen(**{"trainer.tp": 3, "trainer.global_batch_size": 6}), 6)
    assert {problem.instead for problem in on_six} == {"write trainer.tp=2"}


def test_advice_on_a_width_of_any_size_takes_no_memory() -> None:
    """Listing all multiples of the heads up to the width would take gigabytes for a typing error."""
    tracemalloc.start()
    try:
        problems = check_rules(RULES, chosen(**{"model.hidden_size": 241_149_877}), 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "write model.hidden_size=241149872 or 241149880, or set model.head_dim" in {p.instead for p in problems}
    assert peak < 2**20
