"""Programs that do different work from their task are detected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.runner import find_mismatches
from benchmarks.harness.task import checksum
from tests.benchmarks.recorded import FACTS, FIRST_LOSS, TASK


def test_equal_work_has_no_mismatches() -> None:
    assert find_mismatches(TASK, FACTS, FIRST_LOSS, "2.13.0") == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameters": 4999}, "parameters: 4999, not 5000"),
        ({"weight_dtype": "bfloat16"}, "weight dtype: bfloat16, not float32"),
        ({"compute_dtype": "bfloat16"}, "matmul dtype: bfloat16, not float32"),
        ({"tokens_per_step": 20}, "tokens per step: 20, not 40"),
        ({"tokens_checksum": checksum(TASK.text(2)[:, :-1])}, "checksum of the first tokens"),
        ({"clip": None}, "gradient clipping: None, not 1.0"),
        ({"versions": {"torch": "2.12.0"}}, "torch: 2.12.0, not 2.13.0"),
    ],
)
def test_different_fact_is_reported(changed: dict[str, Any], message: str) -> None:
    mismatches = find_mismatches(TASK, replace(FACTS, **changed), FIRST_LOSS, "2.13.0")
    assert len(mismatches) == 1 and mismatches[0].startswith(message)


def test_loss_of_another_normalization_is_reported() -> None:
    mismatches = find_mismatches(TASK, FACTS, FIRST_LOSS * 4, "2.13.0")
    assert mismatches == ["first loss: 27.8000, not within 10% of 6.9078"]


def test_bf16_requires_bf16_matmuls() -> None:
    mismatches = find_mismatches(replace(TASK, precision="bf16"), FACTS, FIRST_LOSS, "2.13.0")
    assert mismatches == ["matmul dtype: float32, not bfloat16"]


def test_tokens_are_deterministic_and_differ_between_steps() -> None:
    assert checksum(TASK.text(1)) == checksum(TASK.text(1)) != checksum(TASK.text(2))
