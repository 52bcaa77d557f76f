"""Each rule fires on a config that breaks it, lets its neighbour pass, and gives advice that works."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from megatron_llama.config import PRECISIONS
from megatron_llama.config.fields import settings_by_name
from megatron_llama.config.limits import LIMITS, check_limits
from megatron_llama.plan.rules import RULES, datasets, finetune, layout, schedule
from megatron_llama.plan.rules.rule import Rule, check_rules
from tests.config.helpers import make, problems_of, put
from tests.plan.rule_cases import CASES, Case

ADVISED = re.compile(r"""([a-z_]+(?:\.[a-z_]+)+)=(\[[^\]]*\]|'".*?"'|[^\s,;]+)""")


def as_typed(advice: str) -> tuple[str, Any]:
    """``name=value`` from a message, as a shell and then Hydra's grammar read it."""
    (word,) = shlex.split(advice)
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override(), f"{advice} would be refused"
    return override.key_or_group, override.value()


def everything_exists(path: str) -> bool:
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(map(str, case.bad.values()))}")
def test_a_rule_fires_and_its_neighbour_passes(case: Case) -> None:
    fired = [
        problem for rule in RULES if rule.name == case.rule for problem in rule.check(make(**case.bad), case.world)
    ]
    assert len(fired) == 1
    assert case.advice in fired[0].instead
    assert fired[0] in problems_of(make(**case.bad), case.world, exists=everything_exists)
    assert problems_of(make(**case.good), case.world, exists=everything_exists) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(map(str, case.bad.values()))}")
def test_following_the_advice_ends_the_problem(case: Case) -> None:
    """The first ``section.name=value`` in the advice is written into the config; the rule must then be silent."""
    (problem,) = [
        found for rule in RULES if rule.name == case.rule for found in rule.check(make(**case.bad), case.world)
    ]
    advised = ADVISED.search(problem.instead)
    if advised is None or advised[1].endswith("_target_"):
        assert re.search("start it on|=cosine|leave data", problem.instead)
        return
    config = make(**case.bad)
    put(config, *as_typed(advised[0]))
    still = [problem for rule in RULES if rule.name == case.rule for problem in rule.check(config, case.world)]
    assert still == [], f"advised {advised[0]}"


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


def test_no_rule_is_left_out_of_the_tuple() -> None:
    defined = [value for module in (layout, schedule, datasets, finetune) for value in vars(module).values()]
    assert {rule.name for rule in defined if isinstance(rule, Rule)} == {rule.name for rule in RULES}
    assert len(set(RULES)) == len(RULES)


def _neighbours() -> dict[str, tuple[list[Any], list[Any]]]:
    """Values that are wrong on their own, and values next to them that are right, for every limited setting."""
    table: dict[str, tuple[list[Any], list[Any]]] = {
        "trainer.precision": (["fp16", "", "BF16SR"], list(PRECISIONS)),
        "trainer.recompute": (["some"], ["none", "selective", "full"]),
        "trainer.zero": ([-1, 4], [0, 1, 2, 3]),
        "trainer.seed": ([-1, 2**31], [0, 2**31 - 1]),
        "optim.name": (["adagrad"], ["adamw", "adam", "sgd"]),
        "device.name": (["gpu"], ["auto", "cpu", "cuda"]),
        "model.rope_scaling.rope_type": (["yarn"], ["llama3"]),
        "data.kind": (["chat"], ["pretrain", "sft"]),
        "data.chat_template": (["llama", ""], ["own", "chatml", "plain"]),
        "data.template": (["mnli"], ["qnli", "sst2", None]),
        "optim.warmup_ratio": ([-0.1, 1.1], [0, 0.03, 1]),
        "optim.betas": ([[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.9, 0.9]], [[0.0, 0.999]]),
        "data.split": (["969,30", "a,b,c", "0,1,1", "1,-1,1", ""], ["1,0,0", "0.9,0.05,0.05"]),
        "data.prefixes": (
            [["0.5"], [0.5, "a", "b"], [0.5, "a", 0.5], ["a", 0.5], [0, "a"], [-1, "a", 2, "b"], [" "]],
            [["a"], ["a", "b"], [0.5, "a", "0.5", "b"]],
        ),
        "checkpoint.resume": (["", " "], ["auto", "never"]),
        "finetune.method": (["qlora", "LoRA"], ["none", "full", "lora"]),
        "finetune.frozen_dtype": (["int4", "bfloat16"], ["fp32", "bf16", "int8", "nf4", None]),
        "finetune.lora_dropout": ([-0.1, 1.0], [0.0, 0.99]),
        "finetune.lora_target_modules": ([[], ["c_attn"], ["q_proj", "q_proj"]], [["down_proj", "q_proj"]]),
        "finetune.modules_to_save": ([["wte"], ["norm", "norm"]], [[], ["lm_head", "norm"]]),
    }
    for name in LIMITS:
        if LIMITS[name].rule.startswith("must be at least"):
            least = int(LIMITS[name].rule.split()[-1])
            table[name] = ([least - 1, least - 2], [least])
        elif LIMITS[name].rule == "must be above 0":
            table[name] = ([0, -1e-9], [1e-9])
    return table


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_that_is_wrong_on_its_own(name: str) -> None:
    wrong, right = _neighbours()[name]
    for value in wrong:
        config = make(**{name: value})
        found = [problem for problem in problems_of(config, exists=everything_exists) if problem.field == name]
        assert [problem.rule for problem in found] == [LIMITS[name].rule], value
        advised = as_typed(found[0].instead.removeprefix("write "))
        assert advised[0] == name and LIMITS[name].holds(advised[1]), found[0].instead
    for value in right:
        found = problems_of(make(**{name: value}), exists=everything_exists)
        assert not [problem for problem in found if problem.rule == LIMITS[name].rule and problem.field == name], value


def test_every_number_has_a_limit() -> None:
    numbers = {name for name, setting in settings_by_name().items() if setting.kind in (int, float)}
    assert numbers <= set(LIMITS)


def test_no_number_is_infinite() -> None:
    settings = settings_by_name().items()
    # rope_scaling is a section that is null here.
    numbers = {name for name, setting in settings if setting.kind in (int, float) and "rope_scaling" not in name}
    for value in (math.inf, -math.inf, math.nan):
        assert {problem.field for problem in check_limits(make(**dict.fromkeys(numbers, value)))} == numbers


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


def test_a_hopeless_value_does_not_set_off_the_rules_that_read_it() -> None:
    broken = check_rules(RULES, make(**{"trainer.tp": 3}), 8)
    assert {problem.field for problem in broken} == {"trainer.tp"} and len(broken) > 1
    assert check_rules(RULES, make(**{"trainer.tp": 3}), 8, skip_fields={"trainer.tp"}) == []


def test_advice_counts_the_devices_only_where_they_are_fixed() -> None:
    """On a CPU ``trainer.tp=3`` means three ranks, and 2 or 4 are as good; on 6 accelerators only 2 is."""
    on_cpu = check_rules(RULES, make(**{"trainer.tp": 3}), 3)
    assert {problem.instead for problem in on_cpu} == {"write trainer.tp=2 or 4"}
    on_six = check_rules(RULES, make(**{"trainer.tp": 3, "trainer.global_batch_size": 6}), 6)
    assert {problem.instead for problem in on_six} == {"write trainer.tp=2"}
