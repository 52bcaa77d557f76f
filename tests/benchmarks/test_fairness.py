"""A contestant that does other work than its task says is found, whatever differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.runner import unfair
from benchmarks.harness.task import checksum
from tests.benchmarks.recorded import FACTS, FIRST_LOSS, TASK


def test_an_equal_contestant_is_fair() -> None:
    assert unfair(TASK, FACTS, FIRST_LOSS, "2.13.0") == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parameters": 4999}, "parameters: 4999, not 5000"),
        ({"weight_dtype": "bfloat16"}, "dtype of the weights: bfloat16, not float32"),
        ({"compute_dtype": "bfloat16"}, "dtype of the products: bfloat16, not float32"),
        ({"tokens_per_step": 20}, "tokens of a step: 20, not 40"),
        ({"tokens_checksum": checksum(TASK.text(2)[:, :-1])}, "checksum of the first tokens"),
        ({"clip": None}, "largest gradient norm: None, not 1.0"),
        ({"versions": {"torch": "2.12.0"}}, "torch: 2.12.0, not 2.13.0"),
    ],
)
def test_another_config_is_named(changed: dict[str, Any], said: str) -> None:
    found = unfair(TASK, replace(FACTS, **changed), FIRST_LOSS, "2.13.0")
    assert len(found) == 1 and found[0].startswith(said)


def test_a_loss_of_another_normalization_is_named() -> None:
    found = unfair(TASK, FACTS, FIRST_LOSS * 4, "2.13.0")
    assert found == ["first loss: 27.8000, not within 10% of 6.9078"]


def test_bf16_products_are_demanded_where_bf16_is_asked_for() -> None:
    found = unfair(replace(TASK, precision="bf16"), FACTS, FIRST_LOSS, "2.13.0")
    assert found == ["dtype of the products: float32, not bfloat16"]


def test_tokens_differ_from_step_to_step_and_are_the_same_again() -> None:
    assert checksum(TASK.text(1)) == checksum(TASK.text(1)) != checksum(TASK.text(2))
