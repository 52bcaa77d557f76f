"""For each rule: settings that break it, a part of its advice, and similar settings that pass; a file for each of
plan/rules/."""

from __future__ import annotations

from tests.plan.rule_cases import (
    context,
    curricula,
    datasets,
    exact,
    finetune,
    float8,
    layout,
    optimizer,
    overlap,
    quantization,
    schedule,
    token_dropping,
)
from tests.plan.rule_cases.case import Case

FILES = (
    *(context, curricula, datasets, exact, finetune, float8, layout, overlap, quantization, schedule),
    *(token_dropping, optimizer),
)
CASES: list[Case] = [case for file in FILES for case in file.CASES]
