"""Values outside a setting's own limits are rejected, and the nearest legal values are accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_llama.config import Config
from megatron_llama.config.problems import format_problems
from megatron_llama.config.settings_table import check_limits, settings_by_name
from tests.config.helpers import as_typed, everything_exists, make, problems_of
from tests.golden import GoldenFiles

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = yaml.safe_load(
    Path(__file__).with_name("bounds.yaml").read_text(encoding="utf-8")
)
for factors in ("short_factor", "long_factor"):
    for values, most in zip(BOUNDS[f"model.rope_scaling.{factors}"], (8193, 8192), strict=True):
        values.append([1.0] * most)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    wrong, right = BOUNDS[name]
    limit = settings_by_name()[name].limit
    assert limit is not None
    for value in wrong:
        problems = [one for one in problems_of(make(**{name: value}), exists=everything_exists) if one.field == name]
        assert [problem.rule for problem in problems] == [limit.rule], value
        advised, example = as_typed(problems[0].instead.removeprefix("write "))
        assert advised == name and limit.holds(example), problems[0].instead
    for value in right:
        assert check_limits(make(**{name: value})) == [], value


def test_texts_of_limits() -> None:
    names = [name for name in BOUNDS if BOUNDS[name][0] != BOUNDS["trainer.tp"][0]]
    page = []
    for name in names:
        for value in (each for each in BOUNDS[name][0] if len(str(each)) < 100):
            problems = [
                one for one in problems_of(make(**{name: value}), exists=everything_exists) if one.field == name
            ]
            page += format_problems(problems).splitlines()[2:]
    GoldenFiles.check("config/limits.txt", "\n".join(page))


def test_each_number_has_a_limit_that_its_examples_keep() -> None:
    settings = settings_by_name().values()
    assert all(setting.limit is not None for setting in settings if setting.kind in (int, float))
    assert BOUNDS.keys() == {setting.name for setting in settings if setting.limit is not None}
    assert check_limits(Config()) == []
    for setting in settings_by_name().values():
        if setting.limit is not None:
            assert setting.limit.holds(as_typed(f"{setting.name}={setting.limit.example}")[1]), setting.name
    settings = settings_by_name().items()
    # Some sections of the model are null here.
    numbers = {name for name, setting in settings if setting.kind in (int, float) and name.count(".") == 1}
    for value in (math.inf, -math.inf, math.nan):
        assert {problem.field for problem in check_limits(make(**dict.fromkeys(numbers, value)))} == numbers
