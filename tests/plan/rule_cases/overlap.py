"""Cases of plan/rules/layout.py."""

from __future__ import annotations

from typing import Any

from tests.plan.rule_cases.case import Case

RULE = "async_tp_has_collectives"
GOOD: dict[str, Any] = {"trainer.async_tp": True, "trainer.tp": 2, "trainer.compile": True}
CASES = [
    Case(RULE, 1, {**GOOD, "trainer.tp": 1}, {"trainer.compile": True}, "trainer.async_tp=false"),
    Case(RULE, 2, {**GOOD, "trainer.sp": False}, {**GOOD, "trainer.sp": True}, "trainer.sp=true"),
    Case(RULE, 2, {**GOOD, "data.seq_length": 255}, {**GOOD, "data.seq_length": 256}, "data.seq_length=256"),
    Case(RULE, 2, {**GOOD, "trainer.compile": False}, GOOD, "trainer.compile=true"),
]
