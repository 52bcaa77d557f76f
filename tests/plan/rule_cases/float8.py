"""Cases of plan/rules/float8.py."""

from __future__ import annotations

from tests.plan.rule_cases.case import LORA, Case

RULE = "float8_replaces_plain_matmuls"
OVERLAP = {"trainer.async_tp": True, "trainer.tp": 2, "trainer.compile": True}
CASES = [
    Case(RULE, 2, {"trainer.float8": "rowwise", **OVERLAP}, OVERLAP, "trainer.float8=null"),
    Case(
        RULE,
        1,
        {"trainer.float8": "tensorwise", **LORA, "finetune.frozen_dtype": "int8"},
        {"trainer.float8": "tensorwise", **LORA},
        "trainer.float8=null",
    ),
]
