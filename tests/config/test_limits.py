"""Values outside a setting's own limits are rejected, and the nearest legal values are accepted."""

from __future__ import annotations

import math

import pytest

from megatron_llama.config import Config
from megatron_llama.config.fields import check_limits, settings_by_name
from tests.config.bounds import BOUNDS
from tests.config.helpers import as_typed, everything_exists, make, problems_of


@pytest.mark.parametrize("name", BOUNDS)
def test_a_value_that_is_wrong_on_its_own(name: str) -> None:
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


def test_every_limited_setting_has_bounds_here() -> None:
    assert BOUNDS.keys() == {name for name, setting in settings_by_name().items() if setting.limit is not None}


def test_every_number_has_a_limit() -> None:
    numbers = [setting for setting in settings_by_name().values() if setting.kind in (int, float)]
    assert all(setting.limit is not None for setting in numbers)


def test_every_default_and_every_example_is_legal() -> None:
    assert check_limits(Config()) == []
    for setting in settings_by_name().values():
        if setting.limit is not None:
            assert setting.limit.holds(as_typed(f"{setting.name}={setting.limit.example}")[1]), setting.name


def test_no_number_is_infinite() -> None:
    settings = settings_by_name().items()
    # Some sections of the model are null here.
    numbers = {name for name, setting in settings if setting.kind in (int, float) and name.count(".") == 1}
    for value in (math.inf, -math.inf, math.nan):
        assert {problem.field for problem in check_limits(make(**dict.fromkeys(numbers, value)))} == numbers
